"""Hostile bytes at the port of the TCP data plane: nothing lands, nothing grows, and everybody else is served."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from common.dataplane import tcp_caller, tcp_server
from common.dataplane.port import DataPlaneError, Outcome, Quiescence, WriteGrant
from common.dataplane.tcp import TcpDataPlane
from common.dataplane.tcp_pieces import MOST_FEW
from common.dataplane.tcp_remote import address_of
from common.dataplane.tcp_wire import (
    HELLO,
    MAGIC,
    MAX_HELLO_BYTES,
    MAX_SEGMENTS,
    PREFIX,
    Hello,
    Kind,
    Operation,
    Status,
    decode_reply,
    encode_batch,
    encode_begin,
    encode_hello,
)
from common.layout.run import Run
from tests.contract.dataplane.bench import NOW, PATIENCE_S, soon

LENGTH = 1 << 16
POISON = bytes([0xEE]) * LENGTH
GRANT = WriteGrant(lock_cell=3, cells=(0, 3), generation=5, secret=bytes(range(16)))
RUN = Run(local_offset=0, remote_offset=0, length=64)


class World:
    """An owner with one granted region."""

    def __init__(self) -> None:
        self.plane = TcpDataPlane("127.0.0.1", peer_id="owner", incarnation="i1", now=NOW)
        self.region = self.plane.allocate(LENGTH, 4)
        self.region.data[:] = POISON
        self.region.open_grant(GRANT)
        own = self.region.descriptor
        self.hello = Hello(
            peer_id=own.peer_id,
            incarnation=own.incarnation,
            region_id=own.region_id,
            generation=own.generation,
            length=own.length,
            num_cells=own.num_cells,
        )

    def connect(self) -> socket.socket:
        """A connection with nothing said on it."""
        return socket.create_connection(address_of(self.region.descriptor), PATIENCE_S)

    def greeted(self) -> socket.socket:
        """A connection of somebody who has a descriptor."""
        connection = self.connect()
        connection.sendall(encode_hello(self.hello))
        assert decode_reply(connection.recv(PREFIX.size, socket.MSG_WAITALL)).status is Status.DONE
        return connection

    def tell(self, data: bytes, *, greeted: bool = True) -> bytes:
        """Send `data` and nothing more; what the owner answers until it closes the connection."""
        with self.greeted() if greeted else self.connect() as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                return b""  # it did not even wait for the end
            return answer_of(connection)

    def is_unharmed(self) -> bool:
        """Whether nothing has landed, and a peer with a grant is served as ever."""
        if bytes(self.region.data) != POISON:
            return False
        writer = TcpDataPlane("127.0.0.1", peer_id="writer", incarnation="i1", now=NOW)
        source = writer.allocate(LENGTH, 1)
        remote = writer.connect(self.region.descriptor, soon())
        outcome = remote.write([RUN], source, GRANT, soon()).outcome
        writer.close()
        landed = bytes(self.region.data) == bytes(RUN.length) + POISON[RUN.length :]
        self.region.data[:] = POISON
        return outcome is Outcome.DONE and landed


def answer_of(connection: socket.socket) -> bytes:
    """Everything until the owner ends the connection, in order or by a reset."""
    heard = b""
    try:
        while piece := connection.recv(4096):
            heard += piece
    except ConnectionResetError:
        pass
    return heard


@pytest.fixture
def world() -> Iterator[World]:
    """A fresh owner."""
    made = World()
    yield made
    made.plane.close()
    assert made.plane.server.num_callers == 0


def begin(
    num_batches: int = 1, *, num_first: int = 1, timeout_s: float = PATIENCE_S, operation: Operation = Operation.WRITE
) -> bytes:
    """The beginning of a write that the owner lets in."""
    head = encode_begin(operation, GRANT, timeout_s, num_batches=num_batches, num_first=num_first)
    return head + np.array(GRANT.cells, "<u4").tobytes()


def batch(*segments: tuple[int, int]) -> bytes:
    """A table with its prefix, true or not."""
    total = sum(length for _, length in segments) % 2**64
    return encode_batch(len(segments), total) + b"".join(struct.pack("<QQ", *segment) for segment in segments)


def among_many(segment: tuple[int, int]) -> bytes:
    """A write of so many pieces that they are checked as columns, the last of them `segment`."""
    return begin(num_first=MOST_FEW + 1) + batch(*[(0, 1)] * MOST_FEW, segment) + b"\x11" * (MOST_FEW + 128)


GREETINGS = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(4096),
    "half a greeting": HELLO.pack(MAGIC, 100) + b"\x86",
    "too long": HELLO.pack(MAGIC, MAX_HELLO_BYTES + 1) + bytes(MAX_HELLO_BYTES + 1),
    "longest": HELLO.pack(MAGIC, 0xFFFF) + bytes(0xFFFF),
    "empty": HELLO.pack(MAGIC, 0),
    "other version": HELLO.pack(b"pdt9", 4) + b"\x80\x80\x80\x80",
    "not msgpack": HELLO.pack(MAGIC, 4) + b"\xc1\xc1\xc1\xc1",
    "nested": HELLO.pack(MAGIC, 1003) + b"\x81\xa1x" + b"\x91" * 999 + b"\xc0",
    "not text": HELLO.pack(MAGIC, 12) + b"\x81\xa7peer_id\xa2\xff\xff",
}


@pytest.mark.parametrize("data", GREETINGS.values(), ids=GREETINGS.keys())
def test_what_is_no_greeting_ends_the_connection_without_a_word(world: World, data: bytes) -> None:
    """A stranger learns nothing, not even that this is a data plane."""
    assert world.tell(data, greeted=False) == b""
    assert world.is_unharmed()


@pytest.mark.parametrize(
    "change",
    [{"region_id": "other"}, {"incarnation": "i0"}, {"generation": 0}, {"length": LENGTH * 2}, {"num_cells": 5}],
    ids=str,
)
def test_a_greeting_for_other_memory_is_refused(world: World, change: dict[str, object]) -> None:
    """Who knows an id but not the memory behind it, or last start's, is told no and sent away."""
    hello = encode_hello(msgspec.structs.replace(world.hello, **change))
    reply = decode_reply(world.tell(hello, greeted=False)[: PREFIX.size])
    assert (reply.kind, reply.status) == (Kind.ANSWER, Status.FAILED)
    assert world.is_unharmed()


