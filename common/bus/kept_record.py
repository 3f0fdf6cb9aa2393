"""A record that a service keeps alive: one key of a bucket with a time to live, written again and again, and removed at the end.

Two starts of one id would bury each other with every write. So a start takes the key once, when it begins, whatever it holds: the
record of a start that died may still be there. From then on it writes only over its own last record, and whoever finds that of
another start in its place gives way: the later start stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from common.bus.errors import BusError, RevisionConflict
from common.bus.port import Bucket, BucketConfig, Bus
from common.runtime.lifecycle import EXIT_LEASE_LAPSED, Log, ServiceEnded
from contracts.codec import decode
from contracts.errors import CodecError, ErrorCode
from contracts.routers import RouterRecord
from contracts.workers import WorkerRecord

PUT_EVERY_S: Final = 2.0
_MAX_TRIES: Final = 6
_PAUSE_S: Final = 0.05
"""Between two reads of a server that is behind, as one that has just ceased to lead may be."""


class KeptRecord:
    """One process's key. `record` gives the key, always the same, and a fresh value at every put: a worker's or a router's record."""

    def __init__(self, bus: Bus, log: Log, config: BucketConfig, record: Callable[[], tuple[str, bytes]]) -> None:
        self._bus = bus
        self._log = log
        self._config = config
        self._record = record
        self._changed = asyncio.Event()
        self._bucket: Bucket | None = None
        self._own_start: str | None = None
        self._has_begun = False
        self._epoch = 0
        self._held = 0  # the highest revision known to be ours in this life of the bucket
        self._last: int | None = None  # what to write over: 0 for a key without a value, None for what has to be read

    def announce(self) -> None:
        """Put the record soon: something in it has changed that others wait for."""
        self._changed.set()

    async def open(self) -> Bucket:
        """Open the bucket and put the first record, over whatever is there. Raises `BusError`."""
        self._bucket = await self._bus.ensure_bucket(self._config)
        await self.put(self._bucket)
        return self._bucket

    async def run(self) -> None:
        """Put the record every `PUT_EVERY_S`, and at once after `announce`. An outage of the bus is waited out.

        Raises `ServiceEnded` as `put` does.
        """
        bucket = self._bucket
        if bucket is None:
            raise AssertionError("`open` comes first")
        while True:
            try:
                async with asyncio.timeout(PUT_EVERY_S):
                    await self._wait_for_a_reason()
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                await self.put(bucket)
            except BusError as error:
                self._log.info("record_delayed", bucket=self._config.name, error_code=error.code)
            except TimeoutError:
                self._log.info("record_delayed", bucket=self._config.name, error_code=ErrorCode.BUS_UNAVAILABLE)
                self._changed.set()  # at once, once more

    async def _wait_for_a_reason(self) -> None:
        """Who was cut off looks for its record as soon as it is back: another start may answer for it by then."""
        if self._bus.is_connected:
            await self._changed.wait()
        else:
            await self._bus.reconnected(self._bus.reconnects)

    async def put(self, bucket: Bucket) -> None:
        """Put the record now: the first time over whatever is there, then only over our own.

        Raises `BusError`, TimeoutError, and `ServiceEnded` when another start has put its record there since. The next put goes on
        from what this one has found out.
        """
        key, value = self._record()
        if not self._has_begun:
            self._own_start = _start_of(value)
            self._epoch = await bucket.epoch()
            self._held = self._last = await bucket.put(key, value)
            self._has_begun = True
            return
        for _ in range(_MAX_TRIES):
            # The bus itself would wait nearly as long as the record lives: one lost answer must not cost it its life.
            async with asyncio.timeout(PUT_EVERY_S):
                if self._last is None:
                    await self._look(bucket, key)
                elif await self._write_over(bucket, key, value, self._last):
                    return
        raise RevisionConflict(f"{key}: it changed {_MAX_TRIES} times")

    async def _write_over(self, bucket: Bucket, key: str, value: bytes, last: int) -> bool:
        """Write unless the key holds something else: an earlier write of ours, too, whose answer was lost."""
        try:
            revision = await (bucket.update(key, value, last=last) if last else bucket.create(key, value))
        except RevisionConflict:
            self._last = None
            return False
        self._held = self._last = revision
        return True

    async def _look(self, bucket: Bucket, key: str) -> None:
        """Find out what the next write goes over. Raises `BusError` and `ServiceEnded`."""
        entry = await bucket.get(key)
        if entry is None:  # it expired in an outage, or a stranger removed it
            self._last = 0
            return
        start = _start_of(entry.value)
        if start is None or start == self._own_start:  # what is nobody's record is no reason to go
            self._last = entry.revision
        elif entry.revision > self._held:
            self._give_way(key, start)
        elif (epoch := await bucket.epoch()) != self._epoch:  # revisions have begun anew: look again, by the new ones
            self._epoch, self._held = epoch, 0
        else:  # older than our own: what was there before us, told by a server that is behind
            await asyncio.sleep(_PAUSE_S)

    def _give_way(self, key: str, other: str) -> None:
        self._log.error(
            "record_taken", bucket=self._config.name, key=key, own_incarnation=self._own_start, other_incarnation=other
        )
        reason = f"{key}: the start {self._own_start} gives way to the start {other}, whose record is in its place"
        raise ServiceEnded(f"{reason}; no two of a mesh may have the same id", status=EXIT_LEASE_LAPSED)

    async def close(self) -> None:
        """Remove the record: nobody need wait for it to expire. What another process has put there since stays."""
        if self._bucket is None or self._own_start is None:
            return
        try:
            entry = await self._bucket.get(self._record()[0])
            if entry is not None and _start_of(entry.value) == self._own_start:
                await self._bucket.delete(entry.key, last=entry.revision)
        except BusError as error:
            self._log.info("record_left", bucket=self._config.name, error_code=error.code)


def _start_of(value: bytes) -> str | None:
    """The incarnation that a record names; None for what is no record."""
    try:
        found: WorkerRecord | RouterRecord = decode(value, WorkerRecord | RouterRecord)  # type: ignore[arg-type]  # a union is not a type
    except CodecError:
        return None
    return found.incarnation
