"""Vectors of pieces: what one end sends from scattered memory arrives in the scattered places of the other, in any number of calls."""

from __future__ import annotations

import ctypes
import errno
import socket
import threading
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.dataplane.tcp_vector import MAX_VECTOR, Vector

PIECES = st.lists(st.integers(0, 300), max_size=30)
BYTES = bytes(index % 251 for index in range(20_000))


class Memory:
    """Some bytes with an address."""

    def __init__(self, content: bytes) -> None:
        self.bytes = bytearray(content)
        self._view = (ctypes.c_char * len(content)).from_buffer(self.bytes)
        self.address = ctypes.addressof(self._view)

    def vector(
        self, pieces: list[tuple[int, int]], slice_bytes: int, head: bytes = b"", *, few: bool = False
    ) -> Vector:
        """A vector of (offset, length), given as tuples or as columns."""
        columns = np.array(pieces, np.int64).reshape(-1, 2)
        offsets, lengths = columns[:, 0], columns[:, 1]
        if few:
            given = tuple(offsets.tolist()), tuple(lengths.tolist())
            return Vector(self.address, *given, self, slice_bytes=slice_bytes, head=head)
        return Vector(self.address, offsets, lengths, self, slice_bytes=slice_bytes, head=head)


def spread(lengths: list[int], gap: int) -> list[tuple[int, int]]:
    """Pieces of these lengths, `gap` bytes apart, the last one first."""
    starts = accumulate((length + gap for length in lengths), initial=0)
    return list(zip(starts, lengths, strict=False))[::-1]


def fitted(lengths: list[int], total: int) -> list[int]:
    """The lengths, cut off or filled up so that they add up to `total`."""
    fit = []
    for length in (*lengths, total):
        fit.append(min(length, total))
        total -= fit[-1]
    return fit


def send_all(vector: Vector, connection: socket.socket) -> int:
    """Send a vector to its end; in how many calls."""
    num_calls = 0
    while not vector.is_done:
        vector.send(connection)
        num_calls += 1
    return num_calls


@settings(deadline=None, max_examples=60)
@given(
    PIECES,
    PIECES,
    st.sampled_from((1, 7, 64, 1000, 1 << 20)),
    st.sampled_from((b"", b"head")),
    st.tuples(st.booleans(), st.booleans()),
)
def test_bytes_arrive_in_order_whatever_the_cuts(
    sent: list[int], received: list[int], slice_bytes: int, head: bytes, few: tuple[bool, bool]
) -> None:
    """The stream is the head and the pieces one after the other; pieces of no byte take no part; nothing else is written."""
    total = len(head) + sum(sent)
    places = spread(fitted(received, total), 5)
    source, target = Memory(BYTES), Memory(bytes(len(BYTES)))
    out = source.vector(spread(sent, 3), slice_bytes, head, few=few[0])
    into = target.vector(places, slice_bytes, few=few[1])
    here, there = socket.socketpair()
    with here, there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sender = threading.Thread(target=send_all, args=(out, here), daemon=True)
        sender.start()
        while not into.is_done:
            assert into.receive(there)
        sender.join(60)
    stream = head + b"".join(BYTES[start : start + length] for start, length in spread(sent, 3))
    expected = bytearray(len(BYTES))
    for start, length in places:
        expected[start : start + length], stream = stream[:length], stream[length:]
    assert (out.nbytes, into.nbytes, out.is_done) == (total, total, True)
    assert target.bytes == expected


@pytest.mark.parametrize("few", [False, True])
def test_many_pieces_take_few_calls(few: bool) -> None:
    """As many pieces a call as the kernel takes; a call is not cut short by a head, but by the size of a slice."""
    memory = Memory(BYTES)
    here, there = socket.socketpair()
    with here, there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        count = 2 * MAX_VECTOR
        assert send_all(memory.vector(spread([1] * count, 1), 1 << 20, b"head", few=few), here) == 3
        assert len(there.recv(count + 4, socket.MSG_WAITALL)) == count + 4
        assert send_all(memory.vector([(0, 4096)], 4096, b"head", few=few), here) == 1
        assert send_all(memory.vector([(0, 4096)], 1024, few=few), here) <= 4
        assert there.recv(8196, socket.MSG_WAITALL) == b"head" + BYTES[:4096] * 2


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_a_call_that_was_interrupted_is_one_to_be_made_again(number: int) -> None:
    """A signal, a stop and a continuation, or the end of the kernel's wait: no byte has moved, and the vector is as it was."""
    vector = Memory(BYTES).vector([(0, 8)], 1 << 20)

    def interrupted(*_: Any) -> int:
        ctypes.set_errno(number)
        return -1

    with socket.socket() as connection, pytest.raises(BlockingIOError):
        vector._call(interrupted, connection, 0)
    assert vector.num_done_bytes == 0


def test_a_connection_that_is_gone_is_an_error() -> None:
    """The same errors as of a socket's own methods: a closed end, and one that was never connected."""
    here, there = socket.socketpair()
    there.close()
    with here, pytest.raises(BrokenPipeError):
        Memory(BYTES).vector([(0, 8)], 1 << 20).send(here)
    with pytest.raises(OSError, match="Bad file descriptor"):
        Memory(BYTES).vector([(0, 8)], 1 << 20).receive(here)
