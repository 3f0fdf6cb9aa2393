"""The bus of a simulation: one server, and connections that can be cut off or vanish with their process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from common.bus.errors import BusTimeout, BusUnavailable
from common.bus.faults import Faults, Trip
from common.bus.memory import MemoryBus, MemoryServer
from common.bus.memory_broker import STORE_TIMEOUT_S
from common.bus.observer import BusObserver
from common.bus.port import Headers, Message
from common.bus.queues import QueuedWatch
from common.runtime.clock import Clock
from tests.simulation.processes import simulation_loop

T = TypeVar("T")


class SimulatedServer(MemoryServer):
    """What is under way here is on a wire: it arrives, whatever became of the process that sent it."""

    def __init__(self, clock: Clock, faults: Faults, observer: BusObserver) -> None:
        super().__init__(clock, faults=faults)
        self._observer = observer
        self.num_messages = 0

    @property
    def answers(self) -> bool:
        """Whether it is up, and does not stand still."""
        return self.is_up and self._backlog is None

    def link(self) -> SimulatedBus:
        """Return a new connection."""
        return SimulatedBus(self, self._observer)

    def route(self, message: Message) -> int:
        """See `MemoryBroker.route`. Who is cut off gets no answer."""
        self.num_messages += 1
        inbox = self._inboxes.get(message.subject)
        asker = None if inbox is None else self._hoping.get(inbox)
        if isinstance(asker, SimulatedBus) and asker.is_cut:
            return 1
        return super().route(message)

    def _deliver(self, message: Message, receive: Callable[[Message], object]) -> None:
        if not (isinstance(message.bus, SimulatedBus) and message.bus.is_cut):
            super()._deliver(message, receive)

    def _later(self, delay_s: float, action: Callable[[], object]) -> None:
        if delay_s <= 0:
            action()
            return
        life = self._life
        simulation_loop().call_outside(delay_s, lambda: action() if self._life == life else None)


class SimulatedBus(MemoryBus):
    """One connection. While it is cut off all that it sends or is sent is lost; with `notices` it also knows."""

    def __init__(self, server: SimulatedServer, observer: BusObserver) -> None:
        super().__init__(server, observer)
        self.is_cut = False
        self._notices = False
        self._patterns: dict[QueuedWatch, tuple[str, str]] = {}

    def cut(self, *, notices: bool) -> None:
        """Cut it off."""
        self.is_cut, self._notices = True, notices
        for watch, (bucket, _) in self._patterns.items():
            self.stored_bucket(bucket).remove_watch(watch)
        if notices:
            self._went_down()

    def heal(self) -> None:
        """Let it reconnect, unless it has been closed meanwhile."""
        if not self.is_cut or self._closed:
            return
        self.is_cut = self._notices = False
        for watch, (bucket, pattern) in self._patterns.items():
            if watch in self._watches:
                self.stored_bucket(bucket).add_watch(watch, pattern)
        self._came_back()

    def vanish(self) -> None:
        """End with its process: nobody inside hears of it."""
        if self._closed:
            return
        self._closed = True
        self._events.close()
        self._server.remove_connection(self)
        for queue in self._queues:
            queue.close()
        for watch in self._watches:
            bucket, _ = self._patterns[watch]
            self.stored_bucket(bucket).remove_watch(watch)
            watch.close()

    @property
    def is_connected(self) -> bool:
        """See `port.Bus.is_connected`."""
        return super().is_connected and not self._notices

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        """See `port.Bus.publish`."""
        if self.is_cut:
            self._check_connected()
            return
        await super().publish(subject, data, headers)

    def publish_event(self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None) -> bool:
        """Events are for people: nobody looks at those of a simulation."""
        del subject, data, message_id, headers
        return True

    def add_watch(self, bucket: str, pattern: str) -> QueuedWatch:
        """See `memory_bucket.Link.add_watch`."""
        watch = super().add_watch(bucket, pattern)
        self._patterns[watch] = (bucket, pattern)
        return watch

    async def _request(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None) -> Message:
        if self.is_cut and timeout_s > 0:
            self._check_connected()
            await asyncio.sleep(timeout_s)
            raise BusTimeout.of_request(subject, timeout_s)
        return await super()._request(subject, data, timeout_s=timeout_s, headers=headers)

    def _check_connected(self) -> None:
        super()._check_connected()
        if self._notices:
            raise BusUnavailable("the connection is cut", maybe_done=False)

    async def _ask(self, trip: Trip, act: Callable[[], T]) -> T:
        if self.is_cut:
            self._check_connected()
            await asyncio.sleep(STORE_TIMEOUT_S)
            raise BusTimeout("no answer from the store")
        return await super()._ask(trip, act)
