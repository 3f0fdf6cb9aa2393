"""An immutable set of integers kept as ranges: what a ledger knows about one part."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import msgspec

from contracts.errors import InvalidValueError


class RangeSet(msgspec.Struct, frozen=True, array_like=True):
    """Half-open ranges, ascending, not empty, neither overlapping nor touching; build one with `RangeSet.of` or `add`."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> RangeSet:
        """The union of `ranges`, in any order. Raises `InvalidValueError` for a range with a negative start or an end before it."""
        joined: list[tuple[int, int]] = []
        for start, end in sorted(ranges):
            _check(start, end)
            if start == end:
                continue
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end))
            else:
                joined.append((start, end))
        return cls(tuple(joined))

    def add(self, start: int, end: int) -> RangeSet:
        """This set with `[start, end)`; the same object when nothing is new."""
        _check(start, end)
        if start == end or self.covers(start, end):
            return self
        low = bisect_left(self.ranges, start, key=lambda held: held[1])
        high = bisect_right(self.ranges, end, key=lambda held: held[0])
        if low < high:
            start = min(start, self.ranges[low][0])
            end = max(end, self.ranges[high - 1][1])
        return RangeSet((*self.ranges[:low], (start, end), *self.ranges[high:]))

    def merge(self, other: RangeSet) -> RangeSet:
        """The union of both sets."""
        return RangeSet.of((*self.ranges, *other.ranges)) if other.ranges else self

    def covers(self, start: int, end: int) -> bool:
        """Whether every integer of `[start, end)` is in the set. An empty range is covered."""
        if start >= end:
            return True
        at = bisect_right(self.ranges, start, key=lambda held: held[0]) - 1
        return at >= 0 and self.ranges[at][1] >= end

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any integer of `[start, end)` is in the set."""
        at = bisect_right(self.ranges, start, key=lambda held: held[1])
        return start < end and at < len(self.ranges) and self.ranges[at][0] < end

    def tiles(self, start: int, end: int) -> bool:
        """Whether the set is exactly `[start, end)`: no gap, and nothing outside."""
        return self.ranges == (((start, end),) if start < end else ())

    def missing(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """The ranges of `[start, end)` that are not in the set."""
        gaps: list[tuple[int, int]] = []
        for low, high in self.ranges:
            if low >= end:
                break
            if low > start:
                gaps.append((start, low))
            start = max(start, high)
        if start < end:
            gaps.append((start, end))
        return tuple(gaps)

    @property
    def total(self) -> int:
        """How many integers the set holds."""
        return sum(end - start for start, end in self.ranges)


def _check(start: int, end: int) -> None:
    if not 0 <= start <= end:
        raise InvalidValueError(field="range", value=(start, end), rule="0 <= start <= end")
