"""A worker knocks at a peer's memory before its engine connects: what does not answer takes no place among its links."""

from __future__ import annotations

import asyncio
import socket

import pytest

from contracts.dataplane import RegionDescriptor
from contracts.errors import ErrorCode, PdmeshError
from services.prefill import reachability
from services.prefill.reachability import knock


def region(address: str, transport: str = "tcp") -> RegionDescriptor:
    """A region that is said to listen there."""
    return RegionDescriptor(
        transport=transport,
        peer_id="decode-0",
        incarnation="i0",
        region_id="r",
        base=0,
        length=1,
        num_cells=1,
        opaque=address,
    )


def listener(backlog: int) -> socket.socket:
    """A socket that listens on a free loopback port."""
    sock = socket.create_server(("127.0.0.1", 0), backlog=backlog)
    sock.setblocking(False)
    return sock


def address_of(sock: socket.socket) -> str:
    """Where it listens, as descriptors spell it."""
    return f"127.0.0.1:{sock.getsockname()[1]}"


async def test_whoever_listens_is_reached_and_left_at_once() -> None:
    """Each address is tried once, whatever the number of regions behind it; the connection is ended."""
    with listener(8) as sock:
        await knock([region(address_of(sock)), None, region(address_of(sock)), region("/run/x", "shm")])
        connection, _ = sock.accept()
        with connection:
            connection.setblocking(False)
            async with asyncio.timeout(10.0):
                assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
        with pytest.raises(BlockingIOError):
            sock.accept()


async def test_nobody_there_is_said_by_address() -> None:
    """A closed port answers at once."""
    with listener(1) as sock:
        address = address_of(sock)
    with pytest.raises(PdmeshError, match=f"no connection to {address}") as caught:
        await knock([region(address)])
    assert caught.value.code is ErrorCode.TRANSFER_FAILED


async def test_a_host_that_swallows_packets_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full drops what comes, as a firewall does."""
    monkeypatch.setattr(reachability, "KNOCK_S", 0.05)
    with (
        listener(0) as sock,
        socket.create_connection(sock.getsockname()),
        pytest.raises(PdmeshError, match=r"within 0\.05 s: TimeoutError"),
    ):
        await knock([region(address_of(sock))])


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:x", "127.0.0.1:99999999", "host.invalid:1"])
async def test_an_address_that_is_none_is_refused(address: str) -> None:
    """A peer may say whatever it likes: it is an error of that peer, never of this worker."""
    with pytest.raises(PdmeshError, match="no connection to"):
        await knock([region(address)])
