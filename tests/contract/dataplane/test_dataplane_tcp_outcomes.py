"""What the TCP writer concludes from the owner's behaviour: an owner that a test plays by hand."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from common.dataplane import tcp_transfer
from common.dataplane.port import DataPlaneError, Outcome, TransferResult, WriteGrant
from common.dataplane.tcp import TcpDataPlane
from common.dataplane.tcp_channel import UNREACHABLE_S, Channel
from common.dataplane.tcp_wire import GRANT as GRANT_HEAD
from common.dataplane.tcp_wire import HELLO, PREFIX, Status, decode_hello, encode_answer, encode_data, hello_length
from common.layout.run import Run
from contracts.dataplane import RegionDescriptor
from tests.contract.dataplane.bench import NOW, PATIENCE_S, soon

LENGTH = 32 << 20
GRANT = WriteGrant(lock_cell=0, cells=(0,), generation=1, secret=bytes(16))
SMALL = Run(local_offset=0, remote_offset=0, length=64)
WHOLE = Run(local_offset=0, remote_offset=0, length=LENGTH)
HEAD_BYTES = PREFIX.size + GRANT_HEAD.size + 4 + PREFIX.size + 16
"""What comes before the bytes of a write of one piece under a grant of one cell, and all of a read."""
REFUSAL = encode_answer(Status.FAILED, 0, "because")


class Stage:
    """A writer, and the sockets at which the test plays its peer."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE_S)
        self.skew_s = 0.0
        self.plane = TcpDataPlane("127.0.0.1", peer_id="writer", incarnation="i1", now=lambda: NOW() + self.skew_s)
        self.local = self.plane.allocate(LENGTH, 1)
        self.pool = ThreadPoolExecutor(2)
        host, port = self.listener.getsockname()
        self.descriptor = RegionDescriptor(
            transport="tcp",
            peer_id="owner",
            incarnation="i1",
            region_id="r",
            base=8192,
            length=LENGTH,
            num_cells=1,
            opaque=f"{host}:{port}",
        )
        connecting = self.pool.submit(self.plane.connect, self.descriptor, soon())
        self.lifeline = self.greet()
        self.remote = connecting.result(PATIENCE_S)

    def greet(self) -> socket.socket:
        """Let the next caller in."""
        connection = self.listener.accept()[0]
        connection.settimeout(PATIENCE_S)
        head = connection.recv(HELLO.size, socket.MSG_WAITALL)
        assert decode_hello(connection.recv(hello_length(head), socket.MSG_WAITALL)).region_id == "r"
        connection.sendall(encode_answer(Status.DONE, 0, ""))
        return connection

    def let_deadlines_pass(self) -> None:
        """Move the writer's clock on, beyond every deadline that was set before."""
        self.skew_s += 10 * PATIENCE_S

    def transfer(self, run: Run = SMALL, *, read: bool = False) -> tuple[socket.socket, Future[TransferResult]]:
        """Begin a transfer; the owner's end of it."""
        move = self.remote.read if read else self.remote.write
        future = self.pool.submit(move, [run], self.local, GRANT, soon())
        return self.greet(), future

    def close(self) -> None:
        """End everything."""
        self.plane.close()
        self.pool.shutdown()
        self.lifeline.close()
        self.listener.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A fresh writer."""
    made = Stage()
    yield made
    made.close()


def take(connection: socket.socket, length: int) -> None:
    """Receive exactly so much."""
    while length:
        count = len(connection.recv(min(length, 1 << 20)))
        assert count
        length -= count


def reset(connection: socket.socket) -> None:
    """Break the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def answer(data: bytes) -> Callable[[socket.socket], None]:
    """An owner that takes everything, and says this."""

    def play(connection: socket.socket) -> None:
        take(connection, HEAD_BYTES + SMALL.length)
        connection.sendall(data)

    return play


def close_in_order(connection: socket.socket) -> None:
    """An owner that takes everything, and ends."""
    take(connection, HEAD_BYTES + SMALL.length)
    connection.close()


def break_off(connection: socket.socket) -> None:
    """An owner whose connection is lost after it has taken everything."""
    take(connection, HEAD_BYTES + SMALL.length)
    reset(connection)


CASES = {
    "done": (answer(encode_answer(Status.DONE, 64, "")), Outcome.DONE),
    "refused": (answer(REFUSAL), Outcome.FAILED_QUIESCED),
    "ended": (close_in_order, Outcome.FAILED_QUIESCED),
    "reset": (break_off, Outcome.INDETERMINATE),
    "wrong count": (answer(encode_answer(Status.DONE, 63, "")), Outcome.INDETERMINATE),
    "garbage": (answer(b"\xff" * 64), Outcome.INDETERMINATE),
    "data": (answer(encode_data(64)), Outcome.INDETERMINATE),
}


