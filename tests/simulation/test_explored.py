"""Every order of two handoffs that share a worker: the broker's core, decode's pool and table, and transfers that come late."""

from __future__ import annotations

import dataclasses

import pytest

from contracts.handoff import HandoffState
from contracts.pull import Transfer
from services.broker.core.ledger import Ledger
from services.broker.core.turn import Turn
from tests.simulation.explored_world import Explored, Scenario, World


def visit(scenario: Scenario) -> tuple[int, set[frozenset[HandoffState]]]:
    """Visit every world that can be reached; returns how many, and how requests have ended together."""
    explored = Explored(scenario)
    first = explored.first().packed  # a number takes a quarter of the memory of what it stands for
    seen, waiting = {first}, [first]
    ends = set()
    while waiting:
        world = World.unpacked(waiting.pop())
        if explored.is_over(world):
            explored.check_end(world)
            ends.add(frozenset(explored.states(world)))
        for after in explored.successors(world):
            number = after.packed
            if number not in seen:
                seen.add(number)
                waiting.append(number)
    return len(seen), ends


def explore(scenario: Scenario) -> int:
    """How many worlds there are; every invariant was looked at in each."""
    return visit(scenario)[0]


def ends_of(scenario: Scenario) -> set[frozenset[HandoffState]]:
    """In which ways all requests can have ended."""
    return visit(scenario)[1]


def one(*, num_ranks: int = 1, may_crash: bool = False, may_repeat: bool = False, cancels: bool = False) -> Scenario:
    """One request on workers of so many ranks."""
    return Scenario(
        num_requests=1,
        num_ranks=num_ranks,
        num_blocks=1,
        may_crash=may_crash,
        may_repeat=may_repeat,
        cancels=cancels,
    )


def two(
    *, num_blocks: int, num_ranks: int = 1, may_crash: bool = False, may_repeat: bool = False, checks: bool = True
) -> Scenario:
    """Two requests on workers of so many ranks, for which there is room or not."""
    return Scenario(
        num_requests=2,
        num_ranks=num_ranks,
        num_blocks=num_blocks,
        may_crash=may_crash,
        may_repeat=may_repeat,
        checks=checks,
    )


@pytest.mark.parametrize(
    ("scenario", "at_least"),
    [
        pytest.param(one(num_ranks=2), 150, id="two ranks"),
        pytest.param(one(cancels=True), 500, id="the client leaves"),
        pytest.param(one(may_crash=True), 1_000, id="decode dies"),
        pytest.param(one(may_repeat=True), 500, id="something comes twice"),
        pytest.param(two(num_blocks=1), 1_000, id="two want one block"),
        pytest.param(two(num_blocks=2), 5_000, id="two have room"),
        pytest.param(two(num_blocks=1, may_crash=True), 4_000, id="two want one, and it dies"),
        pytest.param(two(num_blocks=1, num_ranks=2), 2_000, id="two of two ranks want one"),
        pytest.param(one(cancels=True, may_crash=True), 1_000, id="both", marks=pytest.mark.long),
        pytest.param(one(may_repeat=True, may_crash=True), 1_000, id="twice and dead", marks=pytest.mark.long),
        pytest.param(one(num_ranks=2, may_repeat=True), 2_000, id="two ranks, twice", marks=pytest.mark.long),
        pytest.param(one(num_ranks=2, may_crash=True), 7_000, id="two ranks die", marks=pytest.mark.long),
        pytest.param(two(num_blocks=1, may_repeat=True), 50_000, id="two want one, twice", marks=pytest.mark.long),
        pytest.param(
            two(num_blocks=1, num_ranks=2, may_crash=True, may_repeat=True),
            200_000,
            id="two of two ranks want one, twice, and it dies",
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_order_ends_well(scenario: Scenario, at_least: int) -> None:
    """Whatever order things come in: no block has two owners, no bytes land outside their grant, decode begins whole, all ends."""
    assert explore(scenario) > at_least


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(one(may_crash=True), id="decode dies"),
        pytest.param(one(cancels=True), id="the client leaves"),
        pytest.param(two(num_blocks=1), id="two want one block"),
    ],
)
def test_fewer_worlds_have_the_same_ends(scenario: Scenario) -> None:
    """What is left out does not matter: of all orders there are more worlds, and no other ends."""
    all_orders = dataclasses.replace(scenario, reduces=False)
    assert ends_of(scenario) == ends_of(all_orders)
    assert explore(scenario) < explore(all_orders)


def test_the_explorer_sees_stale_writes() -> None:
    """A planted fault: without the check of generations, what a dead start was granted lands in somebody else's memory."""
    scenario = two(num_blocks=1, may_crash=True, checks=False)
    with pytest.raises(AssertionError, match="I2"):
        explore(scenario)


def test_the_explorer_sees_an_open_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: with a ledger that is always closed decode begins with a part missing."""
    monkeypatch.setattr(Ledger, "closed", property(lambda _ledger: True))
    with pytest.raises(AssertionError, match="I3"):
        explore(one(num_ranks=2))


def test_the_explorer_sees_a_broker_that_prefers_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: one source rank's word is taken for all. What treats ranks as alike must not hide it."""
    monkeypatch.setattr(Ledger, "closed", property(lambda ledger: (Transfer.PUSH, 1) in ledger.closed_sources))
    with pytest.raises(AssertionError, match="are not alike to the broker"):
        explore(one(num_ranks=2))


def test_the_explorer_sees_a_release_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: without releases memory stays where it is."""
    monkeypatch.setattr(Turn, "release", lambda _turn, _role, _reason: None)
    with pytest.raises(AssertionError, match="I6"):
        explore(one(cancels=True))
