"""Pauses between repeats."""

from itertools import islice

from common.runtime.pauses import pauses


def test_pauses_double_up_to_the_longest() -> None:
    """Each pause is twice the one before, until the longest, which stays."""
    assert list(islice(pauses(0.1, 0.5), 5)) == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_first_pause_above_the_longest_is_cut() -> None:
    """No pause is longer than the longest."""
    assert list(islice(pauses(3.0, 1.0), 2)) == [1.0, 1.0]
