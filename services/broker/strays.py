"""Records that nobody goes on with: they are brought to an end, so that the bucket tells the truth.

A leader that stood still may write one more record when another one has taken over already, and a write without an answer may
arrive after its handoff was given up. Neither is heard of here, so there is a later look, but only where there is reason for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.bus.errors import BusError
from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from contracts.errors import CodecError
from contracts.handoff import HandoffRecord
from services.broker.records import Records


class Strays:
    """Looks over the records `pause_s` after there was reason to, when whoever wrote them has been heard of or forgotten.

    `is_known` says whether this broker remembers a handoff; each that it does not is given to `take` with its revision.
    """

    def __init__(
        self,
        records: Records,
        clock: Clock,
        log: Log,
        *,
        fence: int,
        pause_s: float,
        is_known: Callable[[str], bool],
        take: Callable[[HandoffRecord, int], None],
    ) -> None:
        self._records = records
        self._clock = clock
        self._log = log
        self._fence = fence
        self._pause_s = pause_s
        self._is_known = is_known
        self._take = take
        self._expected = asyncio.Event()

    def expect(self) -> None:
        """There may be a record, now or soon, that nobody goes on with."""
        self._expected.set()

    async def run(self) -> None:
        """Look whenever there was reason to, for ever. For what comes while a pause lasts there is one more."""
        while True:
            await self._expected.wait()
            self._expected.clear()
            await self._clock.sleep(self._pause_s)
            try:
                found = await self._records.left_over(_pass_over)
            except BusError as error:
                self._log.info("records_not_looked_over", error_code=error.code)
                self._expected.set()
                continue
            for record, revision in found:
                # The record of a later term is that of a broker that leads now: this one does not, and will be told.
                if not record.state.terminal and record.fence <= self._fence and not self._is_known(record.handoff_id):
                    self._log.info(
                        "stray_record", handoff_id=record.handoff_id, state=str(record.state), fence=record.fence
                    )
                    self._take(record, revision)


def _pass_over(_key: str, _error: CodecError) -> None:
    """What cannot be read was told of when the term began."""
