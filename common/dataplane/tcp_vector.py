"""Pieces of memory as the kernel wants them: an array of addresses and lengths, sent or filled by one call for many.

Python's own `sendmsg` and `recvmsg_into` take a view for each piece, which for pieces of 2 KiB takes longer to make than the bytes take
to travel. Here the table that came over the wire is, but for one addition, the argument of the system call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from array import array
from typing import TYPE_CHECKING, Any, Final

from common.dataplane.tcp_pieces import pieces_of

if TYPE_CHECKING:
    from common.dataplane.tcp_pieces import Numbers

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
    `slice_bytes` at most. Few pieces are best given as tuples, many as columns.
    """

    def __init__(
        self, address: int, offsets: Numbers, lengths: Numbers, owner: object, *, slice_bytes: int, head: bytes = b""
    ) -> None:
        self._head: Final = array("B", head)  # it has an address; the kernel only reads it
        self._pieces: Final = pieces_of(address, offsets, lengths, slice_bytes, self._head)
        self.nbytes: Final = self._pieces.nbytes
        self._owner: Final = owner
        self._done = 0
        self.is_done = not self.nbytes
        """Whether every byte has been moved."""
        self._header: Final = _MessageHeader()

    @property
    def num_done_bytes(self) -> int:
        """Bytes that have been moved."""
        return self._done

    def send(self, connection: socket.socket) -> int:
        """One call: how many bytes were taken. Raises `BlockingIOError` when none could be, else `OSError`."""
        return self._call(_libc.sendmsg, connection, socket.MSG_NOSIGNAL)

    def receive(self, connection: socket.socket) -> int:
        """One call: how many bytes came, 0 at the end of the stream. Raises as `send` does."""
        return self._call(_libc.recvmsg, connection, socket.MSG_WAITALL)

    def _call(self, call: Any, connection: socket.socket, flags: int) -> int:
        header = self._header
        header.pieces = self._pieces.address
        header.num_pieces = min(self._pieces.num_next(), MAX_VECTOR)
        count: int = call(connection.fileno(), ctypes.byref(header), flags)
        if count < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:  # a signal, or the process was stopped and goes on: nothing was moved
                number = errno.EAGAIN
            raise OSError(number, os.strerror(number))
        self._done += count
        if self._done >= self.nbytes:
            self.is_done = True
        elif count:
            self._pieces.advance(count)
        return count
