"""The server half of the in-memory bus: who wants what, and the places where messages and calls meet their faults."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from common.bus.errors import BusError, BusUnavailable, NoResponders
from common.bus.faults import DIRECT, Faults, NoFaults, Trip
from common.bus.memory_store import StoredBucket, StoredStream
from common.bus.port import Bus, Message
from common.bus.queues import QueuedSubscription
from common.bus.rules import matches
from common.runtime.clock import Clock

STORE_TIMEOUT_S: Final = 5.0
"""How long a caller waits for the store."""

_MAX_WANTED: Final = 4096
"""Subjects whose receivers are remembered."""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Interest:
    """Who wants what."""

    bus: Bus
    pattern: str
    queue_group: str
    queue: QueuedSubscription


class MemoryBroker:
    """Routes messages between its connections, and stores buckets and streams.

    It can go down, as a server that dies, and freeze, as one that is stopped: then its connections stand, nothing is
    answered, and what was sent to it is done when it thaws, in the order in which it was sent.
    """

    def __init__(self, clock: Clock, *, faults: Faults | None = None) -> None:
        self.faults: Faults = faults or NoFaults()
        self.is_up = True
        self.buckets: dict[str, StoredBucket] = {}
        self.streams: dict[str, StoredStream] = {}
        self.clock = clock
        self._backlog: list[Callable[[], object]] | None = None
        self._life = 0
        self._connections: dict[Bus, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._interests: list[Interest] = []
        self._wanted: dict[str, list[Interest]] = {}
        self._inboxes: dict[str, asyncio.Future[Any]] = {}
        self._hoping: dict[asyncio.Future[Any], Bus] = {}
        self._turns: dict[str, int] = {}
        self._count = 0

    # Life.

    def go_down(self) -> None:
        """Stop answering, as a server that died. Calls in flight fail at once; what was on its way is lost."""
        self.is_up = False
        self._life += 1
        self._backlog = None
        for future in list(self._hoping):
            _break(future)
        for _, went_down in list(self._connections.values()):
            went_down()

    def come_back(self, *, wiped: bool = False) -> None:
        """Answer again, with what was stored, or with empty buckets and streams if the store was wiped."""
        if wiped:
            for bucket in self.buckets.values():
                bucket.wipe(self.next_epoch())
            self.streams = {name: StoredStream(each.config, self.clock) for name, each in self.streams.items()}
        self.is_up = True
        for bucket in self.buckets.values():
            bucket.repeat_to_watches()
        for came_back, _ in list(self._connections.values()):
            came_back()

    def freeze(self) -> None:
        """Do nothing any more, but keep what is sent. Twice is fine."""
        if self._backlog is None:
            self._backlog = []

    def thaw(self) -> None:
        """Do what was sent meanwhile, and go on. Twice is fine."""
        backlog, self._backlog = self._backlog or [], None
        for action in backlog:
            action()

    # Connections.

    def add_connection(self, bus: Bus, *, came_back: Callable[[], None], went_down: Callable[[], None]) -> None:
        """Register a connection, and how it hears that the server is gone, or answers again."""
        self._connections[bus] = came_back, went_down

    def remove_connection(self, bus: Bus) -> None:
        """Forget a connection that was closed, and all that it wanted; its calls in flight fail."""
        del self._connections[bus]
        self._interests = [each for each in self._interests if each.bus is not bus]
        self._wanted.clear()
        for future in [future for future, whose in self._hoping.items() if whose is bus]:
            _break(future)

    def next_epoch(self) -> int:
        """Return the number of a new life of a bucket: a second after the one before, whatever time it is."""
        self._count += 1
        return self._count * 1_000_000_000

    def next_name(self, kind: str) -> str:
        """Return a name that was not used before on this server."""
        self._count += 1
        return f"{kind}-{self._count}"

    def add(self, interest: Interest) -> None:
        """Register who wants what."""
        self._interests.append(interest)
        self._wanted.clear()

    def remove(self, interest: Interest) -> None:
        """Forget it. Twice is fine."""
        if interest in self._interests:
            self._interests.remove(interest)
            self._wanted.clear()

    # Calls to the store.

    def reach(self, action: Callable[[], object]) -> None:
        """Let the server do something: now, or when it thaws."""
        if self._backlog is None:
            action()
        else:
            self._backlog.append(action)

    def is_direct(self, trip: Trip) -> bool:
        """Whether a call on this trip is done and answered before `dispatch` would return."""
        return trip is DIRECT and self._backlog is None

    def dispatch(self, bus: Bus, act: Callable[[], T], trip: Trip) -> asyncio.Future[T]:
        """Send a call on its way, whatever becomes of the caller. The future gets what `act` returns or raises.

        It never ends if call or answer is lost, and with BusUnavailable if the connection breaks before.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._hope(bus, future)

        def answer(give: Callable[[], None]) -> None:
            if not trip.unanswered:
                self._later(trip.back_s, lambda: None if future.done() else give())

        def arrive() -> None:
            try:
                result = act()
            except BusError as error:
                answer(partial(future.set_exception, error))
            else:
                answer(partial(future.set_result, result))

        if not trip.lost:
            self._later(trip.there_s, lambda: self.reach(arrive))
        return future

    # Messages.

    async def ask(self, message: Message) -> Message:
        """Route a request and wait for its first answer. Raises NoResponders; BusUnavailable if the server dies."""
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._hope(message.bus, future)
        self._inboxes[message.reply] = future

        def arrive() -> None:
            if not self.route(message) and not future.done():
                future.set_exception(NoResponders(f"nobody answers on {message.subject}"))

        try:
            self.reach(arrive)
            return await future
        finally:
            del self._inboxes[message.reply]

    def route(self, message: Message) -> int:
        """Send a message on its way; return how many receivers it was meant for, before any fault."""
        future = self._inboxes.get(message.subject)
        if future is not None:
            self._deliver(message, lambda answer: None if future.done() else future.set_result(answer))
            return 1
        chosen: list[Interest] = []
        groups: dict[str, list[Interest]] = {}
        for interest in self._interested(message.subject):
            members = groups.setdefault(interest.queue_group, []) if interest.queue_group else chosen
            members.append(interest)
        for group, members in groups.items():
            self._turns[group] = self._turns.get(group, -1) + 1
            chosen.append(members[self._turns[group] % len(members)])
        for interest in chosen:
            copy = Message(message.subject, message.data, message.headers, message.reply, interest.bus)
            self._deliver(copy, interest.queue.offer)
        return len(chosen)

    def _interested(self, subject: str) -> list[Interest]:
        """Who wants what comes on a subject, in the order in which they came; looked up once, as long as nobody comes or goes."""
        found = self._wanted.get(subject)
        if found is None:
            if len(self._wanted) >= _MAX_WANTED:
                self._wanted.clear()
            found = [each for each in self._interests if matches(each.pattern, subject)]
            self._wanted[subject] = found
        return found

    def _deliver(self, message: Message, receive: Callable[[Message], object]) -> None:
        """Every delivery passes here: the one place where messages meet faults."""
        for delay in self.faults.deliveries(message.subject):
            self._later(delay, lambda: receive(message))

    def _later(self, delay_s: float, action: Callable[[], object]) -> None:
        """Act after a delay, unless the server dies meanwhile: what was under way dies with its connections."""
        if delay_s <= 0:
            action()
            return
        life = self._life
        asyncio.get_running_loop().call_later(delay_s, lambda: action() if self._life == life else None)

    def _hope(self, bus: Bus, future: asyncio.Future[Any]) -> None:
        """Remember who waits for what, until it has ended."""
        self._hoping[future] = bus
        future.add_done_callback(lambda done: self._hoping.pop(done, None))


def _break(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(BusUnavailable("the connection broke before the answer came", maybe_done=True))
