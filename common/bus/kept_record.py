"""A record that a service keeps alive: one key of a bucket with a time to live, put again and again, and removed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from common.bus.errors import BusError
from common.bus.port import Bucket, BucketConfig, Bus
from common.runtime.lifecycle import Log
from contracts.errors import ErrorCode

PUT_EVERY_S: Final = 2.0


class KeptRecord:
    """One process's key. `record` gives the key, always the same, and a fresh value at every put."""

    def __init__(self, bus: Bus, log: Log, config: BucketConfig, record: Callable[[], tuple[str, bytes]]) -> None:
        self._bus = bus
        self._log = log
        self._config = config
        self._record = record
        self._changed = asyncio.Event()
        self._bucket: Bucket | None = None
        self._sent: bytes | None = None

    def announce(self) -> None:
        """Put the record soon: something in it has changed that others wait for."""
        self._changed.set()

    async def open(self) -> Bucket:
        """Open the bucket and put the first record. Raises `BusError`."""
        self._bucket = await self._bus.ensure_bucket(self._config)
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
                # The bus itself would wait nearly as long as the record lives: one lost answer must not cost it its life.
                async with asyncio.timeout(PUT_EVERY_S):
                    await self.put(bucket)
            except BusError as error:
                self._log.info("record_delayed", bucket=self._config.name, error_code=error.code)
            except TimeoutError:
                self._log.info("record_delayed", bucket=self._config.name, error_code=ErrorCode.BUS_UNAVAILABLE)
                self._changed.set()  # at once, once more

    async def put(self, bucket: Bucket) -> None:
        """Put the record now. Raises `BusError`."""
        key, self._sent = self._record()
        await bucket.put(key, self._sent)

    async def close(self) -> None:
        """Remove the record: nobody need wait for it to expire. What another process has put there since stays."""
        if self._bucket is None:
            return
        try:
            entry = await self._bucket.get(self._record()[0])
            if entry is not None and entry.value == self._sent:
                await self._bucket.delete(entry.key, last=entry.revision)
        except BusError as error:
            self._log.info("record_left", bucket=self._config.name, error_code=error.code)
