"""Events for a stream, sent in the background: bounded, in order, repeated until stored, and counted when lost."""

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final

from common.bus.errors import BusError, BusTimeout, BusUnavailable, NoResponders
from common.bus.nats_requests import Answer, Fate, Requests, answered
from common.bus.nats_storage import API_TIMEOUT_S, stored_sequence
from common.bus.observer import BusObserver, RequestKind
from common.bus.port import Headers
from common.bus.request_outcomes import outcome_of
from common.runtime.clock import Clock, Deadline

MAX_WAITING_EVENTS: Final = 4096
_MAX_IN_FLIGHT: Final = 64
_GIVE_UP_S: Final = 60.0
"""Well within the window in which the stream recognises a repeat: a later one could be stored twice."""
_LOOK_EVERY_S: Final = 0.25


@dataclass(slots=True, eq=False)
class _Event:
    """`give_up_at` and `sent_at` are readings of the clock; `inbox` is where its answer comes to."""

    number: int
    subject: str
    data: bytes
    headers: Headers
    give_up_at: float
    sent_at: float = 0.0
    inbox: str = ""


class EventPump:
    """Takes events without waiting and stores them as fast as the server acknowledges.

    Some are in flight at once, none of them in a task of its own. When one was not stored, nothing is sent for a moment; then it goes
    again, ahead of those that wait.
    """

    def __init__(self, requests: Requests, clock: Clock, group: asyncio.TaskGroup, observer: BusObserver) -> None:
        self._requests = requests
        self._observer = observer
        self._clock = clock
        self._waiting: deque[_Event] = deque()
        self._in_flight: set[_Event] = set()
        self._failed: list[_Event] = []
        self._count = 0
        self._arrived = asyncio.Event()
        self._settled = asyncio.Event()
        self._closed = False
        self.dropped = 0
        self._task = group.create_task(self._run(), name="bus-events")

    def take(self, subject: str, data: bytes, headers: Headers) -> bool:
        """Queue an event, or drop and count it. Never blocks."""
        if self._closed or len(self._waiting) + len(self._failed) >= MAX_WAITING_EVENTS:
            self._drop(1)
            return False
        self._count += 1
        self._waiting.append(_Event(self._count, subject, data, headers, self._clock.monotonic() + _GIVE_UP_S))
        self._arrived.set()
        self._send()
        return True

    async def flush(self, deadline: Deadline) -> bool:
        """Wait until nothing waits and nothing is in flight; say whether that was so by the deadline."""
        try:
            async with deadline.timeout():
                while self._num_unsettled:
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop. What still waits or is in flight is counted as dropped. Twice is fine."""
        self._closed = True
        self._drop(self._num_unsettled)
        for event in self._in_flight:
            self._requests.forget(event.inbox)
        self._in_flight.clear()
        self._waiting.clear()
        self._failed.clear()
        self._task.cancel()

    @property
    def _num_unsettled(self) -> int:
        return len(self._waiting) + len(self._in_flight) + len(self._failed)

    def _send(self) -> None:
        """Send what waits, as far as there is room."""
        while self._waiting and not self._failed and len(self._in_flight) < _MAX_IN_FLIGHT and self._requests.are_ready:
            event = self._waiting.popleft()
            event.sent_at = self._clock.monotonic()
            told = partial(self._told, event)
            event.inbox = self._requests.post(event.subject, event.data, told, headers=event.headers)
            self._in_flight.add(event)

    def _told(self, event: _Event, answer: Answer) -> None:
        """Hear what became of one. Its id makes a repeat harmless."""
        self._in_flight.discard(event)
        error: BusError | None = None
        try:
            data = answered(event.subject, answer).data
        except BusError as caught:
            error = caught
        self._observer.request_ended(RequestKind.STORE, outcome_of(error), self._clock.monotonic() - event.sent_at)
        try:
            if error is None:
                stored_sequence(event.subject, data)
        except BusError as caught:
            error = caught
        if isinstance(error, BusTimeout | BusUnavailable | NoResponders):
            self._failed.append(event)
            return
        if error is not None:
            self._drop(1)
        self._settled.set()
        self._send()

    async def _run(self) -> None:
        """Look after what is not stored at once: it had no answer or no connection, or nothing stored it just then."""
        while True:
            while not self._num_unsettled:
                self._arrived.clear()
                await self._arrived.wait()
            await self._clock.sleep(_LOOK_EVERY_S)
            self._look_after()

    def _look_after(self) -> None:
        now = self._clock.monotonic()
        for event in [each for each in self._in_flight if now >= each.sent_at + API_TIMEOUT_S]:
            self._requests.forget(event.inbox)
            self._told(event, Fate.OVERDUE)
        self._failed.sort(key=lambda each: each.number, reverse=True)
        self._waiting.extendleft(self._failed)
        self._failed.clear()
        while self._waiting and now >= self._waiting[0].give_up_at:
            self._waiting.popleft()
            self._drop(1)
            self._settled.set()
        self._send()

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._observer.events_dropped(count)
