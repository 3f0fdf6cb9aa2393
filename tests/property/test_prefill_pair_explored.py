"""Every order of events that a pair of workers can see, against an engine that links what it is told: all states, not samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import pytest
from msgspec.structs import replace

from contracts.links import LinkEventName
from services.prefill.core.pair import MAX_FAILURES, Doing, Pair, Phase, Refusal, Terms, pause_s
from services.prefill.core.pair_events import (
    Connect,
    Connected,
    Disconnect,
    Disconnected,
    Doubted,
    Meet,
    Met,
    OwnDrain,
    PairEffect,
    PairEvent,
    PairRefused,
    PeerLost,
    PeerSeen,
    Tell,
    Tick,
    TryFailed,
)
from services.prefill.core.pair_step import step

Step = Callable[[Pair, PairEvent], tuple[Pair, tuple[PairEffect, ...]]]
Op = Meet | Connect | Disconnect

LONG_S = 1000.0
STARTS = ("a", "b")
TERMS = Terms(topology="tp1 -> tp1", transport="shm", num_parts=1, token_bytes=1, state_bytes=1)
REFUSAL = Refusal(rule="same_model", reason="differs")


class World(msgspec.Struct, frozen=True, kw_only=True):
    """A pair, what is being done for it, the starts that the engine is linked with, and what was told last of the pair's start."""

    now: float = 0.0
    pair: Pair = Pair()
    op: Op | None = None
    links: frozenset[str] = frozenset()
    told: tuple[LinkEventName, str] | None = None

    @property
    def key(self) -> World:
        """The world without what only the clock tells apart."""
        due, later = -1.0, LONG_S / 2
        retry_at = self.pair.retry_at
        pair = replace(
            self.pair,
            num_failures=min(self.pair.num_failures, MAX_FAILURES),
            retry_at=None if retry_at is None else (due if retry_at <= self.now else later),
            linger_until=due if self.pair.linger_until <= self.now else later,
            refusal=None if self.pair.refusal is None else REFUSAL,
        )
        return replace(self, now=0.0, pair=pair)


def outcomes(op: Op, at: float) -> Iterator[PairEvent]:
    """Every way in which it can end."""
    match op:
        case Meet(incarnation=incarnation):
            yield Met(at=at, incarnation=incarnation, terms=TERMS)
        case Connect(incarnation=incarnation):
            yield Connected(at=at, incarnation=incarnation)
        case Disconnect(incarnation=incarnation):
            yield Disconnected(at=at, incarnation=incarnation)
            return
    yield PairRefused(at=at, incarnation=incarnation, refusal=REFUSAL)
    yield TryFailed(at=at, incarnation=incarnation, reason="no answer")


def news(world: World) -> Iterator[PairEvent]:
    """Whatever can happen by itself."""
    at = world.now
    for incarnation in STARTS:
        for is_ready in (True, False):
            yield PeerSeen(at=at, incarnation=incarnation, is_ready=is_ready)
    yield PeerLost(at=at)
    yield OwnDrain(at=at)
    for incarnation in STARTS:
        yield Doubted(at=at, incarnation=incarnation, reason="it did not arrive")
    for num_transfers in (0, 1):
        yield Tick(at=at, num_transfers=num_transfers)
        yield Tick(at=at + LONG_S, num_transfers=num_transfers)


def impostors(world: World) -> Iterator[PairEvent]:
    """The end of what is not being done: late, repeated, or somebody else's."""
    at = world.now
    for incarnation in (*STARTS, ""):
        for op in (
            Meet(incarnation=incarnation),
            Connect(incarnation=incarnation),
            Disconnect(incarnation=incarnation),
        ):
            if world.op is None or world.op.incarnation != incarnation:
                yield from outcomes(op, at)
            elif op != world.op:
                yield from (each for each in outcomes(op, at) if not isinstance(each, PairRefused | TryFailed))


