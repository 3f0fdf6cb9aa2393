"""When a client that was turned away may come back: what Retry-After says, from what the mesh has been doing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

from contracts.workers import WorkerRecord, WorkerRole, WorkerState

WINDOW_S: Final = 30.0
MAX_ENDS: Final = 1024


class Throughput:
    """How many answers have ended lately, at monotonic seconds; at most `MAX_ENDS` ends of `WINDOW_S` seconds are kept."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=MAX_ENDS)

    def ended(self, now: float) -> None:
        """Note that an answer ended, and left its place to another."""
        self._ends.append(now)

    def per_second(self, now: float) -> float:
        """Ends a second, over the window or since the oldest that is kept; 0 with fewer than two."""
        while self._ends and now - self._ends[0] > WINDOW_S:
            self._ends.popleft()
        if len(self._ends) < 2:
            return 0.0
        return len(self._ends) / max(now - self._ends[0], 1e-3)


def num_ahead(workers: Iterable[WorkerRecord]) -> int:
    """How many requests wait for memory where answers are generated, as the workers' records say."""
    generating = (WorkerRole.DECODE, WorkerRole.MIXED)
    return sum(worker.load.num_waiting for worker in workers if worker.role in generating)


def lacks_a_role(workers: Iterable[WorkerRecord]) -> bool:
    """Whether no way can lead through these workers before another one has started: it takes a mixed one, or one of each other role."""
    ready = {worker.role for worker in workers if worker.state is WorkerState.READY}
    return WorkerRole.MIXED not in ready and not {WorkerRole.PREFILL, WorkerRole.DECODE} <= ready


def seconds_until_room(*, ahead: int, per_second: float, least: int, most: int) -> int:
    """Whole seconds until those `ahead` have their place, and one more has: between `least` and `most`.

    `least` where nothing has ended lately, so that nothing can be told.
    """
    if per_second <= 0:
        return least
    return max(least, min(most, math.ceil((ahead + 1) / per_second)))
