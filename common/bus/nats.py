"""The bus on NATS: the port's calls, put together from connection, requests, storage, readers and events."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Self

from common.bus.errors import BusError, BusUnavailable, StorageRefused
from common.bus.nats_bucket import NatsBucket, feed_watch
from common.bus.nats_connection import Connection
from common.bus.nats_events import EventPump
from common.bus.nats_reader import Reader, ReaderBroken
from common.bus.nats_storage import JetStream, NotStored, bucket_stream, event_stream
from common.bus.nats_url import servers_of
from common.bus.nats_wire import CONNECTION_ERRORS, Arrived, listen, send
from common.bus.observer import BusObserver, NoObserver, RequestKind
from common.bus.port import (
    DEFAULT_TIMEOUT,
    MESSAGE_ID_HEADER,
    BucketConfig,
    Headers,
    Message,
    Stored,
    StreamConfig,
    bucket_ttl_s,
)
from common.bus.queues import QueuedSubscription, QueuedWatch
from common.bus.rules import check_bucket, check_message, check_pattern, check_stream, check_subject
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.trace import traced

_RESTORE_BACKOFF_S: Final = 0.5


class NatsBus:
    """A `port.Bus`. Its background tasks live in the group that it is given; whoever opened it closes it."""

    def __init__(
        self,
        connection: Connection,
        tasks: asyncio.TaskGroup,
        clock: Clock,
        log: Log,
        observer: BusObserver,
        *,
        replicas: int | None = 1,
    ) -> None:
        self._connection = connection
        self._observer = observer
        self._tasks = tasks
        self._clock = clock
        self._log = log
        self._queues: set[QueuedSubscription] = set()
        self._watches: dict[QueuedWatch, asyncio.Task[None]] = {}
        self._replicas = replicas
        self._jetstream = JetStream(connection.requests)
        self._events = EventPump(connection.requests, clock, tasks, observer)
        self._restorer = tasks.create_task(self._restore(), name="bus-restore")

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        tasks: asyncio.TaskGroup,
        clock: Clock,
        log: Log,
        on_closed: Callable[[str], None] | None = None,
        observer: BusObserver | None = None,
        timeout_s: float = 10.0,
        replicas: int | None = 1,
    ) -> Self:
        """Connect to one of the servers of `url` (comma-separated) and return ready for use.

        `name` is what the server's tools show. `on_closed` hears why the connection has ended for good, which should
        end the process. `observer` counts. `replicas` is how many servers keep each bucket and stream; None leaves those that
        are there as they are, for whoever only looks. Raises BusUnavailable if no server answers in time, ServerTooOld,
        StorageRefused, and SettingsError for what is no URL.
        """
        servers = servers_of(url)
        observer = observer or NoObserver()
        connection = Connection(log, on_closed, observer)
        try:
            await connection.open(servers, name=name, timeout_s=timeout_s)
        except BaseException:
            await connection.close()
            raise
        return cls(connection, tasks, clock, log, observer, replicas=replicas)

    @property
    def is_connected(self) -> bool:
        """See `port.Bus.is_connected`."""
        return self._connection.is_up

    @property
    def reconnects(self) -> int:
        """See `port.Bus.reconnects`."""
        return self._connection.reconnects

    @property
    def replicas(self) -> int:
        """See `port.Bus.replicas`."""
        return self._replicas or 1

    async def reconnected(self, after: int) -> int:
        """See `port.Bus.reconnected`."""
        return await self._connection.reconnected(after)

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        """See `port.Bus.publish`."""
        check_subject(subject)
        headers = traced(headers)
        check_message(data, headers)
        try:
            await send(self._connection.client, subject, data, headers=headers)
        except BusUnavailable:
            self._observer.publishes_lost(1)
            raise

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
        requests = self._connection.requests
        answer = await requests.ask(subject, data, timeout_s=timeout, headers=headers, kind=RequestKind.PEER)
        return self._message(answer)

    async def subscribe(self, subject: str, *, queue_group: str = "", max_pending: int = 65536) -> QueuedSubscription:
        """See `port.Bus.subscribe`."""
        check_pattern(subject)
        self._connection.check_up()
        client = self._connection.client

        def arrived(message: Arrived) -> None:
            queue.offer(self._message(message))

        async def leave() -> None:
            self._queues.discard(queue)
            if not client.is_closed:
                await subscription.unsubscribe()

        queue = QueuedSubscription(max_pending=max_pending, leave=leave, dropped=self._observer.messages_dropped)
        try:
            subscription = await listen(client, subject, arrived, queue_group=queue_group)
        except CONNECTION_ERRORS as error:
            raise BusUnavailable(f"{subject} was not subscribed: {error}", maybe_done=False) from error
        self._queues.add(queue)
        try:
            await self.flush()  # the server does not acknowledge a subscription
        except BaseException:
            await queue.unsubscribe()
            raise
        return queue

    async def flush(self) -> None:
        """See `port.Bus.flush`."""
        await self._connection.flush()

    async def ensure_bucket(self, config: BucketConfig) -> NatsBucket:
        """See `port.Bus.ensure_bucket`."""
        check_bucket(config)
        ttl_s = bucket_ttl_s(config.ttl_s, self.replicas) if config.is_lease else config.ttl_s
        stream = bucket_stream(dataclasses.replace(config, ttl_s=ttl_s), self.replicas)
        await self._jetstream.ensure(stream, may_change=self._replicas is not None)
        return NatsBucket(config.name, self._jetstream, self._reader, self._start_watch)

    async def ensure_stream(self, config: StreamConfig) -> None:
        """See `port.Bus.ensure_stream`."""
        check_stream(config)
        await self._jetstream.check_requests_uncaptured()
        stream = event_stream(config, self.replicas)
        await self._jetstream.ensure(stream, may_change=self._replicas is not None)

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
        return await self._events.flush(Deadline.after(self._clock, timeout))

    async def read_stream(self, name: str, subject: str = ">") -> AsyncIterator[Stored]:
        """See `port.Bus.read_stream`."""
        check_pattern(subject)
        try:
            last = int((await self._jetstream.info(name))["state"]["last_seq"])
            async with self._reader(name, subject, policy="all") as reader:
                waiting = reader.num_pending
                while waiting:
                    read = await reader.next()
                    if read.stored.sequence > last:
                        return  # came after the call: without this a busy stream would never end
                    yield read.stored
                    waiting = read.num_pending
        except NotStored as error:
            raise StorageRefused(f"stream {name} does not exist") from error
        except ReaderBroken as error:
            raise BusUnavailable(f"{name} was not read to the end: {error}", maybe_done=False) from error

    async def close(self) -> None:
        """Close the connection: iterations end, calls raise BusUnavailable. Twice is fine.

        Events that still wait are dropped: call `flush_events` first.
        """
        self._events.close()
        self._restorer.cancel()
        for watch, task in self._watches.items():
            watch.close()
            task.cancel()
        for queue in self._queues:
            queue.close()
        await self._connection.close()

    def _message(self, message: Arrived) -> Message:
        return Message(message.subject, message.data, message.headers, message.reply, self)

    def _reader(self, stream: str, subject: str, **options: Any) -> Reader:
        connection = self._connection
        return Reader(connection.client, self._jetstream, connection.readers, stream, subject, **options)

    def _start_watch(self, bucket: NatsBucket, pattern: str) -> QueuedWatch:
        self._connection.check_up()

        async def leave() -> None:
            self._watches.pop(watch).cancel()

        watch = QueuedWatch(leave=leave)
        feeder = feed_watch(bucket, pattern, watch, self._connection.wait_up)
        self._watches[watch] = self._tasks.create_task(feeder, name=f"bus-watch-{bucket.name}")
        return watch

    async def _restore(self) -> None:
        """After each reconnect, bring back what a server with an empty store no longer has."""
        seen = self.reconnects
        while True:
            seen = await self.reconnected(seen)
            restored = False
            while not restored:
                await self._connection.wait_up()
                try:
                    await self._jetstream.ensure_again()
                    restored = True
                except BusError as error:
                    self._log.error("bus_restore_failed", error=str(error))
                    await self._clock.sleep(_RESTORE_BACKOFF_S)
