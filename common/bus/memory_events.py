"""Events for a stream of the in-memory bus: bounded, in order, sent again until the stream has answered."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from common.bus.errors import StorageRefused
from common.bus.faults import Trip
from common.bus.memory_broker import STORE_TIMEOUT_S, MemoryBroker
from common.bus.observer import BusObserver
from common.bus.port import Bus, Headers, Message

MAX_WAITING_EVENTS: Final = 4096
_BACKOFF_S: Final = 0.25


class MemoryEvents:
    """The events of one connection. Over a line without faults an event is stored before `take` returns."""

    def __init__(self, server: MemoryBroker, bus: Bus, observer: BusObserver, keep: Callable[[Message], bool]) -> None:
        self._server = server
        self._bus = bus
        self._observer = observer
        self._keep = keep
        self._waiting: deque[Message] = deque()
        self._settled = asyncio.Event()
        self._is_under_way = False
        self._closed = False
        self.dropped = 0

    def take(self, subject: str, data: bytes, headers: Headers) -> bool:
        """Queue an event, or drop and count it. Never blocks."""
        if self._closed or len(self._waiting) >= MAX_WAITING_EVENTS:
            self._drop()
            return False
        self._waiting.append(Message(subject, data, headers, "", self._bus))
        self.send()
        return True

    async def flush(self, timeout_s: float) -> bool:
        """Wait until none waits, `timeout_s` seconds at most; say whether that is so."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._waiting:
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop. What still waits is counted as dropped. Twice is fine."""
        self._closed = True
        while self._waiting:
            self._drop()
            self._waiting.popleft()

    def send(self) -> None:
        """Send what waits, as far as the server takes it now. One is under way at a time."""
        while self._waiting and self._bus.is_connected and not self._is_under_way:
            message = self._waiting[0]
            trip = self._server.faults.trip(message.subject)
            if not self._server.is_direct(trip):
                self._send_slowly(message, trip)
                return
            try:
                if not self._keep(message):
                    return  # no stream wants it yet
            except StorageRefused:
                self._drop()
            self._settle()

    def _send_slowly(self, message: Message, trip: Trip) -> None:
        """Send one over a bad line. What is not answered in time is sent again: its id makes the repeat harmless."""
        self._is_under_way = True
        loop = asyncio.get_running_loop()
        answer = self._server.dispatch(self._bus, lambda: self._keep(message), trip)
        patience = loop.call_later(STORE_TIMEOUT_S, answer.cancel)

        def ended(future: asyncio.Future[bool]) -> None:
            patience.cancel()
            self._is_under_way = False
            error = None if future.cancelled() else future.exception()
            if self._closed:
                return
            if isinstance(error, StorageRefused):
                self._drop()
            elif error is not None or future.cancelled() or not future.result():
                loop.call_later(_BACKOFF_S, self.send)
                return
            self._settle()
            self.send()

        answer.add_done_callback(ended)

    def _settle(self) -> None:
        self._waiting.popleft()
        self._settled.set()

    def _drop(self) -> None:
        self.dropped += 1
        self._observer.events_dropped(1)
