"""How often, and after which pause, a child that died is started again. Pure: time is an argument, in monotonic seconds."""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_S: Final = 60.0
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0


class RestartBudget:
    """The restarts of one child: `num_per_minute` at most within any minute, each after a longer pause than the one before."""

    def __init__(self, num_per_minute: int) -> None:
        self._num_per_minute = num_per_minute
        self._restarted: deque[float] = deque()

    def pause_s(self, now: float) -> float | None:
        """Take one restart, and return how long to wait before it; None if the last minute has used them up."""
        while self._restarted and now - self._restarted[0] >= WINDOW_S:
            self._restarted.popleft()
        if len(self._restarted) >= self._num_per_minute:
            return None
        pause_s = FIRST_PAUSE_S * 2.0 ** len(self._restarted)
        self._restarted.append(now)
        return float(min(pause_s, LONGEST_PAUSE_S))
