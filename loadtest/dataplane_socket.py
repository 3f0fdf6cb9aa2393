"""The raw blocking socket that the tcp data plane is compared with: the same socket buffers, no checks, one thread at either end."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from common.dataplane.tcp_channel import LOOPBACK_BUFFER_BYTES
from common.layout.run import Run
from loadtest.dataplane_ends import LINK_S, LOOPBACK, Address, TransferFailed, starts

_HEAD: Final = struct.Struct("<QQ")
_ACKNOWLEDGED: Final = b"\x06"


class SocketDestination:
    """Receives one connection's bytes straight into memory, and acknowledges each transfer."""

    def __init__(self, data: memoryview) -> None:
        """Borrows `data`."""
        self._data = data
        self._listener = socket.socket()
        self._listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER_BYTES
        )  # accepted ones inherit it
        self._listener.bind((LOOPBACK, 0))
        self._listener.listen(1)
        self._listener.settimeout(LINK_S)
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="raw-socket", daemon=True)
        self._thread.start()

    @property
    def data(self) -> memoryview:
        """See `Destination.data`."""
        return self._data

    @property
    def address(self) -> Address:
        """See `Destination.address`."""
        host, port = self._listener.getsockname()
        return Address(host=host, port=port)

    def close(self) -> None:
        """See `Destination.close`."""
        for each in (self._connection, self._listener):
            if each is not None:
                with contextlib.suppress(OSError):  # not connected, or closed before
                    each.shutdown(socket.SHUT_RDWR)
        self._thread.join(LINK_S)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # nobody came, or the source has gone
            self._connection, _ = self._listener.accept()
            with self._connection as connection:
                connection.settimeout(None)
                _tune(connection)
                head = memoryview(bytearray(_HEAD.size))
                while _fill(connection, head):
                    offset, length = _HEAD.unpack(head)
                    if not _fill(connection, self._data[offset : offset + length]):
                        return
                    connection.sendall(_ACKNOWLEDGED)


class SocketSource:
    """Sends to a `SocketDestination`, and waits for each acknowledgement."""

    def __init__(self, data: memoryview, address: Address) -> None:
        """Borrows `data`. Raises `OSError` when the destination cannot be reached."""
        self._data = data
        self._connection = socket.create_connection((address.host, address.port), LINK_S)
        self._connection.settimeout(None)
        _tune(self._connection)

    @property
    def data(self) -> memoryview:
        """See `Source.data`."""
        return self._data

    def prepare(self, runs: Sequence[Run], nbytes: int) -> Callable[[], None]:
        """See `Source.prepare`."""
        local, remote = starts(runs)
        head = _HEAD.pack(remote, nbytes)
        return partial(self._send, head, self._data[local : local + nbytes])

    def close(self) -> None:
        """See `Source.close`."""
        self._connection.close()

    def _send(self, head: bytes, content: memoryview) -> None:
        sent = self._connection.sendmsg([head, content]) - len(head)
        if sent < 0:
            raise TransferFailed("the raw socket took a part of a head")
        if sent < len(content):
            self._connection.sendall(content[sent:])
        if self._connection.recv(len(_ACKNOWLEDGED)) != _ACKNOWLEDGED:
            raise TransferFailed("the raw socket's other end is gone")


def _fill(connection: socket.socket, buffer: memoryview) -> bool:
    """Receive until `buffer` is full; False when the other end is gone before."""
    done = 0
    while done < len(buffer):
        count = connection.recv_into(buffer[done:], 0, socket.MSG_WAITALL)
        if not count:
            return False
        done += count
    return True


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER_BYTES)
