"""Pieces of memory as the kernel wants them: an array of addresses and lengths, sent or filled by one call for many.

Python's own `sendmsg` and `recvmsg_into` take a view for each piece, which for pieces of 2 KiB takes longer to make than the bytes take
to travel. Here the table that came over the wire is, but for one addition, the argument of the system call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[Any]

MAX_VECTOR: Final = 1024
"""Most pieces of one call (the kernel's IOV_MAX)."""


class _MessageHeader(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("pieces", ctypes.c_void_p),
        ("num_pieces", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc: Final = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.argtypes = (ctypes.c_int, ctypes.POINTER(_MessageHeader), ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


class Vector:
    """`head`, then pieces of a memory, in order, and how far a transfer has come in them. Works once, in one direction.

    Whoever makes it vouches for it: the pieces lie within the memory at `address`, which `owner` keeps alive. A call moves about
    `slice_bytes` at most. Most transfers are one call: what only longer ones need is worked out when they turn out to be one.
    """

    def __init__(
        self, address: int, offsets: Column, lengths: Column, owner: object, *, slice_bytes: int, head: bytes = b""
    ) -> None:
        first = 1 if head else 0
        pieces: Column = np.empty((first + len(lengths), 2), np.uint64)
        if head:
            # The kernel only reads it; numpy tells where it lies, and keeps it alive.
            text = np.frombuffer(head, np.uint8)
            owner = (owner, text)
            pieces[0] = text.__array_interface__["data"][0], len(head)
        np.add(offsets, address, out=pieces[first:, 0], casting="unsafe")
        pieces[first:, 1] = lengths
        self.nbytes: Final = int(pieces[:, 1].sum())
        if self.nbytes > slice_bytes and int(pieces[:, 1].max()) > slice_bytes:
            pieces = _cut(pieces, slice_bytes)
        self._pieces: Final = pieces
        self._owner: Final = owner
        self._address: Final[int] = pieces.__array_interface__["data"][0]
        self._slice_bytes: Final = slice_bytes
        self._ends: Column | None = None
        self._first = 0
        self._done = 0
        self._header: Final = _MessageHeader()

    @property
    def num_done_bytes(self) -> int:
        """Bytes that have been moved."""
        return self._done

    @property
    def is_done(self) -> bool:
        """Whether every byte has been moved."""
        return self._done >= self.nbytes

    def send(self, connection: socket.socket) -> int:
        """One call: how many bytes were taken. Raises `BlockingIOError` when none could be, else `OSError`."""
        return self._call(_libc.sendmsg, connection, socket.MSG_NOSIGNAL)

    def receive(self, connection: socket.socket) -> int:
        """One call: how many bytes came, 0 at the end of the stream. Raises as `send` does."""
        return self._call(_libc.recvmsg, connection, socket.MSG_WAITALL)

    def _call(self, call: Any, connection: socket.socket, flags: int) -> int:
        header = self._header
        header.pieces = self._address + self._first * 16
        header.num_pieces = self._num_next()
        count: int = call(connection.fileno(), ctypes.byref(header), flags)
        if count < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:  # a signal, or the process was stopped and goes on: nothing was moved
                number = errno.EAGAIN
            raise OSError(number, os.strerror(number))
        self._done += count
        if count and not self.is_done:
            self._advance()
        return count

    def _num_next(self) -> int:
        """Pieces of the next call: all of them if they are few and short enough."""
        num_left = len(self._pieces) - self._first
        if self.nbytes - self._done > self._slice_bytes:
            end = int(self._cumulated.searchsorted(np.uint64(self._done + self._slice_bytes), "right"))
            num_left = min(num_left, end - self._first + 1)  # with the piece that goes beyond
        return min(num_left, MAX_VECTOR)

    def _advance(self) -> None:
        ends = self._cumulated
        first = self._first = int(ends.searchsorted(np.uint64(self._done), "right"))
        left = int(ends[first]) - self._done
        piece = self._pieces[first]
        piece[0] += piece[1] - np.uint64(left)
        piece[1] = left

    @property
    def _cumulated(self) -> Column:
        """Where each piece ends among all bytes."""
        if self._ends is None:
            self._ends = np.cumsum(self._pieces[:, 1], dtype=np.uint64)
        return self._ends


def _cut(pieces: Column, longest: int) -> Column:
    """The same memory in pieces of at most `longest` bytes."""
    limit = np.uint64(longest)
    addresses, lengths = pieces[:, 0], pieces[:, 1]
    counts = (lengths + limit - np.uint64(1)) // limit
    repeats = np.maximum(counts, 1).astype(np.int64)
    whole = np.repeat(np.arange(len(lengths)), repeats)
    within = (np.arange(len(whole)) - np.repeat(np.cumsum(repeats) - repeats, repeats)).astype(np.uint64) * limit
    return np.stack((addresses[whole] + within, np.minimum(limit, lengths[whole] - within)), axis=1)
