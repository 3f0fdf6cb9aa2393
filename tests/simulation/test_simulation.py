"""Whole meshes from seeds: every invariant holds whatever goes wrong, and a planted fault is found."""

from __future__ import annotations

import pytest

from tests.simulation.campaign import Campaign, run_batch, run_campaign
from tests.simulation.coverage import coverage_lines, not_seen, owed
from tests.simulation.planted_faults import PLANTS, Plant
from tests.simulation.simulate import simulate

NUM_SAMPLED = 20
NUM_SAMPLED_PAIRS = 70
NUM_LONG = 100_000
FIRST_LONG_SEED = 1_000_000
NUM_SEEDS_TO_FIND = 1_000
_QUICK = {"commit with an open ledger", "return memory twice", "hold for ever"}


def test_no_invariant_is_broken_in_a_sample_of_schedules() -> None:
    """Crashes, freezes, partitions, outages, noise and bad links: the seeds of the sample end as they should, with dcp, too."""
    found = run_batch(range(NUM_SAMPLED))
    assert found.failures == {}
    assert found.seen["takeover"] > NUM_SAMPLED
    assert found.seen["request:length"] > NUM_SAMPLED
    assert found.seen["takeover_by_ranks_that_share"] > 0, "no schedule of the sample has shown anything about dcp"
    assert len(found.pairs) > NUM_SAMPLED_PAIRS, (
        "the broker's steps are watched where it calls them: is that still there?"
    )


def finds(invariant: str, *, checks: bool = True) -> bool:
    """Whether some seed breaks the invariant."""
    for seed in range(NUM_SEEDS_TO_FIND):
        if any(each.startswith(invariant) for each in simulate(seed, checks=checks).violations):
            return True
    return False


@pytest.mark.parametrize(
    ("plant", "invariant"),
    [
        pytest.param(plant, invariant, id=name, marks=() if name in _QUICK else pytest.mark.long)
        for name, (plant, invariant) in PLANTS.items()
    ],
)
def test_a_planted_fault_is_found(plant: Plant, invariant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake in a real service breaks its invariant within a few hundred seeds."""
    plant(monkeypatch)
    assert finds(invariant)


def test_a_data_plane_that_lets_stale_writes_in_is_found() -> None:
    """Without the check of generations bytes land in memory that was given back."""
    assert finds("I2", checks=False)


@pytest.mark.long
def test_a_hundred_thousand_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    """The same as the sample, for all of them, in two processes; and all that can be reached was reached. People get the list."""
    total = Campaign()
    for total in run_campaign(range(FIRST_LONG_SEED, FIRST_LONG_SEED + NUM_LONG), jobs=2):
        assert total.failures == {}
    assert total.num_schedules == NUM_LONG
    with capsys.disabled():
        print("", *coverage_lines(total.pairs, total.seen), sep="\n")
    assert owed(NUM_LONG, set(total.pairs)) == []
    assert not_seen(NUM_LONG, total.seen) == []
