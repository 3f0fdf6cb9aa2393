"""Keeps a prefill worker's links in `PD_LINKS` as they are, and alive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from common.bus.errors import BusError
from common.bus.port import Bucket, Bus
from common.bus.storage import LINKS_CONFIG
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from contracts import subjects
from contracts.codec import encode
from contracts.links import LinkRecord

RENEW_EVERY_S: Final = 5.0
_RETRY_S: Final = 1.0

Records = Callable[[], Mapping[str, LinkRecord]]
"""What the table should hold now, by key."""


class LinkTable:
    """The keys of one prefill worker. There is one writer, so that no record is overtaken by an older one.

    Records are put when they change, and every `RENEW_EVERY_S`; the bucket's time to live removes those of a dead worker.
    Keys that an earlier start has left are deleted at the first writing.
    """

    def __init__(self, bus: Bus, clock: Clock, log: Log, worker_id: str, records: Records) -> None:
        self._bus = bus
        self._clock = clock
        self._log = log
        self._worker_id = worker_id
        self._records = records
        self._written: dict[str, LinkRecord | None] = {}
        self._bucket: Bucket | None = None
        self._reconnects = bus.reconnects
        self._renewed_at = 0.0
        self._changed = asyncio.Event()
        self._clean = asyncio.Event()

    def changed(self) -> None:
        """Write soon: a record may have changed."""
        self._clean.clear()
        self._changed.set()

    async def run(self) -> None:
        """Write whatever changes, for ever. An outage of the bus is waited out."""
        while True:
            self._changed.clear()
            try:
                await self._write()
            except BusError as error:
                self._log.info("links_delayed", error_code=error.code, error_message=error.message)
                await self._clock.sleep(_RETRY_S)
                continue
            if not self._changed.is_set():
                self._clean.set()
            try:
                async with asyncio.timeout(RENEW_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def wait_written(self, deadline: Deadline) -> bool:
        """Wait until the bucket holds what it should; say whether it did by the deadline."""
        try:
            async with deadline.timeout():
                await self._clean.wait()
        except TimeoutError:
            return False
        return True

    async def _write(self) -> None:
        bucket = self._bucket
        if bucket is None:
            bucket = await self._bus.ensure_bucket(LINKS_CONFIG)
            self._written = dict.fromkeys(await bucket.keys(subjects.links_filter(self._worker_id)))
            self._bucket = bucket
        now, reconnects = self._clock.monotonic(), self._bus.reconnects
        # After an outage the records may have expired, or the server may have lost its store.
        renew = reconnects != self._reconnects or now - self._renewed_at >= RENEW_EVERY_S
        records = self._records()
        for key in [key for key in self._written if key not in records]:
            await bucket.delete(key)
            del self._written[key]
        for key, record in records.items():
            if renew or self._written.get(key) != record:
                await bucket.put(key, encode(record))
                self._written[key] = record
        if renew:
            self._renewed_at, self._reconnects = now, reconnects
