"""Buckets of the in-memory bus, as seen over one connection."""

from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar

from common.bus.memory_store import StoredBucket
from common.bus.port import Entry
from common.bus.queues import QueuedWatch
from common.bus.rules import check_key, check_message, check_pattern

T = TypeVar("T")


class Link(Protocol):
    """The connection over which the bucket is asked."""

    async def ask_store(self, subject: str, act: Callable[[], T]) -> T:
        """Let the server do `act`, with whatever happens on the way. Raises BusUnavailable, BusTimeout, and what `act` does."""
        ...

    def stored_bucket(self, name: str) -> StoredBucket:
        """What the server holds of the bucket."""
        ...

    def add_watch(self, bucket: str, pattern: str) -> QueuedWatch:
        """Begin a watch. Raises BusUnavailable."""
        ...


class MemoryBucket:
    """A `port.Bucket`."""

    def __init__(self, link: Link, name: str) -> None:
        self._link = link
        self._name = name

    @property
    def name(self) -> str:
        """See `port.Bucket.name`."""
        return self._name

    async def get(self, key: str) -> Entry | None:
        """See `port.Bucket.get`."""
        check_key(key)
        entry = await self._ask(key, lambda stored: stored.last(key))
        return None if entry is None or entry.deleted else entry

    async def create(self, key: str, value: bytes) -> int:
        """See `port.Bucket.create`."""
        self._check(key, value)
        return await self._ask(key, lambda stored: stored.create(key, value))

    async def update(self, key: str, value: bytes, last: int) -> int:
        """See `port.Bucket.update`."""
        self._check(key, value)
        return await self._ask(key, lambda stored: stored.write(key, value, last=last))

    async def put(self, key: str, value: bytes) -> int:
        """See `port.Bucket.put`."""
        self._check(key, value)
        return await self._ask(key, lambda stored: stored.write(key, value, last=None))

    async def delete(self, key: str, last: int | None = None) -> None:
        """See `port.Bucket.delete`."""
        check_key(key)
        await self._ask(key, lambda stored: stored.write(key, b"", last=last, deleted=True))

    async def keys(self, pattern: str = ">") -> list[str]:
        """See `port.Bucket.keys`."""
        return sorted([entry.key async for entry in self.entries(pattern)])

    async def entries(self, pattern: str = ">") -> AsyncIterator[Entry]:
        """See `port.Bucket.entries`."""
        check_pattern(pattern)
        for entry in await self._ask(pattern, lambda stored: stored.matching(pattern)):
            if not entry.deleted:
                yield entry

    async def watch(self, pattern: str = ">") -> QueuedWatch:
        """See `port.Bucket.watch`."""
        check_pattern(pattern)
        return self._link.add_watch(self._name, pattern)

    async def epoch(self) -> int:
        """See `port.Bucket.epoch`."""
        return await self._ask("", lambda stored: stored.epoch)

    async def _ask(self, key: str, act: Callable[[StoredBucket], T]) -> T:
        subject = f"$KV.{self._name}.{key}"
        return await self._link.ask_store(subject, lambda: act(self._link.stored_bucket(self._name)))

    def _check(self, key: str, value: bytes) -> None:
        check_key(key)
        check_message(value, None)
