"""The owner of a region over TCP counts whom it turns away, and why; what it serves, and what breaks, is not counted."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.dataplane.port import Outcome, Quiescence, WriteGrant
from common.dataplane.tcp_remote import address_of
from common.dataplane.tcp_wire import PREFIX, Hello, Operation, encode_batch, encode_begin, encode_hello
from contracts.dataplane import Asked, RefusalReason
from tests.contract.dataplane.bench import GOOD, GRANT, LENGTH, NUM_CELLS, PATIENCE_S, WHOLE, Bench, make_bench, soon

Refusal = tuple[Asked, RefusalReason]


@pytest.fixture
def tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Two endpoints over TCP."""
    made = make_bench("tcp", tmp_path, monkeypatch)
    yield made
    made.close()


def say(bench: Bench, data: bytes, **changes: object) -> None:
    """Greet as a peer does, with `changes`; say `data` as no peer of ours would, and wait until the owner ends the connection."""
    own = bench.target.descriptor
    hello = Hello(
        peer_id=own.peer_id,
        incarnation=own.incarnation,
        region_id=own.region_id,
        generation=own.generation,
        length=own.length,
        num_cells=own.num_cells,
    )
    greeting = encode_hello(msgspec.structs.replace(hello, **changes))
    with socket.create_connection(address_of(own), PATIENCE_S) as connection, contextlib.suppress(OSError):
        connection.sendall(greeting + data)  # some of it comes too late: it has been sent away
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def begin(grant: WriteGrant, *segments: tuple[int, int], operation: Operation = Operation.WRITE) -> bytes:
    """The head of a transfer of these pieces."""
    head = encode_begin(operation, grant, PATIENCE_S, num_batches=1, num_first=len(segments))
    table = encode_batch(len(segments), sum(length for _, length in segments))
    return (
        head + np.array(grant.cells, "<u4").tobytes() + table + b"".join(struct.pack("<QQ", *one) for one in segments)
    )


OLD = msgspec.structs.replace(GRANT, generation=GRANT.generation - 1)
TO_COME = msgspec.structs.replace(GRANT, generation=GRANT.generation + 1)
FORGED = msgspec.structs.replace(GRANT, secret=bytes(16))
NO_CELL = msgspec.structs.replace(GRANT, cells=(1, NUM_CELLS))
OTHER_LOCK = msgspec.structs.replace(GRANT, lock_cell=NUM_CELLS)
RAW: dict[str, tuple[bytes, dict[str, object], Refusal]] = {
    "another region": (b"", {"region_id": "other"}, (Asked.CONNECT, RefusalReason.REGION)),
    "an earlier start": (b"", {"incarnation": "i0"}, (Asked.CONNECT, RefusalReason.REGION)),
    "no transfer": (b"\xff" * 64, {}, (Asked.CONNECT, RefusalReason.MALFORMED)),
    "no such cell": (begin(NO_CELL, (0, 8)), {}, (Asked.WRITE, RefusalReason.CELLS)),
    "no such slot": (begin(OTHER_LOCK, (0, 8)), {}, (Asked.WRITE, RefusalReason.CELLS)),
    "more cells than there are": (
        begin(msgspec.structs.replace(GRANT, cells=(1,) * (NUM_CELLS + 1)), (0, 8)),
        {},
        (Asked.WRITE, RefusalReason.CELLS),
    ),
    "out of bounds": (begin(GRANT, (LENGTH - 7, 8)), {}, (Asked.WRITE, RefusalReason.BOUNDS)),
    "a read out of bounds": (
        begin(GRANT, (LENGTH, 1), operation=Operation.READ),
        {},
        (Asked.READ, RefusalReason.BOUNDS),
    ),
    "pieces that are none": (begin(GRANT, (0, 0)), {}, (Asked.WRITE, RefusalReason.MALFORMED)),
}


@pytest.mark.parametrize(("data", "changes", "refusal"), RAW.values(), ids=RAW)
def test_what_no_peer_of_ours_sends_is_counted_by_its_reason(
    tcp: Bench, data: bytes, changes: dict[str, object], refusal: Refusal
) -> None:
    """Each once, before the caller hears of it."""
    say(tcp, data, **changes)
    assert tcp.owner.refusals.counts == {refusal: 1}


def test_a_stranger_at_the_port_is_counted(tcp: Bench) -> None:
    """Whoever takes it for a web server is told nothing; the owner knows that somebody was there."""
    with socket.create_connection(address_of(tcp.target.descriptor), PATIENCE_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(PREFIX.size))
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert tcp.owner.refusals.counts == {(Asked.CONNECT, RefusalReason.MALFORMED): 1}


@pytest.mark.parametrize(
    ("grant", "reason"),
    [(OLD, RefusalReason.STALE), (TO_COME, RefusalReason.STALE), (FORGED, RefusalReason.SECRET)],
    ids=["old", "to come", "forged"],
)
def test_grants_that_are_not_good_are_counted_for_writes_and_for_reads(
    tcp: Bench, grant: WriteGrant, reason: RefusalReason
) -> None:
    """By the peer's own calls; what is served before and after counts for nothing."""
    assert tcp.write([GOOD]).outcome is Outcome.DONE
    assert tcp.write([GOOD], grant).outcome is Outcome.FAILED_QUIESCED
    for _ in range(2):
        assert tcp.remote.read([GOOD], tcp.source, grant, soon()).outcome is Outcome.FAILED_QUIESCED
    assert tcp.write([GOOD]).outcome is Outcome.DONE
    assert tcp.owner.refusals.counts == {(Asked.WRITE, reason): 1, (Asked.READ, reason): 2}
    assert tcp.peer.refusals.counts == {}


def test_a_grant_taken_back_under_a_write_is_told_apart_from_a_stale_one(tcp: Bench) -> None:
    """It happens to every request that is cancelled while its cache moves."""
    hold, future = tcp.held_write([WHOLE])
    assert tcp.target.revoke(GRANT.cells, GRANT.lock_cell, GRANT.generation + 1, 0.0) is Quiescence.NO
    hold.gate.set()
    assert future.result().is_stale
    assert tcp.owner.refusals.counts == {(Asked.WRITE, RefusalReason.REVOKED): 1}


def test_a_write_that_breaks_with_its_connection_was_not_refused(tcp: Bench) -> None:
    """A peer that dies in the middle of a write has done nothing wrong."""
    say(tcp, begin(GRANT, (0, 64)) + bytes(32))
    assert tcp.owner.refusals.counts == {}


def test_over_shared_memory_the_peer_refuses_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner has no part in a transfer: only who asks knows that it was refused."""
    bench = make_bench("shm", tmp_path, monkeypatch)
    assert bench.write([GOOD], OLD).is_stale
    assert bench.owner.refusals.counts == {}
    bench.close()
