"""Which fences a worker believes: a higher one than it has seen counts only if a broker holds the lease with it.

A fence that was believed deposes every broker with a lower one, for good. So a number that anybody can write into a command is
compared with the lease first. That costs a look for each new term, and nothing for any other command.
"""

from __future__ import annotations

import asyncio
from typing import Final

from common.bus.errors import BusError
from common.bus.lease import fence_of_holder
from common.bus.port import Bucket, Bus
from common.bus.rpc import RefusedError, UnansweredError
from common.bus.storage import LEASES_CONFIG
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from common.worker.core.table import HandoffTable
from contracts import subjects
from contracts.errors import CodecError, ErrorCode

_LOOK_S: Final = 1.0
_LOOK_AGAIN_S: Final = (0.05, 0.2, 0.5)
"""Of several servers one may answer that has not heard of the new term yet."""

_LOG_EVERY_S: Final = 60.0


class Fences:
    """Looks at the lease when a command brings a fence above all that `table` has seen, and lets the table know what it found."""

    def __init__(self, bus: Bus, clock: Clock, log: Log, metrics: Metrics, table: HandoffTable) -> None:
        self._bus = bus
        self._clock = clock
        self._log = log
        self._table = table
        self._bucket: Bucket | None = None
        self._looking = asyncio.Lock()
        self._silent_until = 0.0
        self._refused = metrics.counter(
            "worker_fences_refused_total", "Commands with a fence above that of the broker that holds the lease."
        )

    async def settle(self, handoff_id: str, fence: int) -> None:
        """Return once the table knows whether this fence is the highest: at once, unless it would be a new one.

        Raises `RefusedError` (STALE_FENCE) for a fence above that of the lease, which the table then never hears of, and
        `UnansweredError` while nobody holds the lease or it cannot be read: whoever leads will ask again.
        """
        held: int | None = None
        for pause_s in (*_LOOK_AGAIN_S, None):
            async with self._looking:  # of the many commands that begin a term one looks
                if not self._table.is_news(fence):
                    return
                held = await self._held()
                if held is not None and held >= fence:
                    self._table.admits_fence(held)
                    return
            if pause_s is not None:
                await self._clock.sleep(pause_s)
        if held is None:
            raise UnansweredError(f"fence: nobody holds the lease, so that {fence} cannot be judged")
        self._note(handoff_id, fence, held)
        text = f"fence: {fence} was given to no broker; the one that leads has {held}"
        raise RefusedError(handoff_id, ErrorCode.STALE_FENCE, text)

    async def _held(self) -> int | None:
        try:
            async with Deadline.after(self._clock, _LOOK_S).timeout():
                self._bucket = self._bucket or await self._bus.ensure_bucket(LEASES_CONFIG)
                return await fence_of_holder(self._bucket, subjects.broker_lease())
        except (BusError, CodecError, TimeoutError):
            return None

    def _note(self, handoff_id: str, fence: int, held: int) -> None:
        """Count it, and log one in a while: a stranger may send thousands."""
        self._refused.inc()
        now = self._clock.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + _LOG_EVERY_S
            self._log.error("fence_refused", handoff_id=handoff_id, fence=fence, held=held)
