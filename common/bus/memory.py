"""The bus in memory: for tests, simulations and services that share one process. Deterministic.

A MemoryServer is what a NATS server is, and a MemoryBus is one connection to it. Time is the clock's and the loop's,
so everything also runs in virtual time.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from common.bus.errors import BusTimeout, BusUnavailable, StorageRefused
from common.bus.memory_broker import Interest, MemoryBroker
from common.bus.memory_store import MemoryBucket, StoredBucket, StoredStream
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
from common.bus.rules import check_bucket, check_message, check_pattern, check_stream, check_subject

MAX_WAITING_EVENTS = 4096


class MemoryServer(MemoryBroker):
    """What a NATS server is: routes messages between its connections, stores buckets and streams, can go down."""

    def connect(self) -> "MemoryBus":
        """Return a new connection."""
        return MemoryBus(self)


class MemoryBus:
    """A `port.Bus` on a MemoryServer: see `MemoryServer.connect`."""

    def __init__(self, server: MemoryBroker) -> None:
        self._server = server
        server.add_connection(self, self._came_back)
        self._reconnects = 0
        self._reconnected = asyncio.Event()
        self._closed = False
        self._queues: set[QueuedSubscription] = set()
        self._watches: set[QueuedWatch] = set()
        self._events: deque[tuple[str, bytes, dict[str, str]]] = deque()
        self._events_dropped = 0
        self._events_sent = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """See `port.Bus.is_connected`."""
        return self._server.is_up and not self._closed

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
        check_message(data, headers)
        self._check_connected()
        message = Message(subject, data, dict(headers or {}), "", self)
        with contextlib.suppress(StorageRefused):  # a plain publisher does not hear of it
            self._store(message)
        self._server.route(message)

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
        check_message(data, headers)
        if timeout <= 0:
            raise BusTimeout(f"no time was left to ask {subject}")
        self._check_connected()
        inbox = self._server.next_name("_INBOX.memory")
        try:
            async with asyncio.timeout(timeout):
                answer = await self._server.ask(Message(subject, data, dict(headers or {}), inbox, self))
        except TimeoutError:
            raise BusTimeout(f"no answer from {subject} within {timeout:.3f} s") from None
        if answer is None:
            raise BusUnavailable(f"the connection broke while {subject} was asked", maybe_done=True)
        return answer

    async def subscribe(self, subject: str, *, queue_group: str = "", max_pending: int = 65536) -> QueuedSubscription:
        """See `port.Bus.subscribe`."""
        check_pattern(subject)
        self._check_connected()

        async def leave() -> None:
            self._server.remove(interest)
            self._queues.discard(queue)

        queue = QueuedSubscription(max_pending=max_pending, leave=leave)
        interest = Interest(self, subject, queue_group, queue)
        self._server.add(interest)
        self._queues.add(queue)
        return queue

    async def flush(self) -> None:
        """See `port.Bus.flush`."""
        self._check_connected()

    async def ensure_bucket(self, config: BucketConfig) -> MemoryBucket:
        """See `port.Bus.ensure_bucket`."""
        check_bucket(config)
        self._check_connected()
        buckets = self._server.buckets
        if config.name in buckets:
            buckets[config.name].config = config
        else:
            buckets[config.name] = StoredBucket(config, self._server.clock, self._server.next_name("epoch"))

        def find() -> StoredBucket:
            self._check_connected()
            return self._server.buckets[config.name]

        return MemoryBucket(find, self._watches, config.name)

    async def ensure_stream(self, config: StreamConfig) -> None:
        """See `port.Bus.ensure_stream`."""
        check_stream(config)
        self._check_connected()
        streams = self._server.streams
        if config.name in streams:
            streams[config.name].config = config
        else:
            streams[config.name] = StoredStream(config, self._server.clock)
        self._send_events()

    def publish_event(self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None) -> bool:
        """See `port.Bus.publish_event`."""
        labelled = {**(headers or {}), MESSAGE_ID_HEADER: message_id}
        check_subject(subject)
        check_message(data, labelled)
        if self._closed or len(self._events) >= MAX_WAITING_EVENTS:
            self._events_dropped += 1
            return False
        self._events.append((subject, data, labelled))
        self._send_events()
        return True

    @property
    def events_dropped(self) -> int:
        """See `port.Bus.events_dropped`."""
        return self._events_dropped

    async def flush_events(self, timeout: float = DEFAULT_TIMEOUT) -> bool:  # noqa: ASYNC109 - the port has it
        """See `port.Bus.flush_events`."""
        try:
            async with asyncio.timeout(timeout):
                while self._events:
                    self._events_sent.clear()
                    await self._events_sent.wait()
        except TimeoutError:
            return False
        return True

    async def read_stream(self, name: str, subject: str = ">") -> AsyncIterator[Stored]:
        """See `port.Bus.read_stream`."""
        check_pattern(subject)
        self._check_connected()
        stream = self._server.streams.get(name)
        if stream is None:
            raise StorageRefused(f"stream {name} does not exist")
        for stored in stream.matching(subject):
            yield stored

    async def close(self) -> None:
        """Close the connection: iterations end, calls raise BusUnavailable. Twice is fine."""
        if not self._closed:
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
        self._send_events()

    def _check_connected(self) -> None:
        if self._closed:
            raise BusUnavailable("the bus is closed", maybe_done=False)
        if not self._server.is_up:
            raise BusUnavailable("there is no connection to the server", maybe_done=False)

    def _send_events(self) -> None:
        while self._events and self.is_connected:
            subject, data, headers = self._events[0]
            message = Message(subject, data, headers, "", self)
            try:
                if self._store(message) is None:
                    return  # no stream wants it yet
            except StorageRefused:
                self._events_dropped += 1
            else:
                self._server.route(message)
            self._events.popleft()
            self._events_sent.set()

    def _store(self, message: Message) -> bool | None:
        """Let the stream that captures the subject keep the message: whether it was new, None if there is none."""
        for stream in self._server.streams.values():
            if stream.captures(message.subject):
                return stream.append(message.subject, message.data, message.headers)
        return None
