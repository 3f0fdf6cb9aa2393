"""Which workers there are, from what the bucket tells: it is silent when one disappears."""

from collections.abc import Mapping

from contracts.workers import WorkerRecord


class WorkerTable:
    """The latest record of every worker, with the time at which it was last heard of (monotonic seconds).

    A worker that was not heard of for `ttl_s` is gone. After a reconnect there is no such verdict for twice that long,
    since an outage silences everybody.
    """

    def __init__(self, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._records: dict[str, WorkerRecord] = {}
        self._heard: dict[str, float] = {}
        self._no_verdict_before = 0.0

    def put(self, record: WorkerRecord, now: float) -> None:
        """Note what a worker says of itself."""
        self._records[record.worker_id] = record
        self._heard[record.worker_id] = now

    def delete(self, worker_id: str) -> None:
        """Forget a worker that signed off. An unknown one is fine."""
        self._records.pop(worker_id, None)
        self._heard.pop(worker_id, None)

    def reconnected(self, now: float) -> None:
        """Note that the bus was away until now."""
        self._no_verdict_before = now + 2 * self._ttl_s

    @property
    def known(self) -> Mapping[str, WorkerRecord]:
        """All workers that have not been found to be gone, without a new verdict."""
        return self._records

    def alive(self, now: float) -> Mapping[str, WorkerRecord]:
        """Return the workers that count now, by id; the others are forgotten."""
        if now >= self._no_verdict_before:
            for worker_id in [each for each, heard in self._heard.items() if now - heard >= self._ttl_s]:
                self.delete(worker_id)
        return self._records
