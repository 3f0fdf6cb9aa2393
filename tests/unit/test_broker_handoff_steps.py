"""Single steps of a handoff, where the exact messages matter."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import (
    Grant,
    HandoffState,
    PartsReport,
    PrefillFinished,
    RequestEnded,
    RunPrefill,
    TakenOver,
)
from contracts.requests import FinishReason, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff
from services.broker.core.step import begin, step
from tests.unit.broker_steps import (
    GRANT,
    KEY,
    POLICY,
    SECOND,
    adopted,
    finished,
    report,
    reserved,
    reserving,
    stored,
    submitted,
)


def test_the_record_comes_before_anybody_is_asked() -> None:
    """A submit writes RESERVING with create, and asks nobody yet."""
    _, effects = begin(submitted(), POLICY)
    (store,) = effects
    assert isinstance(store, fx.StoreRecord)
    assert (store.last, store.record.state, store.record.fence) == (None, HandoffState.RESERVING, 4)


def test_prefill_is_asked_with_the_grant_and_the_time_that_is_left() -> None:
    """What decode granted and has cached already goes to prefill; the record follows behind."""
    handoff, effects = reserved(reserving())
    (run,) = [effect.message for effect in effects if isinstance(effect, fx.AskRun)]
    assert isinstance(run, RunPrefill)
    assert (run.grant, run.num_cached_tokens, run.fence, run.timeout_ms) == (GRANT, 16, 4, 8_000)
    (store,) = [effect for effect in effects if isinstance(effect, fx.StoreRecord)]
    assert (store.last, store.record.state, store.record.grant) == (1, HandoffState.PREFILLING, GRANT)
    assert handoff.told == {WorkerRole.PREFILL, WorkerRole.DECODE}


def test_a_grants_secret_goes_to_prefill_and_nowhere_else() -> None:
    """The bucket and the events, which everybody may read, hold no part of it, nor does a grant's own text; it is written once."""
    secret = "feedfacefeedfacefeedfacefeedface"
    handoff, effects = reserved(reserving(), grant=msgspec.structs.replace(GRANT, secret=secret))
    (run,) = [effect.message for effect in effects if isinstance(effect, fx.AskRun)]
    assert isinstance(run, RunPrefill)
    assert run.grant.secret == secret
    others = [effect for effect in effects if not isinstance(effect, fx.AskRun)]
    (store,) = [effect for effect in others if isinstance(effect, fx.StoreRecord)]
    assert store.record.grant == GRANT
    assert not any(b"feedface" in msgspec.msgpack.encode(effect) for effect in others)
    assert "feedface" not in repr(run)
    handoff, effects = step(handoff, ev.RecordStored(at_ns=3 * SECOND, write=2, revision=2))
    assert not any(isinstance(effect, fx.StoreRecord) for effect in effects)
    assert handoff.record.grant is not None
    assert handoff.record.grant.secret == secret


@pytest.mark.parametrize(
    ("grant", "cached", "text"),
    [
        (Grant(worker_id="d0", incarnation="old", generation=3, block_ids=(0,), slot=1), 0, "the grant is for d0 old"),
        (GRANT, 41, "num_cached_tokens: 41"),
        (GRANT, -1, "num_cached_tokens: -1"),
    ],
)
def test_an_answer_that_cannot_be_fails_the_handoff(grant: Grant, cached: int, text: str) -> None:
    """A grant of another start, or more cached tokens than there are: prefill is never asked."""
    handoff, effects = reserved(reserving(), grant=grant, cached=cached)
    assert not any(isinstance(effect, fx.AskRun) for effect in effects)
    assert handoff.verdict is not None
    assert handoff.verdict.error is not None
    assert handoff.verdict.error.code is ErrorCode.PROTOCOL
    assert text in handoff.verdict.error.message


