"""How many retries there may be, of all requests together: a mesh in trouble must not be given several times its work."""

from __future__ import annotations


class RetryBudget:
    """A bucket of retries. Each request adds `share` of one, each second `floor_per_s`; it never holds more than `capacity`.

    It begins full, so that a whole router's worth of streams survives the loss of the worker under them.
    """

    def __init__(self, *, share: float, floor_per_s: float, capacity: int, now: float) -> None:
        self._share = share
        self._floor_per_s = floor_per_s
        self._capacity = capacity
        self._left = float(capacity)
        self._filled_at = now

    @property
    def left(self) -> float:
        """Retries that may be made, without what the time since the last call adds."""
        return self._left

    def note_request(self) -> None:
        """A request came in."""
        self._add(self._share)

    def take(self, now: float) -> bool:
        """Take one retry at the monotonic second `now`; say whether there was one."""
        self._add((now - self._filled_at) * self._floor_per_s)
        self._filled_at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def _add(self, count: float) -> None:
        self._left = min(float(self._capacity), self._left + count)
