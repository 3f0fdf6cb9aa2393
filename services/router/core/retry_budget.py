"""How many retries there may be, of all requests together: a mesh in trouble must not be given several times its work."""

from __future__ import annotations


class RetryBudget:
    """A bucket of retries. Each request adds `share` of one, each second `floor_per_s`; it never holds more than `capacity`.

    It begins full, so that a whole router's worth of streams survives the loss of the worker under them. Half of it is a reserve: whoever
    was turned away by busy workers takes none of that, however many there are.
    """

    def __init__(self, *, share: float, floor_per_s: float, capacity: int, now: float) -> None:
        self._share = share
        self._floor_per_s = floor_per_s
        self._capacity = capacity
        self._reserve = capacity // 2
        self._left = float(capacity)
        self._filled_at = now

    @property
    def left(self) -> float:
        """Retries that may be made, without what the time since the last call adds."""
        return self._left

    def note_request(self) -> None:
        """A request came in."""
        self._add(self._share)

    def take(self, now: float, *, from_reserve: bool) -> bool:
        """Take one retry at the monotonic second `now`, if need be `from_reserve`; say whether there was one."""
        self._add((now - self._filled_at) * self._floor_per_s)
        self._filled_at = now
        if self._left - 1.0 < (0 if from_reserve else self._reserve):
            return False
        self._left -= 1.0
        return True

    def _add(self, count: float) -> None:
        self._left = min(float(self._capacity), self._left + count)
