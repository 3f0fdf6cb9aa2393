"""Which workers are there, as far as the bus tells: signs of life, farewells, and silence."""

from __future__ import annotations

from collections.abc import Callable

from common.bus.heard import HeardTable
from common.bus.port import Bus
from common.bus.silence import Silence
from common.bus.storage import WORKER_TTL_S, ttl_on
from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
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
        metrics: Metrics,
        on_gone: Callable[[WorkerRef], None],
        is_mute: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock = clock
        self._log = log
        self._replaced = metrics.counter(
            "broker_workers_replaced_total",
            "Starts of workers whose place another start of the same id took before they had signed off or fallen silent: one that "
            "crashed and was back at once, or a second process with that id, of which the earlier one then ends.",
        )
        self._on_gone = on_gone
        ttl_s = ttl_on(bus, WORKER_TTL_S)
        self._leases = Leases(ttl_s=ttl_s)
        self._expected: HeardTable[WorkerRef] = HeardTable(ttl_s=ttl_s)
        self._silence = Silence(bus, clock, ttl_s=ttl_s, is_mute=is_mute)

    def expect(self, worker: WorkerRef) -> None:
        """Note a start that an earlier broker gave work to: it may be gone since, and will be missed if it is."""
        if self._leases.is_replaced(worker):
            self._miss(worker)
        elif not self._leases.is_known(worker) and _key(worker) not in self._expected.known:
            self._expected.put(_key(worker), worker, self._clock.monotonic())

    def heard(self, worker: WorkerRef) -> None:
        """Note a worker's sign of life: every other start of it is over."""
        before = self._leases.heard(worker, self._clock.monotonic())
        if before is not None:
            self._replaced.inc()
            self._log.info(
                "worker_replaced",
                worker_id=worker.worker_id,
                incarnation=before.incarnation,
                by_incarnation=worker.incarnation,
            )
        self._tell(before)
        self._expected.delete(_key(worker))
        self._miss_all(worker.worker_id)

    def left(self, worker_id: str) -> None:
        """Note that a worker has signed off."""
        self._tell(self._leases.signed_off(worker_id))
        self._miss_all(worker_id)

    def judge_silence(self) -> None:
        """Find those who have fallen silent; to be called several times in a ttl. See `Silence` for when that can be told."""
        now = self._clock.monotonic()
        if self._silence.says_nothing():
            self._leases.outage_until(now)
            self._expected.reconnected(now)
            return
        for worker in self._leases.expire(now):
            self._tell(worker)
        before = dict(self._expected.known)
        for key in self._expected.expire(now):
            self._miss(before[key])

    def is_replaced(self, worker: WorkerRef) -> bool:
        """See `Leases.is_replaced`."""
        return self._leases.is_replaced(worker)

    def is_gone(self, worker: WorkerRef) -> bool:
        """See `Leases.is_gone`."""
        return self._leases.is_gone(worker)

    def _miss_all(self, worker_id: str) -> None:
        for key, worker in tuple(self._expected.known.items()):
            if worker.worker_id == worker_id:
                self._expected.delete(key)
                self._miss(worker)

    def _miss(self, worker: WorkerRef) -> None:
        if not self._leases.is_gone(worker):
            self._tell(self._leases.bury(worker))

    def _tell(self, gone: WorkerRef | None) -> None:
        if gone is not None:
            self._log.info("worker_gone", worker_id=gone.worker_id, incarnation=gone.incarnation)
            self._on_gone(gone)


def _key(worker: WorkerRef) -> str:
    return f"{worker.worker_id}.{worker.incarnation}"
