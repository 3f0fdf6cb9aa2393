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
    """Pieces in order, and how far a transfer has come in them. Works once, in one direction.

    Whoever makes it vouches for it: every piece lies in memory that `owners` keep alive.
    """

    def __init__(self, addresses: Column, lengths: Column, owners: tuple[object, ...], *, slice_bytes: int) -> None:
        """Both columns in uint64, of one size; a call moves at most `slice_bytes`."""
        if len(lengths) and int(lengths.max()) > slice_bytes:
            addresses, lengths = _cut(addresses, lengths, slice_bytes)
        self._pieces: Final[Column] = np.empty((len(lengths), 2), np.uint64)
        self._pieces[:, 0] = addresses
        self._pieces[:, 1] = lengths
        self._ends: Final[Column] = np.cumsum(lengths, dtype=np.uint64)
        self._owners: Final = owners
        self._address: Final[int] = self._pieces.__array_interface__["data"][0]
        self._slice_bytes: Final = slice_bytes
        self._first = 0
        self._done = 0
        self._header: Final = _MessageHeader()
        self.nbytes: Final = int(self._ends[-1]) if len(lengths) else 0

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
        first = self._first
        end = int(self._ends.searchsorted(np.uint64(self._done + self._slice_bytes), "right"))
        header = self._header
        header.pieces = self._address + first * 16
        header.num_pieces = max(1, min(end - first, MAX_VECTOR))
        count: int = call(connection.fileno(), ctypes.byref(header), flags)
        if count < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:  # a signal, or the process was stopped and goes on: nothing was moved
                number = errno.EAGAIN
            raise OSError(number, os.strerror(number))
        self._done += count
        if count:
            self._advance()
        return count

    def _advance(self) -> None:
        first = self._first = int(self._ends.searchsorted(np.uint64(self._done), "right"))
        if not self.is_done:
            left = int(self._ends[first]) - self._done
            piece = self._pieces[first]
            piece[0] += piece[1] - np.uint64(left)
            piece[1] = left


def vector_of(
    head: bytes, address: int, offsets: Column, lengths: Column, owner: object, *, slice_bytes: int
) -> Vector:
    """`head`, then the pieces of the memory at `address` that `owner` keeps alive; they must lie within it."""
    count = len(lengths)
    skipped = 0 if head else 1
    addresses, sizes = np.empty(count + 1, np.uint64), np.empty(count + 1, np.uint64)
    text = np.frombuffer(head, np.uint8) if head else None
    if text is not None:
        addresses[0], sizes[0] = text.__array_interface__["data"][0], len(head)
    np.add(offsets, address, out=addresses[1:], casting="unsafe")
    sizes[1:] = lengths
    return Vector(addresses[skipped:], sizes[skipped:], (owner, text), slice_bytes=slice_bytes)


def _cut(addresses: Column, lengths: Column, longest: int) -> tuple[Column, Column]:
    """The same memory in pieces of at most `longest` bytes."""
    limit = np.uint64(longest)
    counts = (lengths + limit - np.uint64(1)) // limit
    repeats = np.maximum(counts, 1).astype(np.int64)
    whole = np.repeat(np.arange(len(lengths)), repeats)
    within = (np.arange(len(whole)) - np.repeat(np.cumsum(repeats) - repeats, repeats)).astype(np.uint64) * limit
    return addresses[whole] + within, np.minimum(limit, lengths[whole] - within)