def test_messages_of_another_start_change_nothing() -> None:
    """A worker's earlier incarnation may still speak: its word is not heard."""
    handoff, _ = reserved(reserving())
    old: dict[str, Any] = {"handoff_id": "r1-0", "incarnation": "old"}
    done = PrefillFinished(**old, first_token=5)
    over = TakenOver(**old, prepare_ms=0, enqueue_ms=0, total_ms=0, first_step_ns=0)
    ended = RequestEnded(**old, num_tokens=1)
    report = PartsReport(**old, source_rank=0, revision=1, parts=(), num_bytes=0, push_ms=0)
    for event in (
        ev.PrefillEnded(at_ns=4 * SECOND, message=done),
        ev.DecodeTookOver(at_ns=4 * SECOND, message=over),
        ev.WorkerEnded(at_ns=4 * SECOND, message=ended),
        ev.PartsReported(at_ns=4 * SECOND, report=report),
        ev.WorkerGone(at_ns=4 * SECOND, worker=WorkerRef(worker_id="d0", incarnation="old")),
    ):
        assert step(handoff, event) == (handoff, ())


def test_a_release_stands_for_the_rest_of_the_deadline() -> None:
    """Its tombstone outlives every message that may still be under way."""
    handoff = reserving()
    handoff, _ = step(handoff, ev.CancelRequested(at_ns=5 * SECOND, reason="gone"))
    _, effects = step(handoff, ev.RecordStored(at_ns=5 * SECOND, write=2, revision=2))
    releases = [effect for effect in effects if isinstance(effect, fx.AskRelease)]
    assert [release.role for release in releases] == [WorkerRole.DECODE, WorkerRole.PREFILL]
    assert {release.message.tombstone_ms for release in releases} == {6_000 + 2_000}


def test_the_end_of_a_router_cancels_what_it_asked_for() -> None:
    """Memory comes back without waiting for the deadline; told twice, nothing more follows."""
    handoff, _ = reserved(reserving())
    gone = ev.RouterGone(at_ns=5 * SECOND, router_id="router-0", incarnation="ir")
    handoff, effects = step(handoff, gone)
    assert sum(isinstance(effect, fx.HintCancel) for effect in effects) == 2
    assert step(handoff, gone) == (handoff, ())
    handoff, _ = step(handoff, ev.RecordStored(at_ns=5 * SECOND, write=2, revision=2))  # the grant
    handoff, effects = step(handoff, ev.RecordStored(at_ns=5 * SECOND, write=3, revision=3))
    assert handoff.state is HandoffState.CANCELLED
    assert sum(isinstance(effect, fx.AskRelease) for effect in effects) == 2
    assert handoff.record.error is not None
    assert handoff.record.error.message == "router router-0 (ir) is gone"


@pytest.mark.parametrize(
    ("mine", "gone"), [("ir", ("router-0", "old")), ("ir", ("router-1", "ir")), (None, ("router-0", "ir"))]
)
def test_another_routers_end_is_nobodys_business(mine: str | None, gone: tuple[str, str]) -> None:
    """An earlier start of the same router, another router, or a router that named no start: nothing changes."""
    handoff, _ = reserved(reserving(router_incarnation=mine))
    event = ev.RouterGone(at_ns=5 * SECOND, router_id=gone[0], incarnation=gone[1])
    assert step(handoff, event) == (handoff, ())


def test_delivered_tokens_are_told_to_both_and_count_in_the_end() -> None:
    """Both workers count from there, and a failure does not say that fewer tokens exist than the client has."""
    handoff, _ = begin(submitted(delivered=7), POLICY)
    handoff, effects = step(handoff, ev.RecordStored(at_ns=SECOND, write=1, revision=1))
    (reserve,) = [effect.message for effect in effects if isinstance(effect, fx.AskReserve)]
    handoff, effects = reserved(handoff)
    (run,) = [effect.message for effect in effects if isinstance(effect, fx.AskRun)]
    assert (reserve.num_delivered_tokens, run.num_delivered_tokens) == (7, 7)
    _, effects = step(handoff, ev.DeadlinePassed(at_ns=12 * SECOND))
    (answer,) = [effect for effect in effects if isinstance(effect, fx.AnswerRouter)]
    assert (answer.frame.index, answer.frame.num_tokens) == (7, 7)


