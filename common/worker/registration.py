"""Keeps a worker's record in `PD_WORKERS` alive, and says there what it has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Never

from common.bus.kept_record import KeptRecord
from common.bus.port import Bucket, Bus
from common.bus.storage import WORKER_TTL_S, WORKERS_CONFIG, ttl_on
from common.runtime.clock import Clock
from common.runtime.lifecycle import EXIT_LEASE_LAPSED, Log, ServiceEnded
from common.worker.own_lease import LOOK_EVERY_S, OwnLease
from contracts.codec import encode
from contracts.workers import WorkerRecord


class Registration(KeptRecord):
    """One worker's key. `record` is asked for a fresh one at every put.

    `run` and `put` raise `ServiceEnded` when this process stood still until the lease had lapsed, or another start has the key by now.
    """

    def __init__(self, bus: Bus, clock: Clock, log: Log, record: Callable[[], WorkerRecord]) -> None:
        def keyed() -> tuple[str, bytes]:
            made = record()
            return made.worker_id, encode(made)

        super().__init__(bus, log, WORKERS_CONFIG, keyed)
        self._clock = clock
        self._lease = OwnLease(clock, ttl_s=ttl_on(bus, WORKER_TTL_S))
        self._has_lapsed = False

    async def run_lease(self) -> Never:
        """Look after the lease. Raises `ServiceEnded` as `put` does."""
        while True:
            await self._clock.sleep(LOOK_EVERY_S)
            self._check_lease()

    async def put(self, bucket: Bucket) -> None:
        """See `KeptRecord.put`."""
        self._check_lease()
        sent_at = self._clock.monotonic()
        await super().put(bucket)
        self._lease.renewed(sent_at)

    def _check_lease(self) -> None:
        """Whoever was taken for dead has lost its work: the memory that it granted may be written, and its tokens come twice."""
        if self._lease.has_lapsed():
            self._has_lapsed = True
            raise ServiceEnded("this process stood still, and its lease has lapsed", status=EXIT_LEASE_LAPSED)

    async def close(self) -> None:
        """See `KeptRecord.close`. A record that has lapsed may be another start's by now, and stays."""
        if not self._has_lapsed:
            await super().close()
