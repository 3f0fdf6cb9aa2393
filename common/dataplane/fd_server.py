"""Hands out descriptors of regions over a Unix socket, and keeps each connection open as a sign of life.

One thread a process. A client sends one request; the answer is the region's descriptor, or why there is none. From then on
nothing is said: end-of-file tells a client that the region is closed or its owner dead, in containers too, where process ids
say nothing. Only processes of the same user are answered.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from common.dataplane.ofd_lock import reopen
from common.dataplane.port import DataPlaneError
from common.dataplane.waiting import wait_for

MAX_CONNECTIONS: Final = 4096
MAX_MESSAGE_BYTES: Final = 4096
_MAX_PATH_BYTES: Final = 107
_PREFIX: Final = "dp-"
_STARTING_S: Final = 60.0
"""How long a socket may stand under its hidden name: a process that starts takes no time from there to its real one."""
_NAP_S: Final = 0.01
_CREDENTIALS: Final = struct.Struct("iII")


class RegionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks for: a region of one start of one peer, and the memory that had this id at the time."""

    peer_id: str
    incarnation: str
    region_id: str
    generation: int = 0


class RegionReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; with an empty `error` one descriptor comes along."""

    error: str = ""


class FdServer:
    """Serves the regions that were added, until `close`."""

    def __init__(self, directory: Path) -> None:
        """Listen on a new socket in `directory` (made if missing, for this user alone) and clear away sockets of dead processes."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_dead_sockets(directory)
        except OSError as error:
            text = f"socket directory (transport_dir): {str(directory)!r} cannot be used: {error.strerror}"
            raise DataPlaneError(text) from error
        name = f"{_PREFIX}{os.urandom(6).hex()}.sock"
        self.path: Final = directory / name
        hidden = directory / f".{name}"
        if len(os.fsencode(hidden)) > _MAX_PATH_BYTES:
            raise DataPlaneError(
                f"socket directory: {str(directory)!r} is too long; a socket's path has at most {_MAX_PATH_BYTES} bytes"
            )
        self._fds: dict[RegionRequest, int] = {}
        self._clients: dict[socket.socket, RegionRequest | None] = {}
        self._guard = threading.Lock()
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(os.fspath(hidden))
            self._listener.listen(128)
            # Seen under its name only when it listens: otherwise another starting process would take it for a dead one's.
            hidden.rename(self.path)
            _remove_unfinished_sockets(directory, self.path.lstat().st_mtime - _STARTING_S)
        except OSError as error:
            self._listener.close()
            text = f"socket directory (transport_dir): no socket can be made in {str(directory)!r}: {error.strerror}"
            raise DataPlaneError(text) from error
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="dataplane-fd-server", daemon=True)
        self._thread.start()

    def add(self, request: RegionRequest, fd: int) -> None:
        """Answer `request` with `fd`, which stays the caller's and must be open until `remove`."""
        with self._guard:
            self._fds[request] = fd

    def remove(self, request: RegionRequest) -> None:
        """Stop serving a region and let its clients see the end of it. Idempotent."""
        with self._guard:
            self._fds.pop(request, None)
            for client, wanted in self._clients.items():
                if wanted == request:
                    with contextlib.suppress(OSError):
                        client.shutdown(socket.SHUT_RDWR)  # the thread sees end-of-file and closes it

    def close(self) -> None:
        """Stop the thread, close all connections, remove the socket. Idempotent."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
        self._wake_writer.close()
        self._thread.join()
        self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_reader:
                    self._close_all()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return  # it went away
        except OSError:
            time.sleep(_NAP_S)  # descriptors ran out: one may become free, and the next event comes at once
            return
        raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.geteuid() or len(self._clients) >= MAX_CONNECTIONS:
            client.close()
            return
        client.setblocking(False)
        with self._guard:
            self._clients[client] = None
        self._selector.register(client, selectors.EVENT_READ)

    def _hear(self, client: socket.socket) -> None:
        try:
            message = client.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message or not self._answer(client, message):
            self._drop(client)

    def _answer(self, client: socket.socket, message: bytes) -> bool:
        """Answer one request; whether the connection lives on."""
        try:
            request = msgspec.msgpack.decode(message, type=RegionRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._send(client, RegionReply(error=f"not a request: {error}"), None)
            return False
        try:
            copy = self._open(client, request)
        except OSError as error:  # descriptors ran out
            self._send(client, RegionReply(error=f"the region cannot be opened: {error.strerror}"), None)
            return False
        if copy is None:
            text = f"no region {request.region_id!r} of incarnation {request.incarnation!r} here"
            self._send(client, RegionReply(error=text), None)
            return False
        try:
            return self._send(client, RegionReply(), copy)
        finally:
            os.close(copy)

    def _open(self, client: socket.socket, request: RegionRequest) -> int | None:
        """A descriptor of the region that is asked for; None if it is not here."""
        with self._guard:
            fd = self._fds.get(request)
            if fd is None:
                return None
            # Opened anew: a client that forgets to do so must not share the owner's locks.
            copy = reopen(fd)
            self._clients[client] = request
            return copy

    @staticmethod
    def _send(client: socket.socket, reply: RegionReply, fd: int | None) -> bool:
        try:
            socket.send_fds(client, [msgspec.msgpack.encode(reply)], [] if fd is None else [fd])
        except OSError:
            return False
        return True

    def _drop(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        with self._guard:
            self._clients.pop(client, None)
        client.close()

    def _close_all(self) -> None:
        for client in tuple(self._clients):
            self._drop(client)
        self._selector.close()
        self._listener.close()
        self._wake_reader.close()


def remove_dead_sockets(directory: Path) -> None:
    """Remove sockets that killed processes left in `directory`: those that nobody listens on."""
    for path in directory.glob(f"{_PREFIX}*.sock"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
                try:
                    probe.connect(os.fspath(path))
                except ConnectionRefusedError:
                    path.unlink(missing_ok=True)


def _remove_unfinished_sockets(directory: Path, before: float) -> None:
    """Remove what processes left that were killed while they started: nobody listens yet, so that only its age tells it from another's."""
    for path in directory.glob(f".{_PREFIX}*.sock"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISSOCK(status.st_mode) and status.st_mtime < before:
                path.unlink(missing_ok=True)


def request_fd(
    path: str, request: RegionRequest, now: Callable[[], float], deadline: float, stop: threading.Event | None = None
) -> tuple[socket.socket, int]:
    """Ask the server at `path` for a region: the connection, to be kept as a sign of life, and the descriptor; both the caller's.

    Raises `DataPlaneError` when nobody answers by `deadline`, `stop` is set or the region is not there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # To connect to a socket of this host, and to send the first message, never waits: a full queue is an error.
        connection.setblocking(False)
        connection.connect(path)
        connection.send(msgspec.msgpack.encode(request))
        wait_for(connection, select.POLLIN, now, deadline, stop)
        message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
        for fd in fds:
            os.set_inheritable(fd, False)
    except OSError as error:
        connection.close()
        raise DataPlaneError(f"the peer at {path!r} does not answer: {error}") from error
    try:
        reply = msgspec.msgpack.decode(message, type=RegionReply)
    except msgspec.MsgspecError:
        reply = RegionReply(error="the peer closed the connection without an answer")
    if reply.error or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        connection.close()
        raise DataPlaneError(f"the peer at {path!r} refuses: {reply.error or 'no descriptor came'}")
    return connection, fds[0]
