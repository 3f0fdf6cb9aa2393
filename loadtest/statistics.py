"""Percentiles, intervals and ratios: what a load test may say about numbers it has seen. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

_Z95: Final = 1.959963984540054


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A share with the interval that holds the true one in 95 of 100 repetitions. All three are from 0 to 1."""

    share: float
    low: float
    high: float


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How many numbers there were, and where they lie; in the unit of the numbers."""

    count: int
    p50: float
    p99: float
    low: float
    high: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of `values` lie, interpolated between neighbours. Raises ValueError without values."""
    if not values:
        raise ValueError("values: none is not allowed; the rule is: at least one")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent: {percent} is not allowed; the rule is: from 0 to 100")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> Spread | None:
    """Where `values` lie; None when there are none."""
    if not values:
        return None
    return Spread(
        count=len(values),
        p50=percentile(values, 50),
        p99=percentile(values, 99),
        low=min(values),
        high=max(values),
    )


def median(values: Sequence[float]) -> float:
    """The middle of `values`. Raises ValueError without values."""
    return percentile(values, 50)


def ratio(numerator: float, denominator: float) -> float | None:
    """One number over another; None where there is no answer."""
    return numerator / denominator if denominator else None


def wilson(right: int, asked: int) -> Interval:
    """The share of right answers with Wilson's score interval at 95 %. It treats every question as a draw of its own.

    Raises ValueError unless 0 <= right <= asked and asked >= 1.
    """
    if asked < 1 or not 0 <= right <= asked:
        raise ValueError(f"{right} right of {asked} is not allowed; the rule is: 0 <= right <= asked, asked >= 1")
    share = right / asked
    scale = 1 + _Z95**2 / asked
    middle = (share + _Z95**2 / (2 * asked)) / scale
    half = _Z95 * math.sqrt(share * (1 - share) / asked + _Z95**2 / (4 * asked**2)) / scale
    # At the ends the formula gives 0 and 1 but for rounding.
    low = 0.0 if right == 0 else middle - half
    high = 1.0 if right == asked else middle + half
    return Interval(share=share, low=low, high=high)
