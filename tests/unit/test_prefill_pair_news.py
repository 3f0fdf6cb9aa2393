"""What is told of a pair of workers, word for word: who was linked, refused or unlinked, on what terms, and why."""

from __future__ import annotations

import pytest

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

TERMS = Terms(topology="tp2 -> tp1", transport="shm", num_parts=12, token_bytes=64, state_bytes=4096)
REFUSAL = Refusal(rule="same_model", reason="other weights")
LINKED = Pair(
    phase=Phase.LINKED,
    incarnation="a",
    alive="a",
    is_ready=True,
    was_linked=True,
    terms=TERMS,
)


def run(pair: Pair, *events: PairEvent) -> tuple[Pair, tuple[PairEffect, ...]]:
    """The pair after these events, and what the last one asked for."""
    effects: tuple[PairEffect, ...] = ()
    for event in events:
        pair, effects = step(pair, event)
    return pair, effects


def test_a_meeting_that_goes_well_is_told_with_its_terms() -> None:
    """Met, connected, linked: one thing after the other."""
    pair, effects = run(Pair(), PeerSeen(at=0.0, incarnation="a", is_ready=True))
    assert effects == (Meet(incarnation="a"),)
    pair, effects = run(pair, Met(at=1.0, incarnation="a", terms=TERMS))
    assert effects == (Connect(incarnation="a"),)
    pair, effects = run(pair, Connected(at=2.0, incarnation="a"))
    assert effects == (Tell(event=LinkEventName.LINKED, incarnation="a", terms=TERMS),)
    assert pair == LINKED


def test_a_refusal_is_told_once_with_its_rule_and_is_not_tried_again() -> None:
    """At the meeting there are no terms yet; the engine refuses what has terms."""
    meeting, _ = run(Pair(), PeerSeen(at=0.0, incarnation="a", is_ready=True))
    refused, effects = run(meeting, PairRefused(at=1.0, incarnation="a", refusal=REFUSAL))
    assert effects == (Tell(event=LinkEventName.LINK_REFUSED, incarnation="a", refusal=REFUSAL),)
    assert (refused.phase, refused.refusal, refused.retry_at, refused.doing) == (
        Phase.REFUSED,
        REFUSAL,
        None,
        Doing.NOTHING,
    )
    assert run(refused, Tick(at=1e6, num_transfers=0)) == (refused, ())
    _, effects = run(
        meeting,
        Met(at=1.0, incarnation="a", terms=TERMS),
        PairRefused(at=2.0, incarnation="a", refusal=REFUSAL),
    )
    assert effects == (Tell(event=LinkEventName.LINK_REFUSED, incarnation="a", terms=TERMS, refusal=REFUSAL),)


def test_a_try_that_fails_leaves_its_reason_and_enough_of_them_are_a_refusal() -> None:
    """The reason stands in the record from the first try on; the refusal says how often it was tried, and that it goes on."""
    pair, _ = run(Pair(), PeerSeen(at=0.0, incarnation="a", is_ready=True))
    pair, effects = run(pair, TryFailed(at=5.0, incarnation="a", reason="no answer"))
    assert effects == ()
    assert (pair.num_failures, pair.retry_at) == (1, 6.0)
    assert pair.refusal == Refusal(rule="", reason="no answer")
    for num_failures in range(2, MAX_FAILURES + 1):
        assert pair.retry_at is not None
        pair, effects = run(
            pair,
            Tick(at=pair.retry_at, num_transfers=0),
            TryFailed(at=pair.retry_at, incarnation="a", reason="silence"),
        )
        assert (pair.num_failures, pair.phase is Phase.REFUSED) == (num_failures, num_failures == MAX_FAILURES)
    told = "5 tries failed, the last one: silence (rule reachable: mend that, it is tried again)"
    refusal = Refusal(rule="reachable", reason=told)
    assert effects == (Tell(event=LinkEventName.LINK_REFUSED, incarnation="a", refusal=refusal),)
    assert pair.refusal == refusal
    assert pair.retry_at is not None
    pair, effects = run(
        pair, Tick(at=pair.retry_at, num_transfers=0), TryFailed(at=pair.retry_at, incarnation="a", reason="silence")
    )
    assert (pair.phase, effects) == (Phase.REFUSED, ())


def test_a_refusal_after_failed_tries_ends_the_tries() -> None:
    """Whoever can never be linked is not asked again and again."""
    pair, _ = run(
        Pair(),
        PeerSeen(at=0.0, incarnation="a", is_ready=True),
        TryFailed(at=0.0, incarnation="a", reason="no answer"),
        Tick(at=1.0, num_transfers=0),
        PairRefused(at=1.0, incarnation="a", refusal=REFUSAL),
    )
    assert (pair.phase, pair.retry_at) == (Phase.REFUSED, None)
    assert run(pair, Tick(at=1e6, num_transfers=0))[1] == ()


