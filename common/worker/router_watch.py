"""Which routers are there: nobody waits for the tokens of one that is gone, so nothing is computed for it any more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from common.bus.heard import HeardTable
from common.bus.port import Bucket, Bus, Entry, Snapshot
from common.bus.refusals import Refusals
from common.bus.silence import Silence
from common.bus.storage import ROUTER_TTL_S, ttl_on
from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from common.worker.last_look import take_gone
from contracts.routers import RouterRecord

_TICK_S: Final = 0.5


class RouterWatch:
    """Follows `PD_ROUTERS`, and tells `on_gone` of each router that signs off or falls silent, by its id.

    Before silence counts the bucket is asked. One that has just got a leader may have lost what the router is about to put again: so
    `on_heard` tells of each router that is heard and was not known to be there, those with them that were judged wrongly.
    A router that never wrote a record is never judged, and neither is one that comes back as another start: what was asked by
    the one before is cancelled by the broker, which knows who has asked for what.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        log: Log,
        refusals: Refusals,
        *,
        on_gone: Callable[[str], None],
        on_heard: Callable[[str], Awaitable[None]],
    ) -> None:
        self._clock = clock
        self._log = log
        self._refusals = refusals
        self._on_gone = on_gone
        self._on_heard = on_heard
        self._heard: HeardTable[RouterRecord] = HeardTable(ttl_s=ttl_on(bus, ROUTER_TTL_S))
        self._silence = Silence(bus, clock, ttl_s=ROUTER_TTL_S)

    async def run(self, bucket: Bucket) -> None:
        """Watch who comes and signs off."""
        async with await bucket.watch() as watch:
            async for change in watch:
                match change:
                    case Snapshot():
                        pass  # silence is judged by `run_ticks`
                    case Entry(deleted=True, key=router_id):
                        if router_id in self._heard.known:
                            self._heard.delete(router_id)
                            self._gone(router_id)
                    case Entry():
                        record = self._refusals.record("routers", change, RouterRecord, lambda each: each.router_id)
                        if record is not None:
                            is_news = record.router_id not in self._heard.known
                            self._heard.put(record.router_id, record, self._clock.monotonic())
                            if is_news:
                                await self._on_heard(record.router_id)

    async def run_ticks(self, bucket: Bucket) -> None:
        """Find those who have fallen silent. See `Silence` for when that can be told."""
        while True:
            await self._clock.sleep(_TICK_S)
            if self._silence.says_nothing():
                self._heard.reconnected(self._clock.monotonic())
            for router_id in await take_gone(self._heard, bucket, self._clock):
                self._gone(router_id)

    def _gone(self, router_id: str) -> None:
        self._log.info("router_gone", router_id=router_id)
        self._on_gone(router_id)
