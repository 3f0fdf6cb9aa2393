"""Which workers are there, as far as the bus tells: signs of life, farewells, and silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from common.bus.port import Bus
from common.bus.storage import WORKER_TTL_S, ttl_on
from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from contracts.requests import WorkerRef
from services.broker.core.leases import Leases

_STANDSTILL_S: Final = WORKER_TTL_S / 2


class Presence:
    """Feeds the leases, and tells `on_gone` of each start of a worker that is no more."""

    def __init__(self, bus: Bus, clock: Clock, log: Log, *, on_gone: Callable[[WorkerRef], None]) -> None:
        self._bus = bus
        self._clock = clock
        self._log = log
        self._on_gone = on_gone
        self._leases = Leases(ttl_s=ttl_on(bus, WORKER_TTL_S))
        self._reconnects = bus.reconnects
        self._judged_at = clock.monotonic()

    def heard(self, worker: WorkerRef) -> None:
        """Note a worker's sign of life."""
        self._tell(self._leases.heard(worker, self._clock.monotonic()))

    def left(self, worker_id: str) -> None:
        """Note that a worker has signed off."""
        self._tell(self._leases.signed_off(worker_id))

    def judge_silence(self) -> None:
        """Find those who have fallen silent; to be called several times in a ttl.

        An outage of the bus silences everybody, and says nothing of anybody. Nor can this process have heard anybody while
        it stood still itself.
        """
        now = self._clock.monotonic()
        stood_still = now - self._judged_at >= _STANDSTILL_S
        self._judged_at = now
        if stood_still or not self._bus.is_connected or self._bus.reconnects != self._reconnects:
            self._reconnects = self._bus.reconnects
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
