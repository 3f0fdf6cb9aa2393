"""Which workers are there, as far as the bus tells: signs of life, farewells, and silence."""

from __future__ import annotations

from collections.abc import Callable

from common.bus.port import Bus
from common.bus.silence import Silence
from common.bus.storage import WORKER_TTL_S, ttl_on
from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from contracts.requests import WorkerRef
from services.broker.core.leases import Leases


class Presence:
    """Feeds the leases, and tells `on_gone` of each start of a worker that is no more. See `Silence` for `is_mute`."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        log: Log,
        *,
        on_gone: Callable[[WorkerRef], None],
        is_mute: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock = clock
        self._log = log
        self._on_gone = on_gone
        ttl_s = ttl_on(bus, WORKER_TTL_S)
        self._leases = Leases(ttl_s=ttl_s)
        self._silence = Silence(bus, clock, ttl_s=ttl_s, is_mute=is_mute)

    def heard(self, worker: WorkerRef) -> None:
        """Note a worker's sign of life."""
        self._tell(self._leases.heard(worker, self._clock.monotonic()))

    def left(self, worker_id: str) -> None:
        """Note that a worker has signed off."""
        self._tell(self._leases.signed_off(worker_id))

    def judge_silence(self) -> None:
        """Find those who have fallen silent; to be called several times in a ttl. See `Silence` for when that can be told."""
        now = self._clock.monotonic()
        if self._silence.says_nothing():
            self._leases.outage_until(now)
            return
        for worker in self._leases.expire(now):
            self._tell(worker)

    def is_replaced(self, worker: WorkerRef) -> bool:
        """See `Leases.is_replaced`."""
        return self._leases.is_replaced(worker)

    def is_gone(self, worker: WorkerRef) -> bool:
        """See `Leases.is_gone`."""
        return self._leases.is_gone(worker)

    def _tell(self, gone: WorkerRef | None) -> None:
        if gone is not None:
            self._log.info("worker_gone", worker_id=gone.worker_id, incarnation=gone.incarnation)
            self._on_gone(gone)