MESSAGES = {
    "garbage": b"\xff" * 4096,
    "half a beginning": begin()[:20],
    "a beginning without cells": begin()[:44],
    "a first batch of nothing": begin(num_first=0),
    "a first batch too large": begin(num_first=MAX_SEGMENTS + 1) + bytes(1 << 17),
    "a first batch of four billion": begin(num_first=2**32 - 1) + bytes(4096),
    "a first batch of no batch": begin(0),
    "another first batch": begin(num_first=2) + batch((0, 64), (64, 64))[:32] + b"\x11" * 96,
    "no cells": encode_begin(
        Operation.WRITE, msgspec.structs.replace(GRANT, cells=()), 1.0, num_batches=1, num_first=1
    ),
    "four billion cells": PREFIX.pack(Kind.BEGIN, Operation.WRITE, 1, 2**32 - 1, 5) + bytes(28),
    "unknown operation": PREFIX.pack(Kind.BEGIN, 9, 1, 2, 5) + bytes(32),
    "a batch first": batch((0, 64)) + b"\x11" * 64,
    "no batch": begin() + b"\x11" * 16,
    "an empty batch": begin() + encode_batch(0, 0),
    "too many pieces, later": begin(2)
    + batch((0, 1))
    + b"\xee"
    + encode_batch(MAX_SEGMENTS + 1, 64)
    + bytes(16 * (MAX_SEGMENTS + 1)),
    "four billion pieces, later": begin(2) + batch((0, 1)) + b"\xee" + encode_batch(2**32 - 1, 64) + b"\x11" * 4096,
    "half a table": begin(num_first=2) + batch((0, 64), (64, 64))[:-8],
    "beyond the end": begin() + batch((LENGTH - 63, 64)) + b"\x11" * 64,
    "beyond the end, second": begin(num_first=2) + batch((0, 64), (LENGTH, 1)) + b"\x11" * 65,
    "wraps around": begin() + batch((2**64 - 64, 128)) + b"\x11" * 128,
    "wraps around by length": begin() + batch((64, 2**64 - 32)) + b"\x11" * 64,
    "larger than memory": begin() + batch((0, 2**63)) + b"\x11" * 64,
    "lengths add up to nothing": begin() + batch((0, 0)),
    "another total": begin() + encode_batch(1, 65) + struct.pack("<QQ", 0, 64) + b"\x11" * 65,
    "beyond the end, among many": among_many((LENGTH - 63, 64)),
    "wraps around, among many": among_many((2**64 - 64, 128)),
    "wraps around by length, among many": among_many((64, 2**64 - 32)),
    "larger than memory, among many": among_many((0, 2**63)),
    "another total, among many": begin(num_first=MOST_FEW + 1)
    + encode_batch(MOST_FEW + 1, MOST_FEW + 2)
    + struct.pack("<QQ", 0, 1) * (MOST_FEW + 1)
    + b"\x11" * (MOST_FEW + 2),
}


