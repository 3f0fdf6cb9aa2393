"""What comes over the bus and cannot be read: refused, counted, and logged once in a while.

Nobody waits for an answer to such a message, and a stranger may send thousands: a log line each would be the damage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from common.bus.port import Entry
from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from contracts.codec import decode
from contracts.errors import InvalidValueError, PdmeshError
from contracts.subjects import TABLE

LOG_EVERY_S: Final = 60.0

T = TypeVar("T", bound=msgspec.Struct)


class Refusals:
    """One for a process. `row` is always the purpose of a row of `contracts.subjects.TABLE`."""

    def __init__(self, log: Log, clock: Clock, metrics: Metrics) -> None:
        self._log = log
        self._clock = clock
        self._counter = metrics.counter(
            "messages_refused_total",
            "Messages and records that nobody answers to and that could not be read or cannot be true, by row of the table of subjects.",
            ("row",),
        )
        self._silent_until: dict[str, float] = {}
        self._unlogged = dict.fromkeys((row.purpose for row in TABLE), 0)

    def message(self, row: str, data: bytes, kind: type[T], **fields: Any) -> T | None:
        """Return the message, or None for one that is refused. `fields` say in the log where it came from."""
        try:
            return decode(data, kind)
        except PdmeshError as error:
            self.note(row, error, **fields)
            return None

    def record(self, row: str, entry: Entry, kind: type[T], key_of: Callable[[T], str]) -> T | None:
        """Return what a key of a bucket holds, or None for what is no record, or speaks of another key than its own."""
        try:
            record = decode(entry.value, kind)
            key = key_of(record)
            if key != entry.key:
                raise InvalidValueError(field="key", value=entry.key, rule=f"{key}: what its value names")
        except PdmeshError as error:
            self.note(row, error, key=entry.key)
            return None
        return record

    def note(self, row: str, error: PdmeshError, **fields: Any) -> None:
        """Count a refusal, and log the first of its row and then one in `LOG_EVERY_S`, with how many were not logged."""
        self._counter.labels(row).inc()
        now = self._clock.monotonic()
        if now < self._silent_until.get(row, now):
            self._unlogged[row] += 1
            return
        unlogged, self._unlogged[row] = self._unlogged[row], 0
        self._silent_until[row] = now + LOG_EVERY_S
        self._log.error(
            "message_refused",
            row=row,
            **fields,
            error_code=error.code,
            error_message=error.message,
            num_not_logged=unlogged,
        )