def test_a_first_token_that_ends_a_redispatched_request_is_the_next_one() -> None:
    """It counts behind those that were delivered."""
    handoff, _ = reserved(reserving(delivered=7))
    done = PrefillFinished(handoff_id="r1-0", incarnation="ip", first_token=5, finish_reason=FinishReason.STOP)
    handoff, _ = step(handoff, ev.PrefillEnded(at_ns=4 * SECOND, message=done))
    assert handoff.verdict is not None
    assert handoff.verdict.num_tokens == 8


def test_a_push_that_fails_behind_the_first_token_fails_the_handoff() -> None:
    """The last pushes outlast the computing: their failure is heard although prefill has finished; a repeated end is not."""
    handoff, _ = reserved(reserving())
    done = PrefillFinished(handoff_id="r1-0", incarnation="ip", first_token=5)
    finished, _ = step(handoff, ev.PrefillEnded(at_ns=4 * SECOND, message=done))
    again, _ = step(finished, ev.PrefillEnded(at_ns=5 * SECOND, message=done))
    assert again.verdict is None
    error = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message="rank 1 could not push")
    late = PrefillFinished(handoff_id="r1-0", incarnation="ip", error=error)
    failed, _ = step(finished, ev.PrefillEnded(at_ns=5 * SECOND, message=late))
    assert failed.verdict is not None
    assert failed.verdict.state is HandoffState.FAILED
    assert failed.verdict.error == error


def test_a_refused_reserve_releases_prefill_which_holds_the_prompt() -> None:
    """The router sent it there before it asked here; nobody else would tell that worker that it is not wanted."""
    error = ErrorInfo(code=ErrorCode.OVERLOADED, message="no slot is free")
    handoff, _ = step(reserving(), ev.AskRefused(at_ns=SECOND, ask=ev.Ask.RESERVE, error=error))
    _, effects = step(handoff, ev.RecordStored(at_ns=SECOND, write=2, revision=2))
    assert WorkerRole.PREFILL in {effect.role for effect in effects if isinstance(effect, fx.AskRelease)}


@pytest.mark.parametrize("ask", [ev.Ask.RESERVE, ev.Ask.RUN])
def test_what_a_worker_refuses_as_cancelled_ends_as_cancelled(ask: ev.Ask) -> None:
    """A client has left, and the router's hint came to the worker before its cancel came to the broker: nothing has failed."""
    error = ErrorInfo(code=ErrorCode.CANCELLED, message="released already")
    handoff = reserving() if ask is ev.Ask.RESERVE else reserved(reserving())[0]
    handoff, _ = step(handoff, ev.AskRefused(at_ns=SECOND, ask=ask, error=error))
    assert handoff.verdict is not None
    assert handoff.verdict.state is HandoffState.CANCELLED


def committing() -> Handoff:
    """Decode has been asked to commit, and has not answered."""
    handoff, _ = reserved(reserving(KEY))
    handoff, _ = finished(handoff)
    handoff, _ = step(handoff, report(KEY))
    while handoff.writing is not None:
        handoff, _ = stored(handoff)
    assert handoff.commit_asked
    return handoff


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_commit_that_is_refused_as_cancelled_is_not_the_end(is_adopted: bool) -> None:
    """Decode may have been through with it, and its answer may have been lost: the word with which it ended is still on its way."""
    handoff = adopted(HandoffState.COMMITTED)[0] if is_adopted else committing()
    error = ErrorInfo(code=ErrorCode.CANCELLED, message="released already")
    after, effects = step(handoff, ev.AskRefused(at_ns=5 * SECOND, ask=ev.Ask.COMMIT, error=error))
    assert (after, effects) == (handoff, ())
    end = RequestEnded(handoff_id="r1-0", incarnation="id", num_tokens=8, finish_reason=FinishReason.LENGTH)
    over, _ = step(after, ev.WorkerEnded(at_ns=6 * SECOND, message=end))
    assert over.verdict is not None
    assert (over.verdict.state, over.verdict.num_tokens) == (HandoffState.FINISHED, 8)
    late, _ = step(after, ev.DeadlinePassed(at_ns=12 * SECOND))
    assert (late.record.state, late.record.error is None) == (HandoffState.FAILED, False)