@pytest.mark.parametrize(("play", "outcome"), CASES.values(), ids=CASES.keys())
def test_the_owners_word_decides(stage: Stage, play: Callable[[socket.socket], None], outcome: Outcome) -> None:
    """A write is DONE or quiescent only when the owner said so, or ended in order; anything else is INDETERMINATE."""
    owner, writing = stage.transfer()
    play(owner)
    result = writing.result(PATIENCE_S)
    assert (result.outcome, bool(result.reason)) == (outcome, outcome is not Outcome.DONE)
    owner.close()


def test_a_silent_owner_is_indeterminate_soon_after_the_deadline(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the bytes and says nothing: the writer stops waiting, and does not claim to know."""
    monkeypatch.setattr(tcp_transfer, "SETTLE_S", 0.02)
    owner, writing = stage.transfer()
    take(owner, HEAD_BYTES + SMALL.length)
    stage.let_deadlines_pass()
    assert writing.result(PATIENCE_S).outcome is Outcome.INDETERMINATE
    owner.close()


@pytest.mark.parametrize("run", [SMALL, WHOLE], ids=["all sent", "half sent"])
@pytest.mark.parametrize("closed", [False, True], ids=["deadline", "close"])
def test_a_write_that_is_given_up_is_quiescent_when_the_owner_says_so(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, run: Run, *, closed: bool
) -> None:
    """At the deadline, or when this end is closed, the owner sees the end of the bytes; its word makes the failure quiescent."""
    monkeypatch.setattr(tcp_transfer, "SETTLE_S", PATIENCE_S)
    owner, writing = stage.transfer(run)
    take(owner, HEAD_BYTES + 1)
    if closed:
        stage.remote.close()
    else:
        stage.let_deadlines_pass()
    while owner.recv(1 << 20):
        pass  # until the end: no more than was sent before
    owner.sendall(REFUSAL)
    result = writing.result(PATIENCE_S)
    assert result.outcome is Outcome.FAILED_QUIESCED
    assert ("this end is closed" if closed else "the deadline has passed") in result.reason
    owner.close()


def test_an_early_refusal_stops_the_writer(stage: Stage) -> None:
    """An owner that refuses while bytes are still coming does not have to take all of them."""
    owner, writing = stage.transfer(WHOLE)
    take(owner, HEAD_BYTES)
    owner.sendall(REFUSAL)
    taken = 0
    while piece := owner.recv(1 << 20):
        taken += len(piece)
    result = writing.result(PATIENCE_S)
    assert (result.outcome, result.reason) == (Outcome.FAILED_QUIESCED, "because")
    assert taken < LENGTH
    owner.close()


def test_a_refusal_is_heard_through_a_reset(stage: Stage) -> None:
    """An owner that refuses and closes with bytes unread resets the connection; what it said before still counts."""
    owner, writing = stage.transfer(WHOLE)
    take(owner, HEAD_BYTES)
    owner.sendall(REFUSAL)
    reset(owner)
    result = writing.result(PATIENCE_S)
    assert (result.outcome, result.reason) == (Outcome.FAILED_QUIESCED, "because")


def test_a_connection_is_used_again_after_success_only(stage: Stage) -> None:
    """One connection carries transfer after transfer; after a refusal the next transfer has a new one."""
    owner, writing = stage.transfer()
    answer(encode_answer(Status.DONE, 64, ""))(owner)
    assert writing.result(PATIENCE_S).outcome is Outcome.DONE
    again = stage.pool.submit(stage.remote.write, [SMALL], stage.local, GRANT, soon())
    answer(REFUSAL)(owner)
    assert again.result(PATIENCE_S).outcome is Outcome.FAILED_QUIESCED
    other, third = stage.transfer()
    answer(encode_answer(Status.DONE, 64, ""))(other)
    assert third.result(PATIENCE_S).outcome is Outcome.DONE
    owner.close()
    other.close()


READ_CASES = {
    "refused": REFUSAL,
    "too many bytes": encode_data(65) + bytes(65),
    "too few bytes": encode_data(63) + bytes(63),
    "garbage": b"\xff" * 64,
    "no answer after the bytes": encode_data(64) + bytes(64),
    "refused after the bytes": encode_data(64) + bytes(64) + REFUSAL,
    "half of the bytes": encode_data(64) + bytes(32),
}


@pytest.mark.parametrize("said", READ_CASES.values(), ids=READ_CASES.keys())
def test_a_read_that_is_not_confirmed_fails_quiescent(stage: Stage, said: bytes) -> None:
    """Only the reader writes into its own memory, so whatever the owner does, a failed read has ended."""
    owner, reading = stage.transfer(read=True)
    take(owner, HEAD_BYTES)
    owner.sendall(said)
    with contextlib.suppress(OSError):  # the reader may have heard enough
        owner.shutdown(socket.SHUT_WR)
    result = reading.result(PATIENCE_S)
    assert (result.outcome, bool(result.reason)) == (Outcome.FAILED_QUIESCED, True)
    owner.close()


@pytest.mark.parametrize("read", [False, True], ids=["write", "read"])
@pytest.mark.parametrize("run", [SMALL, WHOLE], ids=["small", "large"])
def test_an_owner_that_moves_no_byte_is_given_up_long_before_the_deadline(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, run: Run, *, read: bool
) -> None:
    """The connection stands, the owner hangs: nothing is taken or given, and the transfer does not wait for its deadline."""
    monkeypatch.setattr(tcp_transfer, "SETTLE_S", 0.02)
    monkeypatch.setattr(tcp_transfer, "SILENCE_S", 0.25)
    owner, moving = stage.transfer(run, read=read)
    take(owner, HEAD_BYTES + (0 if read else run.length // 2))
    if read:
        owner.sendall(encode_data(run.length) + bytes(run.length // 2))
    result = moving.result(PATIENCE_S)
    assert result.outcome is (Outcome.FAILED_QUIESCED if read else Outcome.INDETERMINATE)
    assert "silent for 0.25 s" in result.reason
    owner.close()


def test_a_transfer_that_waits_for_its_connection_ends_when_this_end_is_closed(stage: Stage) -> None:
    """The owner's kernel accepts, the owner does not: nobody waits for that once the link is undone."""
    writing = stage.pool.submit(stage.remote.write, [SMALL], stage.local, GRANT, soon())
    accepted = stage.listener.accept()[0]
    take(accepted, 1)
    assert not writing.done()
    stage.remote.close()
    result = writing.result(PATIENCE_S / 8)
    assert (result.outcome, bool(result.reason)) == (Outcome.FAILED_QUIESCED, True)
    accepted.close()


def test_an_owner_that_is_slow_but_moves_bytes_is_waited_for(stage: Stage) -> None:
    """Silence begins anew with every byte: however long the whole takes, up to the deadline."""
    owner, reading = stage.transfer(WHOLE, read=True)
    take(owner, HEAD_BYTES)
    owner.sendall(encode_data(LENGTH))
    for _ in range(8):
        owner.sendall(bytes(LENGTH // 8))
        stage.skew_s += 0.4 * tcp_transfer.SILENCE_S
    owner.sendall(encode_answer(Status.DONE, LENGTH, ""))
    assert reading.result(PATIENCE_S).outcome is Outcome.DONE
    owner.close()


def test_a_silent_owner_costs_a_read_its_deadline(stage: Stage) -> None:
    """The same without a word: the read ends at its deadline."""
    owner, reading = stage.transfer(read=True)
    take(owner, HEAD_BYTES)
    stage.let_deadlines_pass()
    assert reading.result(PATIENCE_S).outcome is Outcome.FAILED_QUIESCED
    owner.close()


def test_more_transfers_than_connections_take_turns(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all places taken a transfer waits, until its deadline and not longer."""
    monkeypatch.setattr("common.dataplane.tcp_remote.MAX_TRANSFERS", 1)
    owner, writing = stage.transfer()
    waiting = stage.remote.write([SMALL], stage.local, GRANT, NOW() + 0.05)
    assert (waiting.outcome, waiting.reason) == (Outcome.FAILED_QUIESCED, "the deadline has passed")
    answer(encode_answer(Status.DONE, 64, ""))(owner)
    assert writing.result(PATIENCE_S).outcome is Outcome.DONE
    owner.close()


@pytest.mark.parametrize("opaque", ["", "nowhere", ":80", "host:", "host:0", "host:65536", "host:x", "host:²"])
def test_a_bad_address_is_refused_by_name(stage: Stage, opaque: str) -> None:
    """A descriptor whose address is none is an error at connect."""
    descriptor = RegionDescriptor(
        transport="tcp", peer_id="p", incarnation="i", region_id="r", base=0, length=1, num_cells=1, opaque=opaque
    )
    with pytest.raises(DataPlaneError, match="host:port"):
        stage.plane.connect(descriptor, soon())


def test_what_is_no_data_plane_is_refused(stage: Stage) -> None:
    """Something else listens at the address: connecting fails, and says so."""
    connecting = stage.pool.submit(stage.plane.connect, stage.descriptor, soon())
    other = stage.listener.accept()[0]
    other.sendall(b"220 mail.example ESMTP\r\n")
    with pytest.raises(DataPlaneError, match="not a data plane"):
        connecting.result(PATIENCE_S)
    other.close()


def test_a_peer_that_has_vanished_is_noticed_by_the_kernel(stage: Stage) -> None:
    """Both directions have a bound on silence, small writes leave at once, and loopback buffers are small."""
    mine, theirs = socket.create_connection(stage.listener.getsockname()), stage.listener.accept()[0]
    channel = Channel(mine, NOW)
    tcp = {
        name: mine.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
        for name in ("NODELAY", "USER_TIMEOUT", "KEEPIDLE", "KEEPINTVL", "KEEPCNT")
    }
    assert tcp.pop("NODELAY") == 1
    assert tcp.pop("USER_TIMEOUT") == UNREACHABLE_S * 1000
    assert tcp["KEEPIDLE"] + tcp["KEEPINTVL"] * tcp["KEEPCNT"] == UNREACHABLE_S
    assert mine.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert mine.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 64 * 1024  # the kernel doubles it
    channel.close()
    theirs.close()
