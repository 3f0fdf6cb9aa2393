"""Opening a TCP connection that can be given up: standard sockets wait for an unreachable host in one piece."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Callable

from common.dataplane.waiting import wait_for


def dial(
    host: str, port: int, now: Callable[[], float], deadline: float, stop: threading.Event | None
) -> socket.socket:
    """Connect to the first address of `host` that takes it. Raises `OSError` when none does in time, or once `stop` is set."""
    problem: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            connection = socket.socket(family, kind, protocol)
        except OSError as error:
            problem = error
            continue
        try:
            connection.setblocking(False)
            _connect(connection, address, now, deadline, stop)
        except OSError as error:
            connection.close()
            problem = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise problem


def _connect(
    connection: socket.socket,
    address: object,
    now: Callable[[], float],
    deadline: float,
    stop: threading.Event | None,
) -> None:
    code = connection.connect_ex(address)  # type: ignore[arg-type]  # as `getaddrinfo` gave it
    if code == errno.EINPROGRESS:
        wait_for(connection, select.POLLOUT, now, deadline, stop)
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
