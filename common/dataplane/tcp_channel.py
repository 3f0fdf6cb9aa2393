"""One TCP connection of the data plane: blocking calls that move whole buffers, and that another thread can end.

The kernel wakes a waiting call every `SLICE_S`, so that it sees its deadline and that it was told to stop; data never waits for that.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final, NoReturn

from common.dataplane.port import STOP_SLICE_S
from common.dataplane.tcp_vector import Vector
from common.dataplane.waiting import STOPPED

SLICE_S: Final = STOP_SLICE_S
SLICE_BYTES: Final = 16 << 20
"""Most bytes of one call: between two of them the deadline and the order to stop are looked at, with the core's cache empty."""
LOOPBACK_BUFFER_BYTES: Final = 64 << 10
"""Socket buffers on the loopback interface: what is in them stays in the core's cache. Elsewhere the kernel finds the size."""
UNREACHABLE_S: Final = 10
"""How long a peer may leave sent bytes, or a keepalive, without an acknowledgement before it counts as gone."""
IDLE_MS: Final = 10_000
"""How often an idle connection's thread looks whether it still has to wait; what happens on the connection wakes it at once."""


class Fault(enum.Enum):
    """Why a call on a channel did not do all of its work."""

    ENDED = "ended"
    """The peer closed its end in order: it had stopped reading before."""
    BROKEN = "broken"
    """The connection was reset or lost: what the peer does with bytes under way is not known."""
    LATE = "late"
    """The deadline has passed."""
    STOPPED = "stopped"
    """This end was told to stop."""
    ANSWERED = "answered"
    """The peer said something while it should have been listening."""


class ChannelError(Exception):
    """A call did not do all of its work; the connection is of no use any more."""

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(text)
        self.fault: Final = fault


class Channel:
    """Owns a connected socket. One thread sends and receives; `stop_reading`, `stop_writing` and `close` may come from others."""

    def __init__(
        self, connection: socket.socket, now: Callable[[], float], stop: threading.Event | None = None
    ) -> None:
        """As long as `stop` is not None, its being set has the effect of being told to stop."""
        self._socket = connection
        self._now = now
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN | select.POLLRDHUP)
        self.stopped = False
        self.stop = stop
        self.silence_s: float | None = None
        """How long the peer may neither take nor give a byte while this end waits for it; None: as long as the deadline allows."""
        tune(connection)

    def receive(self, buffer: memoryview, deadline: float | None) -> None:
        """Fill `buffer`. Raises `ChannelError`; what was filled until then is not known."""
        moved_at = self._now()
        while len(buffer):
            self._check(deadline, moved_at)
            try:
                count = self._socket.recv_into(buffer, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._broken(error) from error
            if not count:
                self._raise_ended(deadline)
            buffer = buffer[count:]
            moved_at = self._now()

    def receive_bytes(self, length: int, deadline: float | None) -> bytes:
        """Exactly `length` bytes, a number that the caller has bounded. Raises `ChannelError`."""
        data = bytearray(length)
        self.receive(memoryview(data), deadline)
        return bytes(data)

    def receive_vector(self, vector: Vector, deadline: float) -> None:
        """Fill all pieces of `vector`. Raises as `receive` does."""
        moved_at = self._now()
        while not vector.is_done:
            self._check(deadline, moved_at)
            try:
                count = vector.receive(self._socket)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._broken(error) from error
            if not count:
                self._raise_ended(deadline)
            moved_at = self._now()

    def send(self, data: bytes, deadline: float) -> None:
        """Send `data`. Raises `ChannelError`."""
        moved_at = self._now()
        while data:
            self._check(deadline, moved_at)
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._broken(error) from error
            moved_at = self._now()

    def send_vector(self, vector: Vector, deadline: float) -> None:
        """Send all pieces of `vector`, but give up when the peer says something meanwhile. Raises `ChannelError`."""
        first = True
        moved_at = self._now()
        while not vector.is_done:
            self._check(deadline, moved_at)
            if not first and self.has_input:
                raise ChannelError(Fault.ANSWERED, "the peer did not wait for the end")
            first = False
            try:
                vector.send(self._socket)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._broken(error) from error
            moved_at = self._now()

    def wait_for_input(self) -> None:
        """Return when the peer says something or ends the connection, or when this end is told to stop."""
        while not self.stopped and not self._readable.poll(IDLE_MS):
            pass

    @property
    def has_input(self) -> bool:
        """Whether a receive would return at once: there are bytes, or the end of them."""
        return bool(self._readable.poll(0))

    @property
    def is_open(self) -> bool:
        """Whether the peer has not ended the connection; for one on which the peer has nothing to say."""
        if not self._readable.poll(0):
            return True
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def stop_reading(self) -> None:
        """From any thread: a receive under way ends now, with what it has; later ones raise. Sending goes on working."""
        self.stopped = True
        self._shut(socket.SHUT_RD)

    def stop_writing(self) -> None:
        """From any thread: a send under way ends now; the peer sees the end of what was sent before."""
        self.stopped = True
        self._shut(socket.SHUT_WR)

    def end_writing(self) -> None:
        """Let the peer see that nothing more comes, and go on reading what it says to that."""
        self.stopped = False
        self._shut(socket.SHUT_WR)

    def say_last(self, data: bytes) -> None:
        """Say something short although this end was told to stop, if there is room for it; the peer may never hear it."""
        with contextlib.suppress(OSError):
            self._socket.send(data, socket.MSG_DONTWAIT)

    def drain(self, limit: int, deadline: float) -> None:
        """Take what the peer goes on sending, until it stops, `limit` bytes or `deadline`.

        A connection that is closed with bytes unread is reset, and a reset may overtake the last words.
        """
        self._shut(socket.SHUT_WR)
        scratch = bytearray(min(limit, LOOPBACK_BUFFER_BYTES))
        while limit > 0 and not self.stopped and self._now() < deadline:
            try:
                count = self._socket.recv_into(scratch)
            except BlockingIOError:
                continue
            except OSError:
                return
            if not count:
                return
            limit -= count

    def close(self, *, abruptly: bool = False) -> None:
        """Let go of the connection; `abruptly` takes back what has not been sent."""
        if abruptly:
            with contextlib.suppress(OSError):  # closed already
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def _check(self, deadline: float | None, moved_at: float | None = None) -> None:
        if self.stopped or (self.stop is not None and self.stop.is_set()):
            raise ChannelError(Fault.STOPPED, STOPPED)
        if deadline is not None and self._now() >= deadline:
            raise ChannelError(Fault.LATE, "the deadline has passed")
        if self.silence_s is not None and moved_at is not None and self._now() - moved_at >= self.silence_s:
            raise ChannelError(Fault.LATE, f"the peer has been silent for {self.silence_s:g} s")

    def _raise_ended(self, deadline: float | None) -> NoReturn:
        self._check(deadline)
        raise ChannelError(Fault.ENDED, "the peer closed the connection")

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(how)

    @staticmethod
    def _broken(error: OSError) -> ChannelError:
        return ChannelError(Fault.BROKEN, f"the connection broke: {error.strerror or error}")


def tune(connection: socket.socket) -> None:
    """Set what both ends of a connection have in common; `OSError` when it is closed already."""
    connection.settimeout(None)
    slice_us = struct.pack("ll", 0, int(SLICE_S * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, slice_us)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, slice_us)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNREACHABLE_S // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, UNREACHABLE_S // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREACHABLE_S * 1000)
    if ipaddress.ip_address(connection.getpeername()[0].partition("%")[0]).is_loopback:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER_BYTES)
