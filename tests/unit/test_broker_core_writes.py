"""The record in the bucket: what is written next, and what follows when a write is lost, taken by another, or unknown."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import HandoffState
from contracts.pull import RequestLock
from contracts.requests import MixedRoute, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff
from services.broker.core.step import begin, step
from tests.unit.broker_steps import (
    DECODE,
    KEY,
    POLICY,
    SECOND,
    Effects,
    finished,
    names_of,
    of,
    record,
    report,
    reserved,
    reserving,
    stored,
    submitted,
)

AWAY = ErrorInfo(code=ErrorCode.BUS_UNAVAILABLE, message="away")


def committing() -> Handoff:
    """A handoff whose COMMITTED record is being written."""
    handoff, _ = stored(reserved(reserving(KEY))[0])
    handoff, _ = finished(handoff)
    handoff, effects = step(handoff, report(KEY))
    (store,) = of(effects, fx.StoreRecord)
    assert (store.record.state, store.last) == (HandoffState.COMMITTED, 2)
    return handoff


def lost(handoff: Handoff, found: object, revision: int = 7) -> tuple[Handoff, Effects]:
    """The write under way loses to what was found."""
    event = ev.RecordConflict(at_ns=5 * SECOND, write=handoff.num_writes, found=found, revision=revision)  # type: ignore[arg-type]  # a record or None
    return step(handoff, event)


def unknown(handoff: Handoff) -> tuple[Handoff, Effects]:
    """Nobody knows what became of the write under way."""
    return step(handoff, ev.RecordUnwritten(at_ns=5 * SECOND, write=handoff.num_writes, error=AWAY))


def test_the_outcome_of_another_write_says_nothing() -> None:
    """Late or made up: the one under way is still waited for."""
    handoff = committing()
    write = handoff.num_writes - 1
    for event in (
        ev.RecordStored(at_ns=5 * SECOND, write=write, revision=9),
        ev.RecordConflict(at_ns=5 * SECOND, write=write, found=None, revision=0),
        ev.RecordUnwritten(at_ns=5 * SECOND, write=write, error=AWAY),
    ):
        assert step(handoff, event) == (handoff, ())
    handoff, _ = stored(handoff)
    for event in (
        ev.RecordStored(at_ns=5 * SECOND, write=handoff.num_writes, revision=9),
        ev.RecordConflict(at_ns=5 * SECOND, write=handoff.num_writes, found=None, revision=0),
        ev.RecordUnwritten(at_ns=5 * SECOND, write=handoff.num_writes, error=AWAY),
    ):
        assert step(handoff, event) == (handoff, ())


def test_a_write_whose_answer_was_lost_has_won_if_it_is_found() -> None:
    """An earlier try got through: decode is asked to commit."""
    handoff = committing()
    handoff, effects = lost(handoff, handoff.writing)
    assert [type(effect) for effect in effects] == [fx.AskCommit]
    assert (handoff.state, handoff.revision, handoff.writing) == (HandoffState.COMMITTED, 7, None)


def test_a_write_that_lost_to_an_older_record_is_made_again_on_top_of_it() -> None:
    """Nobody of a later term, and no end: what is wanted is written behind what was found, or created anew."""
    handoff = committing()
    wanted = handoff.writing
    older = replace(handoff.record, num_tokens=1)
    again, effects = lost(handoff, older)
    assert effects == (fx.StoreRecord(write=handoff.num_writes + 1, record=wanted, last=7),)  # type: ignore[arg-type]  # it is one
    assert again.stored == older
    again, effects = lost(handoff, None, revision=0)
    assert effects == (fx.StoreRecord(write=handoff.num_writes + 1, record=wanted, last=None),)  # type: ignore[arg-type]  # it is one
    assert (again.stored, again.revision) == (None, 0)


def test_a_write_that_lost_to_an_end_obeys_it() -> None:
    """The handoff ends as the record says; nothing more is written."""
    handoff = committing()
    ended = replace(handoff.record, state=HandoffState.CANCELLED, error=AWAY, num_tokens=2)
    handoff, effects = lost(handoff, ended)
    assert (handoff.record, handoff.stored, handoff.revision, handoff.writing) == (ended, ended, 7, None)
    assert not of(effects, fx.StoreRecord)
    assert names_of(effects) == [EventName.REQUEST_CANCELLED]
    assert len(of(effects, fx.AskRelease)) == 2
    (answer,) = of(effects, fx.AnswerRouter)
    assert (answer.frame.index, answer.frame.error) == (2, AWAY)


def test_an_end_that_was_told_stays_whatever_is_found() -> None:
    """The deadline was told while the bucket was away; another end in it is neither told nor overwritten."""
    handoff, _ = step(committing(), ev.DeadlinePassed(at_ns=12 * SECOND))
    told = handoff.record
    assert told.state is HandoffState.FAILED
    handoff, effects = lost(handoff, replace(told, state=HandoffState.CANCELLED))
    assert effects == ()
    assert handoff.record == told == handoff.stored


def test_a_commit_whose_write_is_unknown_is_never_made() -> None:
    """The bucket may say COMMITTED or not: the handoff fails, and its end is written over either."""
    handoff = committing()
    wanted = handoff.writing
    handoff, effects = unknown(handoff)
    assert not of(effects, fx.AskCommit)
    assert handoff.verdict is not None
    assert handoff.verdict.error == AWAY
    (store,) = of(effects, fx.StoreRecord)
    assert (store.record.state, store.record.error, store.last) == (HandoffState.FAILED, AWAY, 2)
    assert handoff.stored == wanted


def test_an_end_whose_write_is_unknown_is_told_all_the_same() -> None:
    """Whoever waits does not wait for the bucket."""
    handoff, _ = stored(reserved(reserving(KEY))[0])
    handoff, _ = step(handoff, ev.CancelRequested(at_ns=5 * SECOND, reason="gone"))
    handoff, effects = unknown(handoff)
    assert handoff.state is HandoffState.CANCELLED
    assert names_of(effects) == [EventName.REQUEST_CANCELLED]
    assert not of(effects, fx.StoreRecord)


GONE = ev.CancelRequested(at_ns=7 * SECOND, reason="gone")


def behind() -> Handoff:
    """A handoff that was cancelled, and whose workers have let go; the bucket could not be told."""
    handoff, _ = stored(reserved(reserving(KEY))[0])
    handoff, _ = unknown(step(handoff, GONE)[0])
    for role in handoff.workers:
        settled = ev.ReleaseSettled(at_ns=6 * SECOND, role=role, acknowledged=True)
        handoff, effects = step(handoff, settled)
    assert (handoff.is_behind, handoff.forgotten, of(effects, fx.Forget)) == (True, True, [fx.Forget()])
    return handoff


def test_an_end_that_is_told_again_is_written_again_until_the_bucket_has_it() -> None:
    """Who repeats it wants the record to say so; once it does, or somebody else has ended it, nothing more is written."""
    handoff, effects = step(behind(), GONE)
    (store,) = of(effects, fx.StoreRecord)
    assert (store.record, store.last, len(effects)) == (handoff.record, handoff.revision, 1)
    assert step(handoff, GONE) == (handoff, ())
    older = replace(handoff.record, state=HandoffState.PREFILLING)
    waiting, effects = lost(handoff, older)
    assert (waiting.is_behind, effects) == (True, ())
    assert [store.last for store in of(step(waiting, GONE)[1], fx.StoreRecord)] == [7]
    for after, _ in (stored(handoff), lost(handoff, replace(handoff.record, state=HandoffState.FAILED))):
        assert after == replace(after, is_behind=False, record=handoff.record)
        assert step(after, GONE) == (after, ())


def test_an_end_that_could_not_be_written_is_not_written_over_a_later_broker() -> None:
    """It goes on with what it found, and is the one to be told: here the end stays as it was, and behind."""
    before = step(behind(), GONE)[0]
    found = replace(record(HandoffState.DECODING), fence=99)
    handoff, effects = lost(before, found)
    assert effects == ()
    assert handoff == replace(before, stored=found, revision=7, writing=None)
    assert handoff.is_behind
    assert step(handoff, GONE) == (handoff, ())


def test_an_ordinary_write_that_is_unknown_changes_nothing_else() -> None:
    """The record of the grant is written behind: the handoff goes on."""
    handoff, _ = reserved(reserving(KEY))
    wanted = handoff.writing
    after, effects = unknown(handoff)
    assert effects == ()
    assert after == replace(handoff, stored=wanted, writing=None, is_behind=True)


def test_a_record_that_was_never_created_fails_once_and_for_all() -> None:
    """It is told in the answer to the submit; the end is taken as written."""
    handoff, effects = unknown(begin(submitted(), POLICY)[0])
    assert (handoff.state, handoff.record.error) == (HandoffState.FAILED, AWAY)
    assert handoff.stored == handoff.record
    assert [type(effect) for effect in effects] == [fx.AnswerSubmit, fx.Publish, fx.Forget]


def test_a_request_that_a_broker_of_an_earlier_term_took_on_goes_on_here() -> None:
    """That one stood still, and wrote its record before this submit came here: nobody else goes on with it."""
    handoff, _ = begin(submitted(), POLICY)
    found = record(HandoffState.PREFILLING, router_incarnation="ir")
    handoff, effects = lost(handoff, found)
    assert effects[0] == fx.AnswerSubmit(error=None)
    assert names_of(effects) == [EventName.HANDOFF_ADOPTED]
    (claim,) = of(effects, fx.StoreRecord)
    assert (claim.record.state, claim.record.fence, claim.last) == (HandoffState.PREFILLING, POLICY.fence, 7)
    handoff, effects = stored(handoff)
    assert effects == (fx.AskPlan(route=found.route),)
    handoff, effects = step(handoff, ev.PlanFound(at_ns=5 * SECOND, planned=(KEY,), block_size=16))
    assert len(of(effects, fx.AskReserve)) == 1


def test_the_locks_of_an_earlier_broker_are_counted_on() -> None:
    """Decode may still read under the lock that it was given there."""
    handoff, _ = begin(submitted(), POLICY)
    lock = RequestLock(number=2, holder=DECODE, taken_at="2030-01-01T00:00:00+00:00")
    handoff, _ = lost(handoff, record(HandoffState.PREFILLING, router_incarnation="ir", lock=lock))
    assert handoff.num_locks == 2


@pytest.mark.parametrize(
    ("submitted_at", "begun_ns"), [("2029-12-31T23:59:55+00:00", -4 * SECOND), ("", SECOND), ("once", SECOND)]
)
def test_the_total_begins_where_an_earlier_broker_took_the_request_on(submitted_at: str, begun_ns: int) -> None:
    """15 s before the deadline, which is at 11 s; where the record does not say, with the submit that came here."""
    handoff, _ = begin(submitted(), POLICY)
    found = record(HandoffState.PREFILLING, router_incarnation="ir", submitted_at=submitted_at)
    handoff, _ = lost(handoff, found)
    assert handoff.begun_ns == begun_ns


def test_a_mixed_worker_may_be_over_with_what_an_earlier_broker_asked_of_it() -> None:
    """It is asked to run once more: that it knows of none is no failure then."""
    route = MixedRoute(mixed=WorkerRef(worker_id="m0", incarnation="im"))
    begun = submitted()
    handoff, _ = begin(replace(begun, submit=replace(begun.submit, route=route), planned=()), POLICY)
    found = record(HandoffState.RESERVING, router_incarnation="ir", route=route)
    handoff, _ = stored(lost(handoff, found)[0])
    cancelled = ErrorInfo(code=ErrorCode.CANCELLED, message="released already")
    handoff, _ = step(handoff, ev.AskRefused(at_ns=6 * SECOND, ask=ev.Ask.RUN, error=cancelled))
    assert handoff.verdict is None


def test_an_end_by_the_deadline_stands_against_what_an_earlier_broker_began() -> None:
    """It was told before the bucket answered: it is written over what was found, and the workers of that let go."""
    handoff, _ = begin(submitted(), POLICY)
    handoff, told = step(handoff, ev.DeadlinePassed(at_ns=12 * SECOND))
    assert names_of(told) == [EventName.REQUEST_FAILED]
    handoff, effects = lost(handoff, record(HandoffState.PREFILLING, router_incarnation="ir"))
    assert {release.role for release in of(effects, fx.AskRelease)} == {WorkerRole.PREFILL, WorkerRole.DECODE}
    (write,) = of(effects, fx.StoreRecord)
    assert (write.record.state, write.last) == (HandoffState.FAILED, 7)
    assert len(effects) == 3
    assert handoff.state is HandoffState.FAILED


@pytest.mark.parametrize("is_same", [True, False])
def test_a_key_that_is_taken_is_yielded_to(is_same: bool) -> None:
    """By the same request: it is accepted already. By another one: it is refused as a duplicate."""
    handoff, _ = begin(submitted(), POLICY)
    found = replace(record(HandoffState.DECODING, router_incarnation="ir"), fence=POLICY.fence)
    if not is_same:
        found = replace(found, request_id="r2")
    handoff, effects = lost(handoff, found)
    error = None if is_same else ErrorInfo(code=ErrorCode.DUPLICATE, message="r1-0 is taken by another request")
    assert effects == (fx.AnswerSubmit(error=error), fx.Forget())
    assert (handoff.record, handoff.writing, handoff.forgotten) == (found, None, True)
    assert (handoff.submit_answered, handoff.router_answered) == (True, True)
