"""The handoffs in the memory of a broker's process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from common.runtime.clock import Deadline
from contracts.errors import ErrorInfo
from contracts.trace import TraceContext
from services.broker.core.events import Event
from services.broker.core.handoff import Handoff


class Live:
    """One handoff in memory: its state, who waits for its submit, its deadline here, and the trace that it belongs to."""

    def __init__(
        self, feed: Callable[[Live, Event], None], handoff: Handoff, deadline: Deadline, trace: TraceContext | None
    ) -> None:
        self.handoff = handoff
        self.deadline = deadline
        self.trace = trace
        self.admission: asyncio.Future[ErrorInfo | None] = asyncio.get_running_loop().create_future()
        self._feed = feed
        self._written: asyncio.Event | None = None

    @property
    def ended(self) -> bool:
        """See `Target.ended`."""
        return self.handoff.terminal or self.handoff.forgotten

    def tell(self, event: Event) -> None:
        """See `Target.tell`."""
        self._feed(self, event)

    def stepped(self) -> None:
        """Note a step: whoever waits for the bucket goes on once no write is under way."""
        if self._written is not None and self.handoff.writing is None:
            self._written.set()
            self._written = None

    async def wait_written(self) -> None:
        """Until the bucket has answered every write that follows from what was told so far. Each write has a bound."""
        while self.handoff.writing is not None:
            self._written = self._written or asyncio.Event()
            await self._written.wait()


class Outcomes:
    """A target that keeps what it is told, for whoever has an effect performed and goes on with what follows from it."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._told: list[Event] = []

    @property
    def deadline(self) -> Deadline:
        """See `Target.deadline`."""
        return self._live.deadline

    @property
    def ended(self) -> bool:
        """See `Target.ended`."""
        return self._live.ended

    def tell(self, event: Event) -> None:
        """See `Target.tell`."""
        self._told.append(event)

    def taken(self) -> list[Event]:
        """What was told since the last time."""
        told, self._told = self._told, []
        return told


class LiveHandoffs:
    """All handoffs that are in flight, and those that ended a while ago: people and routers still ask for them."""

    def __init__(self, *, keep_ended_s: float, max_ended: int) -> None:
        self._keep_ended_s = keep_ended_s
        self._max_ended = max_ended
        self._live: dict[str, Live] = {}
        self._in_flight: dict[str, Live] = {}
        self._latest: dict[str, Live] = {}
        self._ended: deque[tuple[float, str]] = deque()
        self._over: dict[str, asyncio.Event] = {}

    def __iter__(self) -> Iterator[Live]:
        """Over those that are in flight at this moment: more may come meanwhile. Whoever looks often spares the many that ended."""
        return iter(tuple(self._in_flight.values()))

    @property
    def num_in_flight(self) -> int:
        """Handoffs that have not ended, or whose memory is not back everywhere."""
        return len(self._in_flight)

    def get(self, handoff_id: str) -> Live | None:
        """One handoff, as long as it is remembered."""
        return self._live.get(handoff_id)

    def latest(self, request_id: str) -> Live | None:
        """The highest attempt of a request that is remembered."""
        return self._latest.get(request_id)

    def add(self, live: Live) -> None:
        """Keep one that is in flight from now on."""
        record = live.handoff.record
        self._live[record.handoff_id] = self._in_flight[record.handoff_id] = live
        latest = self._latest.get(record.request_id)
        if latest is None or latest.handoff.record.attempt < record.attempt:
            self._latest[record.request_id] = live

    def ended(self, live: Live, now: float) -> None:
        """Note that nothing more will follow. Once for each."""
        del self._in_flight[live.handoff.handoff_id]
        self._ended.append((now, live.handoff.handoff_id))
        over = self._over.pop(live.handoff.handoff_id, None)
        if over is not None:
            over.set()

    def expire(self, now: float) -> None:
        """Forget those that ended too long ago, and the oldest of too many."""
        while self._ended and (now >= self._ended[0][0] + self._keep_ended_s or len(self._ended) > self._max_ended):
            live = self._live.pop(self._ended.popleft()[1])
            request_id = live.handoff.record.request_id
            if self._latest.get(request_id) is live:
                del self._latest[request_id]

    async def wait_ended(self) -> None:
        """Until none of those is in flight that are now. The caller has the time."""
        for handoff_id in tuple(self._in_flight):
            if handoff_id in self._in_flight:
                await self._over.setdefault(handoff_id, asyncio.Event()).wait()
