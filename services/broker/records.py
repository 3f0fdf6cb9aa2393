"""The records of handoffs in their bucket, by compare-and-set."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Final

from common.bus.errors import BusError, RevisionConflict, StorageRefused
from common.bus.port import Bucket, Bus
from common.bus.storage import handoffs_config
from common.runtime.clock import Clock, Deadline
from common.runtime.pauses import pauses
from contracts.codec import decode, encode
from contracts.errors import CodecError, ErrorCode, ErrorInfo
from contracts.handoff import HandoffRecord, HandoffState
from contracts.requests import DisaggregatedRoute
from services.broker.core.deadline_text import seconds_left
from services.broker.core.effects import StoreRecord
from services.broker.core.events import RecordConflict, RecordStored, RecordUnwritten

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.5
_MAX_ENDED: Final = 1024
"""How many ended handoffs are told again at most: far more than can end while a broker goes down."""

Outcome = RecordStored | RecordConflict | RecordUnwritten


class Records:
    """One key a handoff, that disappears `ttl_s` after its last write."""

    def __init__(self, bus: Bus, clock: Clock, *, ttl_s: float, timeout_s: float) -> None:
        self._bus = bus
        self._clock = clock
        self._config = handoffs_config(ttl_s)
        self._timeout_s = timeout_s
        self._bucket: Bucket | None = None

    async def open(self) -> None:
        """Open the bucket. Raises `BusError`."""
        self._bucket = await self._bus.ensure_bucket(self._config)

    async def store(self, effect: StoreRecord) -> Outcome:
        """Write, and say what became of it. A write without an answer is repeated: if it did arrive, it conflicts with itself."""
        deadline = Deadline.after(self._clock, self._timeout_s)
        waits = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        reason = "no answer"
        while not deadline.passed:
            try:
                async with deadline.timeout():
                    return await self._try(effect)
            except StorageRefused as error:
                reason = error.message
                break
            except BusError as error:
                reason = error.message
            except TimeoutError:
                break
            await self._clock.sleep(min(next(waits), deadline.remaining))
        text = f"the record could not be written: {reason}"
        error_info = ErrorInfo(code=ErrorCode.BUS_UNAVAILABLE, message=text)
        return RecordUnwritten(at_ns=self._clock.monotonic_ns(), write=effect.write, error=error_info)

    async def _try(self, effect: StoreRecord) -> Outcome:
        bucket = self._opened()
        key, data = effect.record.handoff_id, encode(effect.record)
        while True:
            try:
                if effect.last is None:
                    revision = await bucket.create(key, data)
                else:
                    revision = await bucket.update(key, data, effect.last)
            except RevisionConflict:
                entry = await bucket.get(key)
                if entry is None and effect.last is None:
                    continue  # the key that stood in the way has expired meanwhile
                found = None if entry is None else _record_in(entry.value)
                held = 0 if entry is None else entry.revision
                now_ns = self._clock.monotonic_ns()
                return RecordConflict(at_ns=now_ns, write=effect.write, found=found, revision=held)
            return RecordStored(at_ns=self._clock.monotonic_ns(), write=effect.write, revision=revision)

    async def left_over(self, unreadable: Callable[[str, CodecError], None]) -> list[tuple[HandoffRecord, int]]:
        """What an earlier broker may not have brought to its end, with revisions. Raises `BusError`.

        That is every record that is not terminal, and the latest of those terminal ones whose end it was for the broker to
        tell the workers: it may have written that word as its last. After the deadline they need not be told.

        What is no record is left where it is, and told to `unreadable` with its key. Everything in the bucket is read, in one pass;
        meanwhile at most twice as many that ended are held as are told of.
        """
        alive: dict[str, tuple[HandoffRecord, int]] = {}
        ended: dict[str, tuple[HandoffRecord, int]] = {}
        async for entry in self._opened().entries():
            try:
                record = _checked(entry.key, decode(entry.value, HandoffRecord))
            except CodecError as error:
                unreadable(entry.key, error)
                continue
            for kept in (alive, ended):  # it may have been written, and read, once more meanwhile
                kept.pop(entry.key, None)
            if not record.state.terminal:
                alive[entry.key] = record, entry.revision
            elif _ended_here(record) and seconds_left(record.deadline_at, self._clock.wall_time()) > 0:
                ended[entry.key] = record, entry.revision
                if len(ended) > 2 * _MAX_ENDED:
                    ended = {record.handoff_id: (record, revision) for record, revision in _latest(ended)}
        return sorted(alive.values(), key=_revision) + _latest(ended)

    async def find(self, handoff_id: str) -> tuple[HandoffRecord, int] | None:
        """One record and its revision; None for a key that is not there. Raises `CodecError` and `BusError`."""
        entry = await self._opened().get(handoff_id)
        if entry is None:
            return None
        return _checked(handoff_id, decode(entry.value, HandoffRecord)), entry.revision

    def _opened(self) -> Bucket:
        if self._bucket is None:
            raise AssertionError("`open` comes first")
        return self._bucket


def _record_in(value: bytes) -> HandoffRecord | None:
    """What stands at a key; None for what is no record: whoever put it there has no say, and it is written over."""
    try:
        return decode(value, HandoffRecord)
    except CodecError:
        return None


def _latest(ended: dict[str, tuple[HandoffRecord, int]]) -> list[tuple[HandoffRecord, int]]:
    """Those that were written last, as many as are told of, in the order of their writing."""
    return sorted(ended.values(), key=_revision)[-_MAX_ENDED:]


def _revision(kept: tuple[HandoffRecord, int]) -> int:
    return kept[1]


def _ended_here(record: HandoffRecord) -> bool:
    """Whether it ended before its answer did: else the worker that streams the answer ended it, and has let go by itself."""
    if record.state is not HandoffState.FINISHED:
        return True
    return record.num_tokens <= record.num_delivered_tokens + 1 and isinstance(record.route, DisaggregatedRoute)


def _checked(key: str, record: HandoffRecord) -> HandoffRecord:
    """The record, if it can be one that a broker has written. Raises `CodecError`."""
    if record.handoff_id != key:
        raise CodecError(f"handoff_id: {record.handoff_id!r} stands at the key {key!r}", param="handoff_id")
    moments = {"deadline_at": record.deadline_at}
    if record.submitted_at:
        moments["submitted_at"] = record.submitted_at
    for param, text in moments.items():
        try:
            moment = dt.datetime.fromisoformat(text)
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            raise CodecError(f"{param}: {text[:40]!r} is no time of RFC 3339", param=param)
    return record
