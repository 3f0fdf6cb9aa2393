"""Which starts of which routers are there: nobody waits for what one that is gone has asked for."""

from __future__ import annotations

from collections.abc import Callable

from common.bus.heard import HeardTable
from common.bus.port import Bus
from common.bus.silence import Silence
from common.bus.storage import ROUTER_TTL_S, ttl_on
from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from contracts.routers import RouterRecord


class RouterPresence:
    """Follows what is said in `PD_ROUTERS`, and tells `on_gone` of each start that is no more, by router id and incarnation.

    A start that falls silent is gone, and so is one whose router has started again or has signed off. Silence counts while the
    bus carries: see `Silence`, also for `is_mute`.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        log: Log,
        *,
        on_gone: Callable[[str, str], None],
        is_mute: Callable[[], bool] = lambda: False,
    ) -> None:
        ttl_s = ttl_on(bus, ROUTER_TTL_S)
        self._clock = clock
        self._log = log
        self._on_gone = on_gone
        self._silence = Silence(bus, clock, ttl_s=ttl_s, is_mute=is_mute)
        self._starts: HeardTable[RouterRecord] = HeardTable(ttl_s=ttl_s)

    def expect(self, router_id: str, incarnation: str) -> None:
        """Note a start that an earlier broker knew of: it may be gone since, and will be missed if it is."""
        self._put(RouterRecord(router_id=router_id, incarnation=incarnation))

    def heard(self, record: RouterRecord) -> None:
        """Note a sign of life: every other start of this router is over."""
        self._put(record)
        self._end(record.router_id, but=record.incarnation)

    def left(self, router_id: str) -> None:
        """Note that a router has signed off."""
        self._end(router_id)

    def judge_silence(self) -> None:
        """Find those who have fallen silent; to be called several times in a ttl."""
        now = self._clock.monotonic()
        if self._silence.says_nothing():
            self._starts.reconnected(now)
            return
        before = dict(self._starts.known)
        for key in self._starts.expire(now):
            self._tell(before[key])

    def _put(self, record: RouterRecord) -> None:
        self._starts.put(_key(record), record, self._clock.monotonic())

    def _end(self, router_id: str, but: str = "") -> None:
        known = list(self._starts.known.values())
        for record in known:
            if record.router_id == router_id and record.incarnation != but:
                self._starts.delete(_key(record))
                self._tell(record)

    def _tell(self, gone: RouterRecord) -> None:
        self._log.info("router_gone", router_id=gone.router_id, incarnation=gone.incarnation)
        self._on_gone(gone.router_id, gone.incarnation)


def _key(record: RouterRecord) -> str:
    return f"{record.router_id}.{record.incarnation}"
