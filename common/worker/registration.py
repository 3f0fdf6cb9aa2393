"""Keeps a worker's record in `PD_WORKERS` alive, and says there what it has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from common.bus.errors import BusError
from common.bus.port import Bucket, Bus
from common.bus.storage import WORKERS_CONFIG
from common.runtime.lifecycle import Log
from contracts.codec import encode
from contracts.workers import WorkerRecord

PUT_EVERY_S: Final = 2.0


class Registration:
    """One worker's key. `record` is asked for a fresh one at every put."""

    def __init__(self, bus: Bus, log: Log, record: Callable[[], WorkerRecord]) -> None:
        self._bus = bus
        self._log = log
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
        """Put the record every `PUT_EVERY_S`, and at once after `announce`. An outage of the bus is waited out."""
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

    async def put(self, bucket: Bucket) -> None:
        """Put the record now. Raises `BusError`."""
        record = self._record()
        await bucket.put(record.worker_id, encode(record))

    async def close(self) -> None:
        """Remove the record: nobody need wait for it to expire."""
        if self._bucket is not None:
            try:
                await self._bucket.delete(self._record().worker_id)
            except BusError as error:
                self._log.info("registration_left", error_code=error.code)
