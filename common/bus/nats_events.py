"""Events for a stream, sent in the background: bounded, in order, repeated until stored, and counted when lost."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from common.bus.errors import BusTimeout, BusUnavailable, StorageRefused
from common.bus.nats_storage import JetStream
from common.bus.observer import BusObserver
from common.bus.port import Headers
from common.runtime.clock import Clock, Deadline
from common.runtime.tasks import BoundedTasks

MAX_WAITING_EVENTS: Final = 4096
_MAX_IN_FLIGHT: Final = 64
_GIVE_UP_S: Final = 60.0
"""Well within the window in which the stream recognises a repeat: a later one could be stored twice."""
_BACKOFF_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class _Event:
    subject: str
    data: bytes
    headers: Headers
    give_up: Deadline


class EventPump:
    """Takes events without waiting and stores them as fast as the server acknowledges."""

    def __init__(
        self,
        jetstream: JetStream,
        clock: Clock,
        group: asyncio.TaskGroup,
        wait_connected: Callable[[], Awaitable[None]],
        observer: BusObserver,
    ) -> None:
        self._jetstream = jetstream
        self._observer = observer
        self._clock = clock
        self._wait_connected = wait_connected
        self._sending = BoundedTasks(group, name="bus-event", limit=_MAX_IN_FLIGHT)
        self._waiting: deque[_Event] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self.dropped = 0
        self._task = group.create_task(self._run(), name="bus-events")

    def take(self, subject: str, data: bytes, headers: Headers) -> bool:
        """Queue an event, or drop and count it. Never blocks."""
        if self._closed or len(self._waiting) >= MAX_WAITING_EVENTS:
            self._drop(1)
            return False
        self._waiting.append(_Event(subject, data, headers, Deadline.after(self._clock, _GIVE_UP_S)))
        self._changed.set()
        return True

    async def flush(self, deadline: Deadline) -> bool:
        """Wait until nothing waits and nothing is in flight; say whether that was so by the deadline."""
        try:
            async with deadline.timeout():
                while self._waiting:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return await self._sending.wait_idle(deadline)

    def close(self) -> None:
        """Stop. What still waits is counted as dropped. Twice is fine."""
        if not self._closed:
            self._closed = True
            self._drop(len(self._waiting) + self._sending.running)
        self._waiting.clear()
        self._sending.cancel()
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._changed.clear()
                await self._changed.wait()
            event = self._waiting[0]
            await self._sending.start(partial(self._send, event))
            self._waiting.popleft()
            self._changed.set()

    async def _send(self, event: _Event) -> None:
        while not event.give_up.passed:
            try:
                async with event.give_up.timeout():
                    await self._wait_connected()
                await self._jetstream.store(event.subject, event.data, event.headers)
            except (BusTimeout, BusUnavailable):
                await self._clock.sleep(_BACKOFF_S)  # the message id makes the repeat harmless
            except StorageRefused:
                break
            except TimeoutError:
                continue
            else:
                return
        self._drop(1)

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._observer.events_dropped(count)