def advance(world: World, event: PairEvent, decide: Step = step) -> World:
    """The world after one event. Raises `AssertionError` for whatever must never be."""
    links = world.links
    op = world.op
    match event:
        case Connected(incarnation=incarnation):
            links |= {incarnation}
            op = None
        case Disconnected(incarnation=incarnation):
            links -= {incarnation}
            op = None
        case Met() | PairRefused() | TryFailed():
            op = None
    pair, effects = decide(world.pair, event)
    told = world.told
    for effect in effects:
        match effect:
            case Tell(event=name, incarnation=incarnation):
                assert incarnation, "nobody is named"
                if name is LinkEventName.UNLINKED:
                    assert told == (LinkEventName.LINKED, incarnation), "unlinked is told of what was not linked"
                else:
                    assert told != (name, incarnation), "the same is told twice"
                told = (name, incarnation)
            case _:
                assert op is None, f"{effect} while {op} is being done"
                op = effect
        if isinstance(effect, Connect):
            assert not links, "two engine links at once"
            assert effect.incarnation == pair.wanted, "somebody is connected who is not wanted"
    told = None if pair.phase in {Phase.GONE, Phase.MEETING} else told  # a new meeting has its own news
    after = World(now=event.at, pair=pair, op=op, links=links, told=told)
    check(after)
    return after


def check(world: World) -> None:
    """What holds in every state."""
    pair = world.pair
    assert (world.op is None) == (pair.doing is Doing.NOTHING)
    assert len(world.links) <= 1
    if pair.phase is Phase.LINKED:
        assert world.links == {pair.incarnation}
        assert pair.incarnation == pair.alive == pair.wanted, "linked with a start that is not wanted"
    if pair.phase in {Phase.MEETING, Phase.REFUSED, Phase.GONE}:
        assert not world.links, f"{pair.phase}, and the engine is linked"
    if pair.may_transfer:
        assert pair.incarnation in world.links
    if pair.phase is Phase.GONE:
        assert (pair.incarnation, pair.wanted) == ("", ""), "somebody is wanted, and nothing is done about it"
    if pair.is_forgotten:
        assert pair == Pair(is_closed=pair.is_closed)


def settle(world: World, choose: Callable[[Op, float], PairEvent], decide: Step = step) -> World:
    """Let everything that is under way end, and time pass, until nothing moves any more."""
    for _ in range(6 * MAX_FAILURES):
        if world.op is not None:
            event = choose(world.op, world.now)
        elif world.pair.phase is Phase.UNLINKING or world.pair.phase is Phase.MEETING:
            event = Tick(at=world.now + LONG_S, num_transfers=0)
        else:
            return world
        world = advance(world, event, decide)
    raise AssertionError(f"it does not come to an end: {world}")


def explore(decide: Step = step) -> int:
    """Visit every state that can be reached; returns how many there are."""
    start = World()
    seen = {start.key}
    waiting = deque([start])
    while waiting:
        world = waiting.popleft()
        for impostor in impostors(world):
            assert decide(world.pair, impostor) == (world.pair, ()), f"{impostor} changed something"
        well = settle(world, lambda op, at: next(outcomes(op, at)), decide)
        wanted = world.pair.wanted
        assert well.pair.phase in ({Phase.LINKED, Phase.REFUSED} if wanted else {Phase.GONE})
        refused = settle(world, lambda op, at: [*outcomes(op, at)][:2][-1], decide)
        assert refused.pair.phase in ({Phase.LINKED, Phase.REFUSED} if wanted else {Phase.GONE})
        failed = settle(world, lambda op, at: [*outcomes(op, at)][-1], decide)
        assert failed.pair.phase in ({Phase.LINKED, Phase.REFUSED} if wanted else {Phase.GONE})
        events = [*news(world), *(outcomes(world.op, world.now) if world.op else ())]
        for event in events:
            after = advance(world, event, decide)
            if after.key not in seen:
                seen.add(after.key)
                waiting.append(after)
    return len(seen)


def test_no_order_of_events_breaks_a_link() -> None:
    """Never two engine links at once, never linked with a stale start, and whatever happened ends as gone, linked or refused."""
    assert explore() > 400


def _meets_while_busy(pair: Pair, event: PairEvent) -> tuple[Pair, tuple[PairEffect, ...]]:
    """Fault: a restart is met at once, whatever is under way."""
    if isinstance(event, PeerSeen) and event.is_ready and event.incarnation != pair.incarnation:
        changed = replace(
            pair, alive=event.incarnation, is_ready=True, incarnation=event.incarnation, doing=Doing.MEETING
        )
        return changed, (Meet(incarnation=event.incarnation),)
    return step(pair, event)


