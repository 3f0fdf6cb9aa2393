"""The handoff's state machine, explored: every order in which events can come, again and again, and never."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from contracts.handoff import HandoffState, PrefillFinished
from contracts.pull import PullEnded
from contracts.requests import FinishReason
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core import progress, writes
from services.broker.core import pulling as pulls
from services.broker.core.handoff import Handoff
from services.broker.core.ledger import Ledger
from services.broker.core.turn import Turn
from tests.property import broker_model
from tests.property.broker_model import (
    DECODE,
    MIXED,
    PREFILL,
    World,
    anywhere,
    committed,
    explore,
    rival_cancels,
    rival_leads,
    start,
    under_the_lock,
)
from tests.property.broker_offers import (
    honest,
    pull_over,
    pulling,
    pulling_badly,
    refusing,
    short,
    through,
    unasked,
    verifying,
)

CANCEL = ev.CancelRequested(at_ns=0, reason="the client left")
STOPPED = ev.CancelRequested(at_ns=0, reason="a stop string was met", num_tokens=3, finish_reason=FinishReason.STOP)
GONE = (ev.WorkerGone(at_ns=0, worker=PREFILL), ev.WorkerGone(at_ns=0, worker=DECODE))
ALL_ENDS = {HandoffState.FINISHED, HandoffState.CANCELLED, HandoffState.FAILED}


def test_every_order_of_an_honest_handoff_with_cancel() -> None:
    """Duplicates, reordering, loss, cancel and deadline at every point: all invariants hold."""
    found = explore(start(honest, (CANCEL,)), honest, limit=10_000)
    assert found.ends == {HandoffState.FINISHED, HandoffState.CANCELLED}
    assert found.num_worlds > 1_000


def test_every_order_with_a_stop_that_the_router_saw() -> None:
    """The same when the router has all that it wants: finished after the commit, cancelled before; all memory is back."""
    found = explore(start(honest, (STOPPED,)), honest, limit=10_000)
    assert found.ends == {HandoffState.FINISHED, HandoffState.CANCELLED}


def test_every_order_with_refusals_and_lost_workers() -> None:
    """The same with workers that refuse, fail, report nonsense, or die."""
    found = explore(start(refusing, GONE), refusing, limit=10_000)
    assert found.ends == {HandoffState.FINISHED, HandoffState.FAILED}


def test_every_order_with_outages_of_the_bucket() -> None:
    """The same with writes whose outcome is unknown, whether or not they arrived."""
    found = explore(start(unasked, (CANCEL,), outages=True), unasked, outages=True, limit=30_000)
    assert found.ends == ALL_ENDS


@pytest.mark.parametrize("rival", [rival_leads, rival_cancels])
def test_every_order_with_outages_of_the_bucket_and_a_rival(
    rival: Callable[[World], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same while another broker writes, too: an end that was told stays, and nothing is written over a later term."""
    monkeypatch.setattr(broker_model, "_MOST_SILENT", 3)
    found = explore(start(unasked, (CANCEL,), outages=True), unasked, outages=True, rival=rival, limit=10_000)
    assert found.ends == ALL_ENDS


def test_every_order_with_a_rival_that_cancels() -> None:
    """Commit against cancel is a compare-and-set on one key: whoever loses obeys, and no memory stays behind."""
    found = explore(start(unasked, ()), unasked, rival=rival_cancels, limit=20_000)
    assert found.ends == {HandoffState.FINISHED, HandoffState.CANCELLED}


def test_every_order_with_a_broker_of_a_later_term() -> None:
    """One that stood still and wakes finds another one's record: it writes and asks nothing more, and ends nothing."""
    found = explore(start(unasked, (CANCEL,)), unasked, rival=rival_leads, limit=20_000)
    assert found.ends == {HandoffState.FINISHED, HandoffState.CANCELLED}


def test_the_explorer_sees_who_writes_over_a_later_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a deposed broker that takes what it finds for its own goes red."""
    monkeypatch.setattr(
        writes, "_make_way", lambda turn, found, revision: turn.set(stored=found, revision=revision, writing=None)
    )
    with pytest.raises(AssertionError, match="wrote over a later term"):
        explore(start(unasked, ()), unasked, rival=rival_leads, limit=20_000)


def test_every_order_of_a_request_that_ends_with_its_first_token() -> None:
    """No commit, both sides released, and no answer from the broker."""
    worlds = start(short, ())
    found = explore(worlds, short, limit=5_000)
    assert found.ends == {HandoffState.FINISHED}


def test_every_order_of_a_mixed_request() -> None:
    """One worker, no transfer: the same machine holds the same invariants."""
    always = (CANCEL, ev.WorkerGone(at_ns=0, worker=MIXED))
    found = explore(start(refusing, always, mixed=True), refusing, limit=5_000)
    assert found.ends == ALL_ENDS


CRASHES = {HandoffState.RESERVING, HandoffState.PREFILLING, HandoffState.COMMITTED, HandoffState.DECODING}


def test_every_order_of_a_pull_with_cancel() -> None:
    """States are pulled beside what is pushed: lost, late and repeated reports and ends, a cancel and the deadline anywhere."""
    found = explore(start(pulling, (CANCEL,)), pulling, limit=20_000)
    assert found.ends == {HandoffState.FINISHED, HandoffState.CANCELLED}


def test_every_order_of_a_pull_with_refusals_and_lost_workers() -> None:
    """The same with pulls that are refused or fail, parts that move both ways, a source that is not named, and deaths."""
    found = explore(start(pulling_badly, GONE), pulling_badly, limit=40_000)
    assert found.ends == {HandoffState.FINISHED, HandoffState.FAILED}


def test_every_order_around_a_crash_of_the_broker() -> None:
    """Another broker goes on from whatever the bucket holds: in every state the handoff can still finish, by the same rules."""
    found = explore(start(unasked, ()), unasked, crashes=anywhere, limit=40_000)
    assert found.ends == {HandoffState.FINISHED}
    assert {before for before, _ in found.ends_after_crash} >= CRASHES


def test_the_explorer_sees_an_adoption_that_takes_the_commit_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the next broker writes what it had read over the commit that came right after: goes red."""
    monkeypatch.setattr(writes, "_has_changed_hands", lambda _turn, _found: False)
    with pytest.raises(AssertionError, match="took hands back"):
        explore(start(unasked, ()), unasked, crashes=anywhere, limit=40_000)