@pytest.mark.parametrize("data", MESSAGES.values(), ids=MESSAGES.keys())
def test_what_is_no_transfer_ends_the_connection(world: World, data: bytes) -> None:
    """Even who has descriptor and secret lands no byte with a message that makes no sense; the answer, if any, is no."""
    heard = world.tell(data)
    assert not heard or decode_reply(heard[: PREFIX.size]).status is Status.FAILED
    assert world.is_unharmed()


def test_mutated_transfers_never_land_outside_their_grant(world: World) -> None:
    """A sound transfer with some of its bytes changed either is refused or lands its bytes within the region, and all is well after."""
    sound = begin(2, num_first=2) + batch((0, 64), (128, 64)) + b"\x11" * 128 + batch((256, 16)) + b"\x11" * 16
    dice = random.Random(7)
    for _ in range(150):
        data = bytearray(sound)
        for _ in range(dice.choice((1, 1, 2, 8))):
            data[dice.randrange(len(data))] = dice.randrange(256)
        world.tell(bytes(data[: dice.randrange(len(data)) + 1]))
        assert world.region.revoke((), GRANT.lock_cell, GRANT.generation + 1, soon()) is Quiescence.YES
        world.region.open_grant(GRANT)
        world.region.data[:] = POISON
    assert world.is_unharmed()


def test_silence_costs_a_place_for_a_while_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says nothing, half a greeting, or half the head of a transfer is sent away in time."""
    with monkeypatch.context() as impatient:
        impatient.setattr(tcp_caller, "GREETING_TIMEOUT_S", 0.02)
        for said in (b"", MAGIC, encode_hello(world.hello)[:-1]):
            with world.connect() as silent:
                silent.sendall(said)
                assert answer_of(silent) == b""
    monkeypatch.setattr(tcp_caller, "HEAD_TIMEOUT_S", 0.02)
    for said in (begin()[:1], begin()[:-1]):
        with world.greeted() as silent:
            silent.sendall(said)
            assert answer_of(silent) == b""


def test_a_write_that_stops_in_its_middle_is_given_up(world: World) -> None:
    """The time that a transfer has is the owner's own: half of the bytes, then silence, ends in a refusal, and the grant is free."""
    with world.greeted() as silent:
        silent.sendall(begin(timeout_s=0.02) + batch((0, 64)) + b"\x11" * 32)
        assert decode_reply(answer_of(silent)[: PREFIX.size]).status is Status.FAILED
    assert world.region.revoke(GRANT.cells, GRANT.lock_cell, 6, NOW()) is Quiescence.YES


def test_a_caller_who_does_not_listen_is_given_up(world: World) -> None:
    """A read whose bytes nobody takes does not hold its thread beyond the transfer's time."""
    region = world.plane.allocate(8 << 20, 4)
    region.open_grant(GRANT)
    world.hello = msgspec.structs.replace(
        world.hello,
        region_id=region.descriptor.region_id,
        generation=region.descriptor.generation,
        length=region.descriptor.length,
    )
    with world.greeted() as deaf:
        deaf.sendall(begin(timeout_s=0.02, operation=Operation.READ) + batch((0, 8 << 20)))
        while world.plane.server.num_callers:
            assert deaf.fileno() >= 0
    region.close()


def test_a_flood_of_silence_keeps_nobody_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """More silent callers than there are places for them: the longest silent ones go, and a peer gets in."""
    monkeypatch.setattr(tcp_server, "MAX_GREETING", 4)
    flood = [world.connect() for _ in range(12)]
    assert world.is_unharmed()
    assert [flood[index].recv(1) for index in range(4)] == [b""] * 4
    for connection in flood:
        connection.close()


def test_the_number_of_connections_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all places are taken by callers who have greeted, the next is sent away, tries again, and gets in when one leaves."""
    monkeypatch.setattr(tcp_server, "MAX_CALLERS", 3)
    callers = [world.greeted() for _ in range(3)]
    with world.connect() as fourth:
        assert answer_of(fourth) == b""
    writer = TcpDataPlane("127.0.0.1", peer_id="writer", incarnation="i1", now=NOW)
    with pytest.raises(DataPlaneError, match="does not answer"):
        writer.connect(world.region.descriptor, NOW() + 0.05)
    callers.pop().close()
    writer.connect(world.region.descriptor, soon()).close()
    writer.close()
    for connection in callers:
        connection.close()
