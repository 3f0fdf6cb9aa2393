"""The bus in memory: for tests, simulations and services that share one process. Deterministic.

A MemoryServer is what a NATS server is, and a MemoryBus is one connection to it. Time is the clock's and the loop's,
so everything also runs in virtual time.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from common.bus.errors import BusTimeout, BusUnavailable, StorageRefused
from common.bus.faults import DIRECT, Trip
from common.bus.memory_broker import STORE_TIMEOUT_S, Interest, MemoryBroker
from common.bus.memory_bucket import MemoryBucket
from common.bus.memory_events import MemoryEvents
from common.bus.memory_store import StoredBucket, StoredStream
from common.bus.observer import BusObserver, NoObserver, RequestKind
from common.bus.port import (
    DEFAULT_TIMEOUT,
    MESSAGE_ID_HEADER,
    BucketConfig,
    Headers,
    Message,
    Stored,
    StreamConfig,
)
from common.bus.queues import QueuedSubscription, QueuedWatch
from common.bus.request_outcomes import observed
from common.bus.rules import check_bucket, check_message, check_pattern, check_stream, check_subject
from common.runtime.trace import traced

T = TypeVar("T")


class MemoryServer(MemoryBroker):
    """What a NATS server is: routes messages between its connections, stores buckets and streams, can go down."""

    def connect(self, observer: BusObserver | None = None) -> "MemoryBus":
        """Return a new connection."""
        return MemoryBus(self, observer or NoObserver())


class MemoryBus:
    """A `port.Bus` on a MemoryServer: see `MemoryServer.connect`."""

    def __init__(self, server: MemoryBroker, observer: BusObserver) -> None:
        self._server = server
        self._observer = observer
        server.add_connection(self, came_back=self._came_back, went_down=self._went_down)
        self._reconnects = 0
        self._reconnected = asyncio.Event()
        self._closed = False
        self._queues: set[QueuedSubscription] = set()
        self._watches: set[QueuedWatch] = set()
        self._events = MemoryEvents(server, self, observer, self._keep)

    @property
    def is_connected(self) -> bool:
        """See `port.Bus.is_connected`."""
        return self._server.is_up and not self._closed

    @property
    def replicas(self) -> int:
        """See `port.Bus.replicas`."""
        return 1

    @property
    def reconnects(self) -> int:
        """See `port.Bus.reconnects`."""
        return self._reconnects

    async def reconnected(self, after: int) -> int:
        """See `port.Bus.reconnected`."""
        while self._reconnects <= after:
            self._reconnected.clear()
            await self._reconnected.wait()
        return self._reconnects

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        """See `port.Bus.publish`."""
        check_subject(subject)
        headers = traced(headers)
        check_message(data, headers)
        if not self.is_connected:
            self._observer.publishes_lost(1)
        self._check_connected()
        message = Message(subject, data, dict(headers or {}), "", self)

        def arrive() -> None:
            with contextlib.suppress(StorageRefused):  # a plain publisher does not hear of it
                self._store(message)
            self._server.route(message)

        self._server.reach(arrive)

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT,  # noqa: ASYNC109 - the port has it
        headers: Headers | None = None,
    ) -> Message:
        """See `port.Bus.request`."""
        check_subject(subject)
        headers = traced(headers)
        check_message(data, headers)
        with observed(self._observer, RequestKind.PEER):
            return await self._request(subject, data, timeout_s=timeout, headers=headers)

    async def _request(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None) -> Message:
        if timeout_s <= 0:
            raise BusTimeout(f"no time was left to ask {subject}")
        self._check_connected()
        inbox = self._server.next_name("_INBOX.memory")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._server.ask(Message(subject, data, dict(headers or {}), inbox, self))
        except TimeoutError:
            raise BusTimeout.of_request(subject, timeout_s) from None

    async def subscribe(self, subject: str, *, queue_group: str = "", max_pending: int = 65536) -> QueuedSubscription:
        """See `port.Bus.subscribe`."""
        check_pattern(subject)
        self._check_connected()

        async def leave() -> None:
            self._server.remove(interest)
            self._queues.discard(queue)

        queue = QueuedSubscription(max_pending=max_pending, leave=leave, dropped=self._observer.messages_dropped)
        interest = Interest(self, subject, queue_group, queue)
        await self._ask(DIRECT, lambda: self._server.add(interest))
        self._queues.add(queue)
        return queue

    async def flush(self) -> None:
        """See `port.Bus.flush`."""
        await self._ask(DIRECT, lambda: None)

    async def ensure_bucket(self, config: BucketConfig) -> MemoryBucket:
        """See `port.Bus.ensure_bucket`."""
        check_bucket(config)

        def ensure() -> None:
            buckets = self._server.buckets
            if config.name in buckets:
                buckets[config.name].config = config
            else:
                buckets[config.name] = StoredBucket(config, self._server.clock, self._server.next_epoch())

        await self._ask(DIRECT, ensure)
        return MemoryBucket(self, config.name)

    async def ensure_stream(self, config: StreamConfig) -> None:
        """See `port.Bus.ensure_stream`."""
        check_stream(config)

        def ensure() -> None:
            streams = self._server.streams
            if config.name in streams:
                streams[config.name].config = config
            else:
                streams[config.name] = StoredStream(config, self._server.clock)

        await self._ask(DIRECT, ensure)
        self._events.send()

    def publish_event(self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None) -> bool:
        """See `port.Bus.publish_event`."""
        labelled = {**traced(headers), MESSAGE_ID_HEADER: message_id}
        check_subject(subject)
        check_message(data, labelled)
        return self._events.take(subject, data, labelled)

    @property
    def events_dropped(self) -> int:
        """See `port.Bus.events_dropped`."""
        return self._events.dropped

    async def flush_events(self, timeout: float = DEFAULT_TIMEOUT) -> bool:  # noqa: ASYNC109 - the port has it
        """See `port.Bus.flush_events`."""
        return await self._events.flush(timeout)

    async def read_stream(self, name: str, subject: str = ">") -> AsyncIterator[Stored]:
        """See `port.Bus.read_stream`."""
        check_pattern(subject)

        def read() -> list[Stored]:
            stream = self._server.streams.get(name)
            if stream is None:
                raise StorageRefused(f"stream {name} does not exist")
            return stream.matching(subject)

        for stored in await self._ask(DIRECT, read):
            yield stored

    async def ask_store(self, subject: str, act: Callable[[], T]) -> T:
        """See `memory_bucket.Link.ask_store`."""
        return await self._ask(self._server.faults.trip(subject), act)

    def stored_bucket(self, name: str) -> StoredBucket:
        """See `memory_bucket.Link.stored_bucket`."""
        return self._server.buckets[name]

    def add_watch(self, bucket: str, pattern: str) -> QueuedWatch:
        """See `memory_bucket.Link.add_watch`."""
        self._check_connected()

        async def leave() -> None:
            self.stored_bucket(bucket).remove_watch(watch)
            self._watches.discard(watch)

        watch = QueuedWatch(leave=leave)
        self._watches.add(watch)
        self._server.reach(lambda: self.stored_bucket(bucket).add_watch(watch, pattern))
        return watch

    async def close(self) -> None:
        """Close the connection: iterations end, calls raise BusUnavailable, waiting events are dropped. Twice is fine."""
        if not self._closed:
            self._events.close()
            self._closed = True
            self._server.remove_connection(self)
            for queue in self._queues:
                queue.close()
            for watch in list(self._watches):
                await watch.stop()

    def _came_back(self) -> None:
        """Hear from the server that it answers again."""
        self._reconnects += 1
        self._reconnected.set()
        self._observer.reconnected()
        self._events.send()

    def _went_down(self) -> None:
        """Hear from the server that it is gone."""
        self._observer.disconnected()

    def _check_connected(self) -> None:
        if self._closed:
            raise BusUnavailable("the bus is closed", maybe_done=False)
        if not self._server.is_up:
            raise BusUnavailable("there is no connection to the server", maybe_done=False)

    async def _ask(self, trip: Trip, act: Callable[[], T]) -> T:
        self._check_connected()
        if self._server.is_direct(trip):
            return act()  # without a pause: what needs no time must not let others in between
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await self._server.dispatch(self, act, trip)
        except TimeoutError:
            raise BusTimeout(f"no answer from the store within {STORE_TIMEOUT_S} s") from None

    def _keep(self, message: Message) -> bool:
        """Let a stream keep an event, and tell those who listen now; say whether a stream wants it."""
        wanted = self._store(message)
        if wanted:
            self._server.route(message)
        return wanted

    def _store(self, message: Message) -> bool:
        """Let the stream that captures the subject keep the message; say whether there is one."""
        for stream in self._server.streams.values():
            if stream.captures(message.subject):
                stream.append(message.subject, message.data, message.headers)
                return True
        return False
