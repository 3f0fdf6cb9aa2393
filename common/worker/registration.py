"""Keeps a worker's record in `PD_WORKERS` alive, and says there what it has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Never

from common.bus.errors import BusError
from common.bus.port import Bucket, Bus
from common.bus.storage import WORKER_TTL_S, WORKERS_CONFIG
from common.runtime.clock import Clock
from common.runtime.lifecycle import EXIT_LEASE_LAPSED, Log, ServiceEnded
from common.worker.own_lease import LOOK_EVERY_S, OwnLease
from contracts.codec import encode
from contracts.workers import WorkerRecord

PUT_EVERY_S: Final = 2.0


class Registration:
    """One worker's key. `record` is asked for a fresh one at every put."""

    def __init__(self, bus: Bus, clock: Clock, log: Log, record: Callable[[], WorkerRecord]) -> None:
        self._bus = bus
        self._clock = clock
        self._log = log
        self._lease = OwnLease(clock, ttl_s=WORKER_TTL_S)
        self._has_lapsed = False
        self._record = record
        self._changed = asyncio.Event()
        self._bucket: Bucket | None = None

    def announce(self) -> None:
        """Put the record soon: something in it has changed that others wait for."""
        self._changed.set()

    async def open(self) -> Bucket:
        """Open the bucket and put the first record. Raises `BusError`."""
        self._bucket = await self._bus.ensure_bucket(WORKERS_CONFIG)
        await self.put(self._bucket)
        return self._bucket

    async def run(self) -> None:
        """Put the record every `PUT_EVERY_S`, and at once after `announce`. An outage of the bus is waited out.

        Raises `ServiceEnded` when this process stood still until the lease had lapsed.
        """
        bucket = self._bucket
        if bucket is None:
            raise AssertionError("`open` comes first")
        while True:
            try:
                async with asyncio.timeout(PUT_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                await self.put(bucket)
            except BusError as error:
                self._log.info("registration_delayed", error_code=error.code)

    async def run_lease(self) -> Never:
        """Look after the lease. Raises `ServiceEnded` as `run` does."""
        while True:
            await self._clock.sleep(LOOK_EVERY_S)
            self._check_lease()

    async def put(self, bucket: Bucket) -> None:
        """Put the record now. Raises `BusError`, and `ServiceEnded` as `run` does."""
        self._check_lease()
        record = self._record()
        sent_at = self._clock.monotonic()
        await bucket.put(record.worker_id, encode(record))
        self._lease.renewed(sent_at)

    def _check_lease(self) -> None:
        """Whoever was taken for dead has lost its work: the memory that it granted may be written, and its tokens come twice."""
        if self._lease.has_lapsed():
            self._has_lapsed = True
            raise ServiceEnded("this process stood still, and its lease has lapsed", status=EXIT_LEASE_LAPSED)

    async def close(self) -> None:
        """Remove the record: nobody need wait for it to expire. One that has lapsed may be another start's by now, and stays."""
        if self._bucket is not None and not self._has_lapsed:
            try:
                await self._bucket.delete(self._record().worker_id)
            except BusError as error:
                self._log.info("registration_left", error_code=error.code)
