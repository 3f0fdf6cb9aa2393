"""What is wrong with links and ranks in a simulation lasts as long as its own fault, whatever else is wrong meanwhile."""

from __future__ import annotations

import pytest

from tests.simulation.standstill import Standstills
from tests.simulation.weather import Links, Weather


def test_faults_of_one_worker_end_one_by_one() -> None:
    """The end of one is not that of another, nor does one that was over hide that of the other end."""
    links = Links()
    end_slow, end_lost = links.begin(Weather.SLOW, "prefill-0"), links.begin(Weather.BLACK_HOLE, "prefill-0")
    end_other, end_again = links.begin(Weather.RAGGED, "decode-0"), links.begin(Weather.SLOW, "prefill-0")
    found = [links.between("prefill-0", "decode-0")]
    for end in (end_lost, end_other, end_slow, end_again):
        end()
        found.append(links.between("prefill-0", "decode-0"))
    assert found == [Weather.BLACK_HOLE, Weather.RAGGED, Weather.SLOW, Weather.SLOW, Weather.FAIR]


def test_a_fault_of_a_pair_touches_no_other_link() -> None:
    """Either way between the two, and nowhere else."""
    links = Links()
    links.begin(Weather.SLOW, "prefill-0", "decode-1")
    pairs = [("prefill-0", "decode-1"), ("decode-1", "prefill-0"), ("prefill-0", "decode-0"), ("prefill-1", "decode-1")]
    assert [links.between(*pair) for pair in pairs] == [Weather.SLOW, Weather.SLOW, Weather.FAIR, Weather.FAIR]


@pytest.mark.parametrize(("rank", "held"), [(None, [True, True]), (1, [False, True])])
def test_a_rank_stands_still_alone_or_with_all_others(rank: int | None, held: list[bool]) -> None:
    """What waits for it goes on when it does, and when its worker is gone."""
    still, done = Standstills(), []
    end = still.begin("decode-0", rank)
    assert [still.holds("decode-0", each) for each in (0, 1)] == held
    still.park("decode-0", lambda: done.append("woken"))
    end()
    end()
    still.begin("decode-0", rank)
    still.park("decode-0", lambda: done.append("gone"))
    still.forget("decode-0")
    assert not still.any_holds
    assert done == ["woken", "gone"]