def test_every_order_around_a_crash_behind_the_commit() -> None:
    """Decode may be through with a request when the next broker asks it to begin: no answer that is whole is called cancelled."""
    found = explore(start(through, ()), through, crashes=committed, limit=40_000)
    ends = {end for before, end in found.ends_after_crash if before is HandoffState.COMMITTED}
    assert ends == {HandoffState.FINISHED}


def test_every_order_around_a_crash_under_the_lock() -> None:
    """The lock goes to the next broker with its number, and no shard is read under two."""
    found = explore(start(pulling, ()), pulling, crashes=under_the_lock, limit=20_000)
    assert found.ends_after_crash == {(HandoffState.PREFILLING, HandoffState.FINISHED)}


@pytest.mark.long
def test_every_order_around_a_crash_in_a_pull() -> None:
    """The same with a crash at every point of the handoff."""
    found = explore(start(pulling, ()), pulling, crashes=anywhere, limit=80_000)
    assert {(state, HandoffState.FINISHED) for state in CRASHES} <= found.ends_after_crash


def test_every_order_around_a_crash_with_digests() -> None:
    """They are in no record: the next broker asks prefill for them, or lets decode answer from its own."""
    found = explore(start(verifying, ()), verifying, crashes=anywhere, limit=40_000)
    assert {(state, HandoffState.FINISHED) for state in CRASHES} <= found.ends_after_crash


def test_the_explorer_sees_a_ledger_that_counts_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: with a ledger that is always closed, the exploration goes red."""
    monkeypatch.setattr(Ledger, "closed", property(lambda _ledger: True))
    with pytest.raises(AssertionError, match="open ledger"):
        explore(start(honest, ()), honest, limit=10_000)


def test_the_explorer_sees_a_release_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: without releases, the exploration goes red."""
    monkeypatch.setattr(Turn, "release", lambda _turn, _role, _reason: None)
    with pytest.raises(AssertionError, match="holds memory"):
        explore(start(honest, (CANCEL,)), honest, limit=10_000)


def test_the_explorer_sees_a_commit_ahead_of_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a commit that does not wait for the bucket goes red."""
    original = progress.prefill_ended

    def hasty(turn: Turn, message: PrefillFinished) -> None:
        original(turn, message)
        if turn.handoff.commit_ready:
            turn.amend(first_token=message.first_token)
            turn.ask_commit()

    monkeypatch.setattr(progress, "prefill_ended", hasty)
    with pytest.raises(AssertionError, match="before the bucket took it"):
        explore(start(honest, ()), honest, limit=10_000)


def test_the_explorer_sees_a_commit_while_decode_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a broker that takes the last report for the end of the pull goes red."""
    monkeypatch.setattr(Handoff, "commit_ready", property(lambda handoff: handoff.ledger_closed and handoff.finished))
    with pytest.raises(AssertionError, match="lock that nobody frees"):
        explore(start(pulling, ()), pulling, limit=20_000)


def test_the_explorer_sees_an_old_end_of_a_pull_that_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing but the end of another pull no handoff finishes; the planted fault: whichever end frees the lock."""

    def only_old(effect: fx.Effect) -> tuple[ev.Event, ...]:
        answers = pulling(effect)
        return (*answers[:-1], pull_over(9)) if isinstance(effect, fx.AskPull) else answers

    assert explore(start(only_old, ()), only_old, limit=20_000).ends == set()
    original = pulls.ended

    def gullible(turn: Turn, message: PullEnded) -> None:
        lock = turn.handoff.record.lock
        original(turn, message if lock is None else msgspec.structs.replace(message, lock=lock.number))

    monkeypatch.setattr(pulls, "ended", gullible)
    assert explore(start(only_old, ()), only_old, limit=20_000).ends == {HandoffState.FINISHED}


def test_the_explorer_sees_an_adoption_that_trusts_the_old_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the next broker takes what it cannot know for done: goes red."""
    monkeypatch.setattr(Handoff, "ledger_closed", property(lambda each: each.ledger is None or each.ledger.closed))
    with pytest.raises(AssertionError, match="committed with an open ledger"):
        explore(start(unasked, ()), unasked, crashes=anywhere, limit=40_000)