def test_nothing_is_told_of_the_end_of_what_was_not_linked() -> None:
    """A peer that is not wanted any more while it is met, or is refused, leaves without a word."""
    pair, _ = run(Pair(), PeerSeen(at=0.0, incarnation="a", is_ready=True), PeerLost(at=0.5))
    for end in (
        Met(at=1.0, incarnation="a", terms=TERMS),
        PairRefused(at=1.0, incarnation="a", refusal=REFUSAL),
        TryFailed(at=1.0, incarnation="a", reason="no answer"),
    ):
        assert run(pair, end) == (Pair(), ())


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ((PeerLost(at=10.0),), "the decode worker is gone"),
        ((PeerSeen(at=10.0, incarnation="b", is_ready=True),), "the decode worker has restarted"),
        (
            (PeerSeen(at=10.0, incarnation="a", is_ready=False), Tick(at=11.0, num_transfers=0)),
            "the decode worker drains",
        ),
        ((OwnDrain(at=10.0), Tick(at=10.0, num_transfers=0)), "the prefill worker drains"),
    ],
)
def test_the_end_of_a_link_says_why(events: tuple[PairEvent, ...], reason: str) -> None:
    """The engine forgets the peer first; then it is told, with the terms that the link had."""
    pair, effects = run(LINKED, *events)
    assert effects == (Disconnect(incarnation="a"),)
    assert (pair.phase, pair.doing, pair.may_transfer) == (Phase.UNLINKING, Doing.DISCONNECTING, False)
    left, effects = run(pair, Disconnected(at=12.0, incarnation="a"))
    tell = Tell(event=LinkEventName.UNLINKED, incarnation="a", terms=TERMS, reason=reason)
    assert effects[0] == tell
    is_met_anew = reason == "the decode worker has restarted"
    assert effects[1:] == ((Meet(incarnation="b"),) if is_met_anew else ())
    expected = Pair(alive=pair.alive, is_ready=pair.is_ready, is_closed=pair.is_closed)
    if is_met_anew:
        expected = Pair(phase=Phase.MEETING, incarnation="b", doing=Doing.MEETING, alive="b", is_ready=True)
    assert left == expected


def test_a_link_that_is_doubted_is_undone_at_once_and_met_again() -> None:
    """Nothing can be written to it from then on, however many transfers there are: they fail now, and not each at its time."""
    assert run(LINKED, Doubted(at=9.0, incarnation="b", reason="another start")) == (LINKED, ())
    pair, effects = run(LINKED, Doubted(at=10.0, incarnation="a", reason="silent"))
    assert effects == (Disconnect(incarnation="a"),)
    assert (pair.phase, pair.doing, pair.may_transfer) == (Phase.UNLINKING, Doing.DISCONNECTING, False)
    assert run(pair, Doubted(at=10.5, incarnation="a", reason="again"), Tick(at=11.0, num_transfers=3)) == (pair, ())
    again, effects = run(pair, Disconnected(at=12.0, incarnation="a"))
    tell = Tell(event=LinkEventName.UNLINKED, incarnation="a", terms=TERMS, reason="silent")
    assert effects == (tell, Meet(incarnation="a"))
    assert again == Pair(phase=Phase.MEETING, incarnation="a", doing=Doing.MEETING, alive="a", is_ready=True)


def test_who_is_doubted_and_gone_as_well_is_gone() -> None:
    """The better reason is told, and nobody is met."""
    pair, effects = run(LINKED, Doubted(at=10.0, incarnation="a", reason="silent"), PeerLost(at=10.5))
    assert effects == ()
    _, effects = run(pair, Disconnected(at=12.0, incarnation="a"))
    tell = Tell(event=LinkEventName.UNLINKED, incarnation="a", terms=TERMS, reason="the decode worker is gone")
    assert effects == (tell,)


def test_a_link_that_nobody_wants_as_it_comes_up_is_never_told() -> None:
    """It was not told as linked, so its end is not told either, and it need not linger."""
    pair, _ = run(
        Pair(),
        PeerSeen(at=0.0, incarnation="a", is_ready=True),
        Met(at=1.0, incarnation="a", terms=TERMS),
        PeerSeen(at=1.5, incarnation="a", is_ready=False),
    )
    pair, effects = run(pair, Connected(at=2.0, incarnation="a"))
    assert (effects, pair.was_linked) == ((Disconnect(incarnation="a"),), False)
    pair, effects = run(pair, Disconnected(at=3.0, incarnation="a"))
    assert (pair, effects) == (Pair(alive="a"), ())


def test_pauses_stay_within_a_bound_however_often_it_failed() -> None:
    """Twice as long each time, up to 30 s; so many failures that a power of two would not fit in a float are no error."""
    assert [pause_s(n) for n in (1, 2, 5, 6, 100, 5000)] == [1.0, 2.0, 16.0, 30.0, 30.0, 30.0]
