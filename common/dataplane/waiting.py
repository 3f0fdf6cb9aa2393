"""Waiting for a peer on a socket, until a deadline and no longer than somebody wants to know."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Final

from common.dataplane.port import STOP_SLICE_S

STOPPED: Final = "this end was told to stop"


def wait_for(
    connection: socket.socket, event: int, now: Callable[[], float], deadline: float, stop: threading.Event | None
) -> None:
    """Return when `event` (of `select.poll`), an end or an error is there. Raises `TimeoutError` at the deadline, `OSError` on `stop`."""
    poll = select.poll()
    poll.register(connection, event)
    while True:
        if stop is not None and stop.is_set():
            raise OSError(STOPPED)
        remaining_s = deadline - now()
        if remaining_s <= 0:
            raise TimeoutError("timed out")
        if poll.poll(1 + int(1000 * min(remaining_s, STOP_SLICE_S))):
            return
