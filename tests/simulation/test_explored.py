"""Every order of two handoffs that share a worker: the broker's core, decode's pool and table, and transfers that come late."""

from __future__ import annotations

import dataclasses

import pytest

from common.worker.core.blocks import BlockPool
from contracts.handoff import HandoffState
from contracts.pull import Transfer
from services.broker.core.events import Event, WorkerGone
from services.broker.core.handoff import Handoff
from services.broker.core.ledger import Ledger
from services.broker.core.step import step
from services.broker.core.turn import Outcome, Turn
from tests.simulation.explored_world import Explored, Scenario, World

_PLAIN = dataclasses.asdict(Scenario(num_requests=0, num_ranks=0, num_blocks=0))


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


def one(
    *,
    num_ranks: int = 1,
    may_crash: bool = False,
    may_repeat: bool = False,
    cancels: bool = False,
    expires: bool = False,
) -> Scenario:
    """One request on workers of so many ranks."""
    return Scenario(
        num_requests=1,
        num_ranks=num_ranks,
        num_blocks=1,
        may_crash=may_crash,
        may_repeat=may_repeat,
        cancels=cancels,
        expires=expires,
    )


def two(
    *,
    num_blocks: int,
    num_ranks: int = 1,
    may_crash: bool = False,
    may_repeat: bool = False,
    expires: bool = False,
    checks: bool = True,
) -> Scenario:
    """Two requests on workers of so many ranks, for which there is room or not."""
    return Scenario(
        num_requests=2,
        num_ranks=num_ranks,
        num_blocks=num_blocks,
        may_crash=may_crash,
        may_repeat=may_repeat,
        expires=expires,
        checks=checks,
    )


def told(scenario: Scenario, capsys: pytest.CaptureFixture[str]) -> int:
    """The same; people are told how many, too."""
    found = explore(scenario)
    told_of = {field: value for field, value in dataclasses.asdict(scenario).items() if value != _PLAIN[field]}
    with capsys.disabled():
        print(f"\n    {found:,} worlds of {', '.join(f'{field} {value}' for field, value in told_of.items())}", end=" ")
    return found


@pytest.mark.parametrize(
    ("scenario", "at_least"),
    [
        pytest.param(one(num_ranks=2), 400, id="two ranks"),
        pytest.param(one(cancels=True), 1_200, id="the client leaves"),
        pytest.param(one(expires=True), 1_200, id="its deadline passes"),
        pytest.param(one(may_crash=True), 1_500, id="decode dies"),
        pytest.param(one(may_repeat=True), 1_200, id="something comes twice"),
        pytest.param(two(num_blocks=1), 1_200, id="two want one block"),
        pytest.param(two(num_blocks=2), 7_000, id="two have room"),
        pytest.param(two(num_blocks=1, may_crash=True), 4_000, id="two want one, and it dies"),
        pytest.param(two(num_blocks=1, num_ranks=2), 5_000, id="two of two ranks want one"),
        pytest.param(one(cancels=True, may_crash=True), 4_500, id="both", marks=pytest.mark.long),
        pytest.param(one(may_repeat=True, may_crash=True), 18_000, id="twice and dead", marks=pytest.mark.long),
        pytest.param(one(num_ranks=2, may_repeat=True), 4_000, id="two ranks, twice", marks=pytest.mark.long),
        pytest.param(one(num_ranks=2, may_crash=True), 16_000, id="two ranks die", marks=pytest.mark.long),
        pytest.param(
            two(num_blocks=2, may_crash=True), 11_000, id="two have room, and it dies", marks=pytest.mark.long
        ),
        pytest.param(two(num_blocks=1, may_repeat=True), 50_000, id="two want one, twice", marks=pytest.mark.long),
        pytest.param(two(num_blocks=2, may_repeat=True), 240_000, id="two have room, twice", marks=pytest.mark.long),
        pytest.param(
            two(num_blocks=2, may_crash=True, may_repeat=True),
            280_000,
            id="two have room, twice, and it dies",
            marks=pytest.mark.long,
        ),
        pytest.param(two(num_blocks=2, expires=True), 280_000, id="two have room, one is late", marks=pytest.mark.long),
        pytest.param(two(num_blocks=2, num_ranks=2), 170_000, id="two of two ranks have room", marks=pytest.mark.long),
        pytest.param(
            two(num_blocks=2, num_ranks=2, may_crash=True),
            220_000,
            id="two of two ranks have room, and it dies",
            marks=pytest.mark.long,
        ),
        pytest.param(
            two(num_blocks=1, num_ranks=2, may_crash=True, may_repeat=True),
            500_000,
            id="two of two ranks want one, twice, and it dies",
            marks=pytest.mark.long,
        ),
        pytest.param(
            two(num_blocks=2, num_ranks=2, may_crash=True, may_repeat=True),
            4_000_000,
            id="two of two ranks have room, twice, and it dies",
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_order_ends_well(scenario: Scenario, at_least: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever order things come in: no block has two owners, no bytes land outside their grant, decode begins whole, all ends."""
    assert told(scenario, capsys) > at_least


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(one(may_crash=True), id="decode dies"),
        pytest.param(one(cancels=True), id="the client leaves"),
        pytest.param(one(may_repeat=True), id="something comes twice"),
        pytest.param(one(num_ranks=2), id="two ranks"),
        pytest.param(two(num_blocks=1), id="two want one block"),
    ],
)
def test_fewer_worlds_have_the_same_ends(scenario: Scenario) -> None:
    """What is left out does not matter: of all orders there are more worlds, and no other ends."""
    all_orders = dataclasses.replace(scenario, reduces=False)
    (few, ends), (many, all_ends) = visit(scenario), visit(all_orders)
    assert ends == all_ends
    assert few < many


def test_the_explorer_sees_stale_writes() -> None:
    """A planted fault: without the check of generations, what a request was granted that is over lands in somebody else's memory."""
    scenario = two(num_blocks=1, expires=True, checks=False)
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


@pytest.mark.long
def test_the_explorer_sees_a_quarantine_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: memory is given away while somebody who was let in is still to land."""
    monkeypatch.setattr(BlockPool, "quarantine", BlockPool.release)
    with pytest.raises(AssertionError, match="I2"):
        explore(two(num_blocks=1, expires=True))


def test_the_explorer_sees_a_pool_that_gives_a_block_away_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: who comes second gets what the first one holds."""
    inner = BlockPool._take

    def take(pool: BlockPool, count: int) -> tuple[int, ...]:
        return pool.held[0].block_ids if pool.held else inner(pool, count)

    monkeypatch.setattr(BlockPool, "_take", take)
    with pytest.raises(AssertionError, match="I1"):
        explore(two(num_blocks=2))


def test_the_explorer_sees_a_request_that_goes_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the broker does not care that a worker is gone."""

    def deaf(handoff: Handoff, event: Event) -> Outcome:
        return (handoff, ()) if isinstance(event, WorkerGone) else step(handoff, event)

    monkeypatch.setattr("tests.simulation.explored_life.step", deaf)
    with pytest.raises(AssertionError, match="I5"):
        explore(one(may_crash=True))
