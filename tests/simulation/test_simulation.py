"""Whole meshes from seeds: every invariant holds whatever goes wrong, and a planted fault is found."""

from __future__ import annotations

import pytest

from tests.simulation.campaign import Campaign, run_batch, run_campaign
from tests.simulation.coverage import coverage_lines, not_seen, owed
from tests.simulation.planted_faults import PLANTS, Plant
from tests.simulation.planted_oversights import OVERSIGHTS
from tests.simulation.simulate import simulate

NUM_SAMPLED = 20
NUM_SAMPLED_PAIRS = 60
NUM_LONG = 100_000
FIRST_LONG_SEED = 1_000_000
NUM_SEEDS_TO_FIND = 1_000
_QUICK = {"commit with an open ledger", "return memory twice", "hold for ever"}
_SLOW = {
    "never look over records",
    "ignore deadlines",
    "trust indeterminate releases",
    "never look after quarantine",
}


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


def finding_seed(invariant: str, text: str = "", *, checks: bool = True) -> int | None:
    """The first seed that breaks the invariant, and of which this is said; None where nothing is found."""
    for seed in range(NUM_SEEDS_TO_FIND):
        if any(each.startswith(invariant) and text in each for each in simulate(seed, checks=checks).violations):
            return seed
    return None


def assert_found(plant: Plant, invariant: str, text: str = "") -> None:
    """A planted fault is found, and what finds it finds nothing without it."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        seed = finding_seed(invariant, text)
    assert seed is not None
    assert simulate(seed).violations == []


@pytest.mark.parametrize(
    ("plant", "invariant"),
    [
        pytest.param(plant, invariant, id=name, marks=() if name in _QUICK else pytest.mark.long)
        for name, (plant, invariant) in PLANTS.items()
    ],
)
def test_a_planted_fault_is_found(plant: Plant, invariant: str) -> None:
    """Each mistake in a real service breaks its invariant within a few hundred seeds."""
    assert_found(plant, invariant)


@pytest.mark.parametrize(
    ("plant", "invariant", "text"),
    [
        pytest.param(plant, invariant, text, id=name, marks=pytest.mark.long if name in _SLOW else ())
        for name, (plant, invariant, text) in OVERSIGHTS.items()
    ],
)
def test_each_judge_finds_what_it_is_for(plant: Plant, invariant: str, text: str) -> None:
    """A mistake that no other judge would hear of is found by its own, as what that one says shows."""
    assert_found(plant, invariant, text)


def test_a_data_plane_that_lets_stale_writes_in_is_found() -> None:
    """Without the check of generations bytes land in memory that was given back."""
    seed = finding_seed("I2", checks=False)
    assert seed is not None
    assert simulate(seed).violations == []


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
