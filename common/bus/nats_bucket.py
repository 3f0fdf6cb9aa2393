"""Key-value buckets on JetStream, in the layout that every NATS tool reads."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from common.bus.errors import BusError, BusUnavailable, RevisionConflict
from common.bus.nats_reader import Read, Reader, ReaderBroken
from common.bus.nats_storage import EXPECTED_REVISION_HEADER, JetStream, NotStored, nanoseconds_since_2020
from common.bus.port import Entry, Headers, Stored
from common.bus.queues import QueuedWatch
from common.bus.rules import check_key, check_message, check_pattern

OPERATION_HEADER: Final = "KV-Operation"
_MARKER_HEADER: Final = "Nats-Marker-Reason"
_DELETE: Final = "DEL"

_FIRST_BACKOFF_S: Final = 0.25
_LONGEST_BACKOFF_S: Final = 2.0
"""Well below the life of a worker's record: whoever reads the bucket late takes workers for gone that have long put theirs again."""
_PASS_PAUSE_S: Final = 5.0
"""How long a pass waits for what the server has said to be there: longer than for a sign of life, which the server gives all the same."""

OpenReader = Callable[..., Reader]
"""Makes a Reader of (stream, subject, policy=, headers_only=) that the bus breaks off when the connection is lost."""


class NatsBucket:
    """A `port.Bucket`."""

    def __init__(
        self,
        name: str,
        jetstream: JetStream,
        open_reader: OpenReader,
        start_watch: Callable[["NatsBucket", str], QueuedWatch],
    ) -> None:
        self._name = name
        self._stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."
        self._jetstream = jetstream
        self._open_reader = open_reader
        self._start_watch = start_watch

    @property
    def name(self) -> str:
        """See `port.Bucket.name`."""
        return self._name

    async def get(self, key: str) -> Entry | None:
        """See `port.Bucket.get`."""
        check_key(key)
        entry = await self._last(key)
        return None if entry is None or entry.deleted else entry

    async def create(self, key: str, value: bytes) -> int:
        """See `port.Bucket.create`."""
        try:
            return await self._write(key, value, last=0)
        except RevisionConflict:
            # A deleted key still has a revision, that of its marker.
            entry = await self._last(key)
            if entry is not None and not entry.deleted:
                raise
            return await self._write(key, value, last=0 if entry is None else entry.revision)

    async def update(self, key: str, value: bytes, last: int) -> int:
        """See `port.Bucket.update`."""
        return await self._write(key, value, last=last)

    async def put(self, key: str, value: bytes) -> int:
        """See `port.Bucket.put`."""
        return await self._write(key, value, last=None)

    async def delete(self, key: str, last: int | None = None) -> None:
        """See `port.Bucket.delete`."""
        await self._write(key, b"", last=last, headers={OPERATION_HEADER: _DELETE})

    async def keys(self, pattern: str = ">") -> list[str]:
        """See `port.Bucket.keys`."""
        check_pattern(pattern)
        found: set[str] = set()
        async for entry in self._pass(pattern, headers_only=True):
            found.discard(entry.key)
            if not entry.deleted:
                found.add(entry.key)
        return sorted(found)

    async def entries(self, pattern: str = ">") -> AsyncIterator[Entry]:
        """See `port.Bucket.entries`."""
        check_pattern(pattern)
        async for entry in self._pass(pattern, headers_only=False):
            if not entry.deleted:
                yield entry

    async def watch(self, pattern: str = ">") -> QueuedWatch:
        """See `port.Bucket.watch`."""
        check_pattern(pattern)
        return self._start_watch(self, pattern)

    async def epoch(self) -> int:
        """See `port.Bucket.epoch`."""
        try:
            return nanoseconds_since_2020((await self._jetstream.info(self._stream))["created"])
        except NotStored as error:
            raise self._missing() from error

    def read(self, pattern: str, *, headers_only: bool = False) -> Reader:
        """Return a pass over the last entries of the keys that match, and what follows."""
        subject = f"{self._prefix}{pattern}"
        return self._open_reader(self._stream, subject, policy="last_per_subject", headers_only=headers_only)

    def entry_of(self, stored: Stored) -> Entry:
        """Read a stored message as the state of a key. Markers that the server sets count as deletions."""
        deleted = OPERATION_HEADER in stored.headers or _MARKER_HEADER in stored.headers
        key = stored.subject.removeprefix(self._prefix)
        return Entry(key, b"" if deleted else stored.data, stored.sequence, deleted)

    async def _pass(self, pattern: str, *, headers_only: bool) -> AsyncIterator[Entry]:
        """Every entry that was there, deleted ones too. Raises BusUnavailable if they cannot be had to the end."""
        try:
            async with self.read(pattern, headers_only=headers_only) as reader:
                waiting = reader.num_pending
                while waiting:
                    async with asyncio.timeout(_PASS_PAUSE_S):
                        read = await reader.next()
                    yield self.entry_of(read.stored)
                    waiting = read.num_pending
        except NotStored as error:
            raise self._missing() from error
        except (ReaderBroken, TimeoutError) as error:
            why = str(error) or "the server sent no more"  # the last of them may have expired meanwhile
            raise BusUnavailable(f"{self._name} was not read to the end: {why}", maybe_done=False) from error

    async def _last(self, key: str) -> Entry | None:
        try:
            return self.entry_of(await self._jetstream.last_message(self._stream, f"{self._prefix}{key}"))
        except NotStored as error:
            if error.is_stream:
                raise self._missing() from error
            return None

    def _missing(self) -> BusUnavailable:
        """After the loss of a store: the bucket comes back by itself, and nobody should think meanwhile that it is empty."""
        return BusUnavailable(f"{self._name}: there is no such bucket now", maybe_done=False)

    async def _write(self, key: str, value: bytes, *, last: int | None, headers: Headers | None = None) -> int:
        check_key(key)
        check_message(value, None)
        labelled = dict(headers or {})
        if last is not None:
            labelled[EXPECTED_REVISION_HEADER] = str(last)
        return await self._jetstream.store(f"{self._prefix}{key}", value, labelled)


async def feed_watch(
    bucket: NatsBucket, pattern: str, watch: QueuedWatch, wait_connected: Callable[[], Awaitable[None]]
) -> None:
    """Feed a watch for ever: a pass of the reader after another, whatever happens to the server.

    The pause before a new pass grows while passes fail, so that a storm of reconnects leaks few consumers: the server drops each soon.
    """
    backoff_s = _FIRST_BACKOFF_S
    while True:
        await wait_connected()
        try:
            async with bucket.read(pattern) as reader:
                watch.restart()
                if reader.num_pending == 0:
                    watch.caught_up()
                    backoff_s = _FIRST_BACKOFF_S
                while True:
                    read: Read = await reader.next()
                    watch.offer(bucket.entry_of(read.stored))
                    if read.num_pending == 0:
                        watch.caught_up()
                        backoff_s = _FIRST_BACKOFF_S
        except BusError:
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
