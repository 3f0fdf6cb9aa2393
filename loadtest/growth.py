"""Whether a process grows with the requests that it serves: a line through what was seen of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from loadtest.processes import Usage

GROWTH_AIM: Final = 0.01
"""Growth over all requests, as a share of the level, below which a process counts as steady."""
UNITS_AIM: Final = 1.0
"""The same for descriptors and threads: less than one of them."""
MIB: Final = 1 << 20


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A least-squares line: `level` in the middle, `growth` from the first to the last of the requests."""

    level: float
    growth: float

    @property
    def share(self) -> float:
        """The growth as a share of the level."""
        return self.growth / self.level if self.level else 0.0


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """One process over a run. `seen` is what the lines go through."""

    name: str
    own: Line
    resident: Line
    fds: Line
    threads: Line
    seen: tuple[Usage, ...]

    @property
    def is_steady(self) -> bool:
        """Whether nothing grows."""
        memory = max(self.own.share, self.resident.share)
        return memory < GROWTH_AIM and max(self.fds.growth, self.threads.growth) < UNITS_AIM


def fit(requests: Sequence[int], values: Sequence[float]) -> Line:
    """The line through `values`, seen after so many `requests`. Raises ValueError unless there are two different ones."""
    count = len(values)
    if len(set(requests)) < 2:
        raise ValueError(f"requests: {requests} is not allowed; the rule is: two different numbers or more")
    middle, level = sum(requests) / count, sum(values) / count
    squares = sum((at - middle) ** 2 for at in requests)
    slope = sum((at - middle) * (value - level) for at, value in zip(requests, values, strict=True)) / squares
    return Line(level=level, growth=slope * (max(requests) - min(requests)))


def growth_of(name: str, requests: Sequence[int], seen: Sequence[Usage]) -> Growth:
    """Sum up what was seen of one process."""
    return Growth(
        name=name,
        own=fit(requests, [each.own_bytes for each in seen]),
        resident=fit(requests, [each.resident_bytes for each in seen]),
        fds=fit(requests, [each.num_fds for each in seen]),
        threads=fit(requests, [each.num_threads for each in seen]),
        seen=tuple(seen),
    )