def _keeps_the_dead(pair: Pair, event: PairEvent) -> tuple[Pair, tuple[PairEffect, ...]]:
    """Fault: a link outlives its peer."""
    if isinstance(event, PeerLost) and pair.phase is Phase.LINKED:
        return replace(pair, alive="", is_ready=False), ()
    return step(pair, event)


def _forgets_to_retry(pair: Pair, event: PairEvent) -> tuple[Pair, tuple[PairEffect, ...]]:
    """Fault: a try that failed is never repeated."""
    pair, effects = step(pair, event)
    return (replace(pair, retry_at=None), effects) if isinstance(event, TryFailed) else (pair, effects)


def _meets_in_doubt(pair: Pair, event: PairEvent) -> tuple[Pair, tuple[PairEffect, ...]]:
    """Fault: a link that is doubted is met again before it is undone."""
    if isinstance(event, Doubted) and pair.phase is Phase.LINKED and pair.doing is Doing.NOTHING:
        return replace(pair, phase=Phase.MEETING, doing=Doing.MEETING), (Meet(incarnation=pair.incarnation),)
    return step(pair, event)


def _takes_any_outcome(pair: Pair, event: PairEvent) -> tuple[Pair, tuple[PairEffect, ...]]:
    """Fault: whoever says that something has connected is believed."""
    if isinstance(event, Connected):
        return replace(pair, phase=Phase.LINKED, doing=Doing.NOTHING), ()
    return step(pair, event)


@pytest.mark.parametrize(
    "fault", [_meets_while_busy, _keeps_the_dead, _forgets_to_retry, _meets_in_doubt, _takes_any_outcome]
)
def test_the_exploration_finds_planted_faults(fault: Step) -> None:
    """The check can fail: each fault is found."""
    with pytest.raises(AssertionError):
        explore(fault)


def test_a_peer_that_cannot_be_reached_is_refused_by_name_and_tried_on() -> None:
    """Pauses double up to a bound; after some failures the pair is refused, once; when the peer answers, it is linked."""
    world = advance(World(), PeerSeen(at=0.0, incarnation="a", is_ready=True))
    pauses = []
    for _ in range(MAX_FAILURES + 4):
        world = advance(world, TryFailed(at=world.now, incarnation="a", reason="no answer"))
        assert world.pair.retry_at is not None
        pauses.append(world.pair.retry_at - world.now)
        early = advance(world, Tick(at=world.pair.retry_at - 0.01, num_transfers=0))
        assert early.op is None
        world = advance(world, Tick(at=world.pair.retry_at, num_transfers=0))
        assert world.op == Meet(incarnation="a")
        assert world.pair.phase is (Phase.REFUSED if len(pauses) >= MAX_FAILURES else Phase.MEETING)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0] == [pause_s(n + 1) for n in range(len(pauses))]
    assert world.pair.refusal is not None
    assert world.pair.refusal.rule == "reachable"
    assert "the last one: no answer" in world.pair.refusal.reason
    linked = settle(world, lambda op, at: next(outcomes(op, at)))
    assert (linked.pair.phase, linked.pair.refusal, linked.pair.num_failures) == (Phase.LINKED, None, 0)


def test_a_draining_peer_keeps_its_link_until_its_transfers_have_ended() -> None:
    """Grants that were given before the drain are still good, and on their way for a moment; a dead peer gets no such time."""
    world = settle(
        advance(World(), PeerSeen(at=0.0, incarnation="a", is_ready=True)), lambda op, at: next(outcomes(op, at))
    )
    draining = advance(world, PeerSeen(at=10.0, incarnation="a", is_ready=False))
    assert (draining.pair.phase, draining.op, draining.pair.may_transfer) == (Phase.UNLINKING, None, True)
    assert advance(draining, Tick(at=10.5, num_transfers=0)).op is None
    assert advance(draining, Tick(at=LONG_S, num_transfers=1)).op is None
    assert advance(draining, Tick(at=11.0, num_transfers=0)).op == Disconnect(incarnation="a")
    dead = advance(draining, PeerLost(at=10.1))
    assert (dead.op, dead.pair.may_transfer) == (Disconnect(incarnation="a"), False)
    own = advance(world, OwnDrain(at=10.0))
    assert advance(own, Tick(at=10.0, num_transfers=1)).op is None
    assert advance(own, Tick(at=10.0, num_transfers=0)).op == Disconnect(incarnation="a")
