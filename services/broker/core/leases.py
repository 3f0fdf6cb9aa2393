"""Which starts of which workers are alive, as far as their bucket tells: it is silent when one disappears."""

from __future__ import annotations

from typing import Final

from contracts.requests import WorkerRef

MAX_GONE: Final = 1024


class Leases:
    """The latest incarnation of every worker, with the time at which it was last heard of (monotonic seconds).

    One that was not heard of for `ttl_s` is gone. After an outage there is no such verdict for twice that long, since an
    outage silences everybody.
    """

    def __init__(self, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._incarnations: dict[str, str] = {}
        self._heard: dict[str, float] = {}
        self._gone: dict[WorkerRef, None] = {}
        self._no_verdict_before = 0.0

    def heard(self, worker: WorkerRef, now: float) -> WorkerRef | None:
        """Note a sign of life. Returns the start that this one replaces."""
        before = self._incarnations.get(worker.worker_id)
        self._incarnations[worker.worker_id] = worker.incarnation
        self._heard[worker.worker_id] = now
        self._gone.pop(worker, None)
        if before is None or before == worker.incarnation:
            return None
        return self.bury(WorkerRef(worker_id=worker.worker_id, incarnation=before))

    def signed_off(self, worker_id: str) -> WorkerRef | None:
        """Note that a worker has left. Returns the start that is gone; None for one that was not known."""
        self._heard.pop(worker_id, None)
        incarnation = self._incarnations.pop(worker_id, None)
        if incarnation is None:
            return None
        return self.bury(WorkerRef(worker_id=worker_id, incarnation=incarnation))

    def outage_until(self, now: float) -> None:
        """Note that nothing could be heard until now."""
        self._no_verdict_before = now + 2 * self._ttl_s

    def expire(self, now: float) -> tuple[WorkerRef, ...]:
        """The starts that have fallen silent; they are forgotten."""
        if now < self._no_verdict_before:
            return ()
        silent = [worker_id for worker_id, heard in self._heard.items() if now - heard >= self._ttl_s]
        gone = (self.signed_off(worker_id) for worker_id in silent)
        return tuple(worker for worker in gone if worker is not None)

    def is_known(self, worker: WorkerRef) -> bool:
        """Whether this start was heard of last, and has not fallen silent."""
        return self._incarnations.get(worker.worker_id) == worker.incarnation

    def is_replaced(self, worker: WorkerRef) -> bool:
        """Whether another start of this worker is alive."""
        return self._incarnations.get(worker.worker_id, worker.incarnation) != worker.incarnation

    def is_gone(self, worker: WorkerRef) -> bool:
        """Whether this start was found to be gone, and was not heard of since."""
        return worker in self._gone

    def bury(self, worker: WorkerRef) -> WorkerRef:
        """Note that a start is gone, and return it."""
        self._gone[worker] = None
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        return worker