@pytest.mark.parametrize("code", [ErrorCode.WORKER_LOST, ErrorCode.INCARNATION_CHANGED, ErrorCode.UNKNOWN_HANDOFF])
def test_a_commit_that_is_refused_otherwise_is(code: ErrorCode) -> None:
    """Nothing will come of it: the router hears why."""
    error = ErrorInfo(code=code, message="no")
    after, _ = step(committing(), ev.AskRefused(at_ns=5 * SECOND, ask=ev.Ask.COMMIT, error=error))
    assert after.verdict is not None
    assert (after.verdict.state, after.verdict.error) == (HandoffState.FAILED, error)


def test_an_acceptance_after_the_end_is_answered_by_a_release() -> None:
    """A reserve that was slow may have taken memory after the release was obeyed."""
    handoff = reserving()
    handoff, _ = step(handoff, ev.DeadlinePassed(at_ns=12 * SECOND))
    after, effects = reserved(handoff)
    assert after == handoff
    (again,) = effects
    assert isinstance(again, fx.AskRelease)


def test_the_deadline_does_not_wait_for_the_bucket() -> None:
    """With a write under way for ever, the deadline still ends everything; what the bucket answers later is caught up with."""
    handoff, _ = reserved(reserving())
    handoff, effects = step(handoff, ev.DeadlinePassed(at_ns=12 * SECOND))
    kinds = [type(effect) for effect in effects]
    assert kinds.count(fx.AskRelease) == 2
    assert kinds.count(fx.AnswerRouter) == 1
    assert handoff.state is HandoffState.FAILED
    _, effects = step(handoff, ev.RecordStored(at_ns=13 * SECOND, write=2, revision=2))
    (store,) = effects
    assert isinstance(store, fx.StoreRecord)
    assert (store.last, store.record.state) == (2, HandoffState.FAILED)


def test_a_record_that_cannot_be_created_refuses_the_submit() -> None:
    """Nobody was told, so nobody is released, and the router hears it in the answer, not in a frame."""
    handoff, _ = begin(submitted(), POLICY)
    error = ErrorInfo(code=ErrorCode.BUS_UNAVAILABLE, message="away")
    handoff, effects = step(handoff, ev.RecordUnwritten(at_ns=SECOND, write=1, error=error))
    assert [effect for effect in effects if isinstance(effect, fx.AnswerSubmit)] == [fx.AnswerSubmit(error=error)]
    assert not any(isinstance(effect, fx.AskRelease | fx.AnswerRouter) for effect in effects)
    assert handoff.forgotten


def test_a_broker_that_finds_the_record_of_a_later_term_makes_way() -> None:
    """It stood still, and another one went on: nothing is written, asked, released or told any more, whatever comes."""
    handoff, _ = reserved(reserving())
    later = msgspec.structs.replace(handoff.record, fence=5)
    handoff, effects = step(handoff, ev.RecordConflict(at_ns=4 * SECOND, write=2, found=later, revision=7))
    assert effects == (fx.Forget(),)
    assert (handoff.record, handoff.forgotten) == (later, True)
    for event in (
        ev.DeadlinePassed(at_ns=12 * SECOND),
        ev.CancelRequested(at_ns=5 * SECOND, reason="gone"),
        ev.RunAccepted(at_ns=5 * SECOND, rpc_ms=1.0),
    ):
        assert step(handoff, event) == (handoff, ())
