"""What may be said about measured numbers."""

from __future__ import annotations

import pytest

from loadtest.statistics import percentile, ratio, spread, wilson


def test_percentiles_are_interpolated_between_neighbours() -> None:
    """The median of four values lies between the middle two; the ends are the extremes."""
    values = [40.0, 10.0, 30.0, 20.0]
    assert percentile(values, 50) == 25.0
    assert percentile(values, 0) == 10.0
    assert percentile(values, 100) == 40.0
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_a_percentile_that_does_not_exist_is_refused(values: list[float], percent: float) -> None:
    """No values and percentages outside 0 to 100 raise."""
    with pytest.raises(ValueError, match="not allowed"):
        percentile(values, percent)


def test_a_spread_of_nothing_is_none() -> None:
    """Without values there is nothing to say."""
    assert spread([]) is None
    found = spread([3.0, 1.0, 2.0])
    assert found is not None
    assert (found.count, found.p50, found.low, found.high) == (3, 2.0, 1.0, 3.0)


def test_a_ratio_over_zero_is_none() -> None:
    """A ratio is given only where there is one."""
    assert ratio(1.0, 0.0) is None
    assert ratio(3.0, 2.0) == 1.5


def test_wilson_interval_agrees_with_published_values() -> None:
    """8 of 10 gives 0.490 to 0.943, and the ends are never left."""
    found = wilson(8, 10)
    assert (round(found.low, 3), round(found.high, 3)) == (0.49, 0.943)
    assert wilson(0, 10).low == 0.0
    assert wilson(10, 10).high == 1.0
    assert round(wilson(10, 10).low, 3) == 0.722


@pytest.mark.parametrize(("right", "asked"), [(0, 0), (-1, 3), (4, 3)])
def test_impossible_counts_are_refused(right: int, asked: int) -> None:
    """More right answers than questions, or no questions, raise."""
    with pytest.raises(ValueError, match="not allowed"):
        wilson(right, asked)
