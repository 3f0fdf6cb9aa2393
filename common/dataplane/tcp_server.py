"""Where peers call the owner of TCP regions: one listening socket, one thread a connection, and a bound on both kinds of callers.

A caller that has not said which region it wants has `GREETING_TIMEOUT_S` for it. There are few places for such callers, and who
comes when all are taken takes that of the one who has been silent longest: a flood of silence keeps nobody out for long.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from common.dataplane.port import DataPlaneError
from common.dataplane.refusal_counts import RefusalCounts
from common.dataplane.tcp_caller import Caller
from common.dataplane.tcp_channel import LOOPBACK_BUFFER_BYTES, Channel
from common.dataplane.tcp_region import TcpRegion
from common.dataplane.tcp_wire import Hello

MAX_CALLERS: Final = 1024
MAX_GREETING: Final = 64
JOIN_TIMEOUT_S: Final = 5.0
_BACKLOG: Final = 128
_NAP_S: Final = 0.01


class TcpServer:
    """Serves the regions that were added, until `close`."""

    def __init__(self, host: str, port: int, *, now: Callable[[], float], refusals: RefusalCounts) -> None:
        """Listen on `host` (a name or an address of this machine) and `port` (0: a free one). Raises `DataPlaneError`."""
        self._now = now
        self._refusals = refusals
        self._guard = threading.Lock()
        self._regions: dict[str, TcpRegion] = {}
        self._callers: dict[Caller, threading.Thread] = {}
        self._closed = False
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.socket(family, kind, protocol)
            try:
                self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if ipaddress.ip_address(address[0]).is_loopback:  # before it listens: accepted sockets inherit it
                    self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER_BYTES)
                self._listener.bind(address)
                self._listener.listen(_BACKLOG)
            except OSError:
                self._listener.close()
                raise
        except OSError as error:
            raise DataPlaneError(
                f"address of the data plane (transport_host): {host!r} cannot be used: {error}"
            ) from error
        self.port: Final[int] = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept_all, name="dataplane-tcp-accept", daemon=True)
        self._thread.start()

    @property
    def num_callers(self) -> int:
        """Connections that are open."""
        with self._guard:
            return len(self._callers)

    def add(self, region: TcpRegion) -> None:
        """Serve a region under its id."""
        with self._guard:
            self._regions[region.descriptor.region_id] = region

    def remove(self, region: TcpRegion) -> None:
        """Stop serving a region: its callers see the end of their connections. Idempotent."""
        with self._guard:
            if self._regions.get(region.descriptor.region_id) is region:
                del self._regions[region.descriptor.region_id]
            for caller in self._callers:
                if caller.region is region:
                    caller.stop()

    def find(self, hello: Hello) -> TcpRegion | None:
        """The region that a caller wants, if it is this very one."""
        with self._guard:
            region = self._regions.get(hello.region_id)
        if region is None:
            return None
        own = region.descriptor
        actual = Hello(
            peer_id=own.peer_id,
            incarnation=own.incarnation,
            region_id=own.region_id,
            generation=own.generation,
            length=own.length,
            num_cells=own.num_cells,
        )
        return region if actual == hello else None

    def close(self) -> None:
        """Stop listening, end all connections and their threads. Idempotent."""
        with self._guard:
            self._closed = True
            callers = dict(self._callers)
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join(JOIN_TIMEOUT_S)
        self._listener.close()
        for caller in callers:
            caller.stop()
        deadline = self._now() + JOIN_TIMEOUT_S
        for thread in callers.values():
            thread.join(max(0.0, deadline - self._now()))

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(_NAP_S)  # the process has run out of descriptors: one may become free
                continue
            try:
                self._accept(connection)
            except (OSError, RuntimeError):  # it went away, or there is no room for another thread
                connection.close()

    def _accept(self, connection: socket.socket) -> None:
        caller = Caller(Channel(connection, self._now), self.find, self._now, self._refusals)
        thread = threading.Thread(target=self._serve, args=(caller,), name="dataplane-tcp-caller", daemon=True)
        with self._guard:
            greeting = [other for other in self._callers if other.region is None and not other.stopped]
            full = self._closed or len(self._callers) >= MAX_CALLERS
            if not full:
                if len(greeting) >= MAX_GREETING:
                    greeting[0].stop()
                self._callers[caller] = thread
        if full:
            connection.close()
            return
        try:
            thread.start()
        except RuntimeError:
            self._forget(caller)
            raise

    def _serve(self, caller: Caller) -> None:
        try:
            caller.serve()
        finally:
            self._forget(caller)

    def _forget(self, caller: Caller) -> None:
        with self._guard:
            self._callers.pop(caller, None)
