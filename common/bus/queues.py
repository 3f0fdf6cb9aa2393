"""The receiving ends that both adapters share: what has arrived and was not yet taken, always bounded."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from common.bus.port import Entry, Message, Snapshot

Leave = Callable[[], Awaitable[None]]


class QueuedSubscription:
    """A `port.Subscription` that an adapter feeds by `offer`. One task takes from it."""

    def __init__(self, *, max_pending: int, leave: Leave, dropped: Callable[[int], None] | None = None) -> None:
        self._max_pending = max_pending
        self._leave = leave
        self._tell_dropped = dropped
        self._waiting: deque[Message] = deque()
        self._arrived = asyncio.Event()
        self._closed = False
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """See `port.Subscription.dropped`."""
        return self._dropped

    def offer(self, message: Message) -> None:
        """Add a message, or count it as dropped. Never blocks."""
        if self._closed:
            return
        if len(self._waiting) >= self._max_pending:
            self._dropped += 1
            if self._tell_dropped is not None:
                self._tell_dropped(1)
            return
        self._waiting.append(message)
        self._arrived.set()

    def close(self) -> None:
        """End the iteration at once. Twice is fine."""
        self._closed = True
        self._waiting.clear()
        self._arrived.set()

    async def unsubscribe(self) -> None:
        """See `port.Subscription.unsubscribe`."""
        if not self._closed:
            self.close()
            await self._leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.unsubscribe()


class QueuedWatch:
    """A `port.Watch` that an adapter feeds.

    It keeps one pending entry a key, the last one, so its memory is bounded by the bucket and nothing final is lost.
    The adapter calls `restart`, offers all that there is, calls `caught_up`, then offers every change.
    """

    def __init__(self, *, leave: Leave) -> None:
        self._leave = leave
        self._pending: dict[str, Entry] = {}
        self._told: set[str] = set()
        self._catching_up = True
        self._before_snapshot: set[str] | None = None
        self._arrived = asyncio.Event()
        self._closed = False

    def restart(self) -> None:
        """Begin again: everything will be offered once more."""
        self._pending.clear()
        self._told.clear()
        self._catching_up = True
        self._before_snapshot = None

    def offer(self, entry: Entry) -> None:
        """Add the state of a key. Never blocks."""
        if self._closed:
            return
        if self._catching_up and entry.deleted and entry.key not in self._told and entry.key not in self._pending:
            return  # what was deleted before is only missing from the snapshot
        self._pending[entry.key] = entry
        self._arrived.set()

    def caught_up(self) -> None:
        """Say that all that there is was offered. Again before the next restart, it does nothing."""
        if self._catching_up:
            self._catching_up = False
            self._before_snapshot = set(self._pending)
            self._arrived.set()

    def close(self) -> None:
        """End the iteration at once. Twice is fine."""
        self._closed = True
        self._arrived.set()

    async def stop(self) -> None:
        """See `port.Watch.stop`."""
        if not self._closed:
            self.close()
            await self._leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Entry | Snapshot:
        while True:
            if self._closed:
                raise StopAsyncIteration
            if self._before_snapshot is not None and not self._before_snapshot:
                self._before_snapshot = None
                return Snapshot(frozenset(self._told))
            if self._pending:
                return self._take()
            self._arrived.clear()
            await self._arrived.wait()

    def _take(self) -> Entry:
        key = next(iter(self._pending))
        entry = self._pending.pop(key)
        if entry.deleted:
            self._told.discard(key)
        else:
            self._told.add(key)
        if self._before_snapshot is not None:
            self._before_snapshot.discard(key)
        return entry

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
