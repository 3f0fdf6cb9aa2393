"""Connecting can be given up from another thread, however silent the peer, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from common.dataplane.port import DataPlane, DataPlaneError
from common.dataplane.shm import ShmDataPlane
from common.dataplane.tcp import TcpDataPlane
from contracts.dataplane import RegionDescriptor
from tests.contract.dataplane.bench import NOW, PATIENCE_S, soon


class Silence:
    """An address where somebody accepts and never says a word, and this process's end of the transport."""

    def __init__(self, transport: str, folder: Path, backlog: int) -> None:
        self.plane: DataPlane
        if transport == "tcp":
            self.plane = TcpDataPlane("127.0.0.1", peer_id="w", incarnation="i1", now=NOW)
            self.listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
            opaque = f"127.0.0.1:{self.listener.getsockname()[1]}"
        else:
            self.plane = ShmDataPlane(folder / "own", peer_id="w", incarnation="i1", now=NOW)
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opaque = os.fspath(folder / "silent.sock")
            self.listener.bind(opaque)
            self.listener.listen(backlog)
        self.listener.settimeout(PATIENCE_S)
        self.descriptor = RegionDescriptor(
            transport=transport,
            peer_id="silent",
            incarnation="i1",
            region_id="r",
            base=0,
            length=1,
            num_cells=1,
            opaque=opaque,
        )

    def close(self) -> None:
        """Go."""
        self.listener.close()
        self.plane.close()


@pytest.fixture(params=["shm", "tcp"])
def silence(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Silence]:
    """A silent peer on either transport."""
    made = Silence(request.param, tmp_path, backlog=8)
    yield made
    made.close()


def test_a_peer_that_accepts_and_says_nothing_is_given_up(silence: Silence) -> None:
    """The peer sees the connection's end, long before the deadline."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(silence.plane.connect, silence.descriptor, soon(), stop)
        accepted = silence.listener.accept()[0]
        accepted.settimeout(PATIENCE_S)
        assert accepted.recv(1 << 16), "it asked for the region"
        assert not connecting.done()
        stop.set()
        with pytest.raises(DataPlaneError, match="told to stop"):
            connecting.result(PATIENCE_S / 2)
        assert accepted.recv(1) == b""
        accepted.close()


def test_who_was_told_to_stop_before_does_not_begin(silence: Silence) -> None:
    """An order that comes early counts."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(DataPlaneError, match="told to stop"):
        silence.plane.connect(silence.descriptor, soon(), stop)


def test_a_host_that_swallows_packets_is_given_up(tmp_path: Path) -> None:
    """A listener whose queue is full drops what comes, as a firewall does."""
    stop = threading.Event()
    silent = Silence("tcp", tmp_path, backlog=0)
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        stack.callback(silent.close)
        stack.enter_context(socket.create_connection(silent.listener.getsockname()))
        connecting = pool.submit(silent.plane.connect, silent.descriptor, soon(), stop)
        assert not connecting.done()
        stop.set()
        with pytest.raises(DataPlaneError, match="told to stop"):
            connecting.result(PATIENCE_S / 2)
