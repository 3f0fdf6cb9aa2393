"""The server half of the in-memory bus: who wants what, and the one place where messages are delivered."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from common.bus.errors import NoResponders
from common.bus.faults import Faults, NoFaults
from common.bus.memory_store import StoredBucket, StoredStream
from common.bus.port import Bus, Message
from common.bus.queues import QueuedSubscription
from common.bus.rules import matches
from common.runtime.clock import Clock


@dataclass(eq=False, slots=True)
class Interest:
    """Who wants what."""

    bus: Bus
    pattern: str
    queue_group: str
    queue: QueuedSubscription


class MemoryBroker:
    """Routes messages between its connections, and stores buckets and streams."""

    def __init__(self, clock: Clock, *, faults: Faults | None = None) -> None:
        self.faults: Faults = faults or NoFaults()
        self.is_up = True
        self.buckets: dict[str, StoredBucket] = {}
        self.streams: dict[str, StoredStream] = {}
        self.clock = clock
        self._connections: dict[Bus, Callable[[], None]] = {}
        self._interests: list[Interest] = []
        self._requests: dict[str, asyncio.Future[Message | None]] = {}
        self._turns: dict[str, int] = {}
        self._count = 0

    def add_connection(self, bus: Bus, came_back: Callable[[], None]) -> None:
        """Register a connection, and how it hears that the server answers again."""
        self._connections[bus] = came_back

    def go_down(self) -> None:
        """Stop answering, as a server that died. Requests in flight fail at once."""
        self.is_up = False
        for future in self._requests.values():
            if not future.done():
                future.set_result(None)

    def come_back(self, *, wiped: bool = False) -> None:
        """Answer again, with what was stored, or with empty buckets and streams if the store was wiped."""
        if wiped:
            for bucket in self.buckets.values():
                bucket.wipe(self.next_name("epoch"))
            self.streams = {name: StoredStream(each.config, self.clock) for name, each in self.streams.items()}
        self.is_up = True
        for bucket in self.buckets.values():
            bucket.repeat_to_watches()
        for came_back in list(self._connections.values()):
            came_back()

    def next_name(self, kind: str) -> str:
        """Return a name that was not used before on this server."""
        self._count += 1
        return f"{kind}-{self._count}"

    def add(self, interest: Interest) -> None:
        """Register who wants what."""
        self._interests.append(interest)

    def remove(self, interest: Interest) -> None:
        """Forget it. Twice is fine."""
        if interest in self._interests:
            self._interests.remove(interest)

    def remove_connection(self, bus: Bus) -> None:
        """Forget a connection that was closed, and all that it wanted."""
        del self._connections[bus]
        self._interests = [each for each in self._interests if each.bus is not bus]

    async def ask(self, message: Message) -> Message | None:
        """Route a request and wait for its first answer; None if the server dies. Raises NoResponders."""
        future: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
        self._requests[message.reply] = future
        try:
            if not self.route(message):
                raise NoResponders(f"nobody answers on {message.subject}")
            return await future
        finally:
            del self._requests[message.reply]

    def route(self, message: Message) -> int:
        """Send a message on its way; return how many receivers it was meant for, before any fault."""
        future = self._requests.get(message.subject)
        if future is not None:
            self._deliver(message, lambda answer: None if future.done() else future.set_result(answer))
            return 1
        chosen: list[Interest] = []
        groups: dict[str, list[Interest]] = {}
        for interest in self._interests:
            if matches(interest.pattern, message.subject):
                members = groups.setdefault(interest.queue_group, []) if interest.queue_group else chosen
                members.append(interest)
        for group, members in groups.items():
            self._turns[group] = self._turns.get(group, -1) + 1
            chosen.append(members[self._turns[group] % len(members)])
        for interest in chosen:
            copy = Message(message.subject, message.data, message.headers, message.reply, interest.bus)
            self._deliver(copy, interest.queue.offer)
        return len(chosen)

    def _deliver(self, message: Message, receive: Callable[[Message], object]) -> None:
        """Every delivery passes here: the one place where faults happen."""
        for delay in self.faults.deliveries(message.subject):
            if delay <= 0:
                receive(message)
            else:
                asyncio.get_running_loop().call_later(delay, lambda: receive(message) if self.is_up else None)
