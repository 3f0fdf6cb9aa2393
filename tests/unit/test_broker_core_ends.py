"""How a handoff ends: by the word of its last worker, of its router, or of a record; and what comes after the end."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import HandoffState, PrefillFinished, RequestEnded
from contracts.manifest import Role
from contracts.pull import Transfer
from contracts.requests import FinishReason, MixedRoute, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff, Verdict, refusal
from services.broker.core.step import begin, step
from tests.unit.broker_steps import (
    KEY,
    POLICY,
    SECOND,
    SOURCE,
    STATE,
    Effects,
    adopted,
    finished,
    names_of,
    of,
    report,
    reserved,
    reserving,
    stored,
    submitted,
)

TROUBLE = ErrorInfo(code=ErrorCode.INTERNAL, message="a rank died")
LEFT = ErrorInfo(code=ErrorCode.CANCELLED, message="the client left")


def ended(handoff: Handoff, **says: Any) -> tuple[Handoff, Effects]:
    """Decode's end arrives at 6 s."""
    values: dict[str, Any] = {"incarnation": "id", "num_tokens": 3}
    message = RequestEnded(handoff_id="r1-0", **(values | says))
    return step(handoff, ev.WorkerEnded(at_ns=6 * SECOND, message=message))


def prefilling() -> Handoff:
    """Prefill computes, nothing has arrived, the bucket is up to date."""
    return stored(reserved(reserving(KEY))[0])[0]


def committed() -> Handoff:
    """Decode has been asked to commit."""
    handoff, _ = finished(step(prefilling(), report(KEY))[0])
    handoff, effects = stored(handoff)
    assert of(effects, fx.AskCommit)
    return handoff


@pytest.mark.parametrize(
    ("error", "state"), [(TROUBLE, HandoffState.FAILED), (LEFT, HandoffState.CANCELLED)], ids=["failed", "cancelled"]
)
def test_an_error_at_the_end_is_the_end(error: ErrorInfo, state: HandoffState) -> None:
    """Failed or cancelled as the worker calls it, after as many tokens as it says."""
    handoff, _ = ended(committed(), error=error)
    assert handoff.verdict == Verdict(state=state, error=error, num_tokens=3)


@pytest.mark.parametrize("decoding", [False, True])
def test_tokens_that_nobody_has_told_of_are_not_said_to_be_none(decoding: bool) -> None:
    """A decode worker that was lost has told of no token: how many there were is not known. Before the commit there were none."""
    handoff = committed() if decoding else prefilling()
    lost = ev.WorkerGone(at_ns=6 * SECOND, worker=handoff.workers[WorkerRole.DECODE])
    _, effects = stored(step(handoff, lost)[0])
    (told,) = (each for each in of(effects, fx.Publish) if each.name is EventName.REQUEST_FAILED)
    assert told.fields.get("num_tokens") == (None if decoding else 0)


def test_tokens_that_a_worker_tells_of_with_its_error_are_told() -> None:
    """As one does that gave way to another request."""
    _, effects = stored(ended(committed(), error=TROUBLE)[0])
    (told,) = (each for each in of(effects, fx.Publish) if each.name is EventName.REQUEST_FAILED)
    assert told.fields["num_tokens"] == 3


@pytest.mark.parametrize("told_first", [False, True])
def test_an_attempt_that_gave_way_ends_alike_whoever_tells_first(told_first: bool) -> None:
    """Its worker, or the router with the next attempt: it failed for that error, after the tokens that the client has."""
    gave_way = ErrorInfo(code=ErrorCode.PREEMPTED, message="gave way")
    handoff = committed()
    superseded = ev.CancelRequested(at_ns=6 * SECOND, reason="r1-1 has taken its place", num_tokens=3, error=gave_way)
    if told_first:
        handoff, _ = step(handoff, superseded)
        handoff, _ = ended(handoff, error=gave_way)
    else:
        handoff, _ = ended(handoff, error=gave_way)
        handoff, _ = step(handoff, superseded)
    assert handoff.verdict == Verdict(state=HandoffState.FAILED, error=gave_way, num_tokens=3)


def test_decode_cannot_end_well_what_it_was_never_given() -> None:
    """Without a commit there is nothing that it can have decoded; an error of its own it may tell at any time."""
    handoff, effects = ended(prefilling(), finish_reason=FinishReason.STOP)
    assert handoff.verdict is not None
    assert handoff.verdict.state is HandoffState.FAILED
    text = "decode ended a request that it was never given"
    assert handoff.verdict.error == ErrorInfo(code=ErrorCode.PROTOCOL, message=text)
    (release,) = of(effects, fx.AskRelease)
    assert (release.role, release.message.reason) == (WorkerRole.PREFILL, "the request has ended")
    handoff, _ = ended(prefilling(), error=TROUBLE, num_tokens=0)
    assert handoff.verdict == Verdict(state=HandoffState.FAILED, error=TROUBLE)


def test_the_end_on_a_mixed_worker_releases_nobody_else() -> None:
    """There is nobody else."""
    route = MixedRoute(mixed=WorkerRef(worker_id="m0", incarnation="im"))
    handoff, _ = adopted(HandoffState.DECODING, route=route)
    _, effects = ended(handoff, incarnation="im", finish_reason=FinishReason.STOP)
    assert not of(effects, fx.AskRelease)


@pytest.mark.parametrize("make", [committed, lambda: adopted(HandoffState.DECODING)[0]], ids=["committed", "decoding"])
def test_a_router_that_has_all_it_wants_finishes_what_is_decoded(make: Any) -> None:
    """With its reason and its count, from the commit on."""
    event = ev.CancelRequested(at_ns=6 * SECOND, reason="stop", num_tokens=4, finish_reason=FinishReason.STOP)
    handoff, _ = step(make(), event)
    assert handoff.verdict == Verdict(state=HandoffState.FINISHED, finish_reason=FinishReason.STOP, num_tokens=4)


@pytest.mark.parametrize("finish_reason", [None, FinishReason.STOP])
def test_a_router_that_leaves_before_the_commit_cancels(finish_reason: FinishReason | None) -> None:
    """Whatever it calls it; after the commit it cancels, too, unless it gives a reason."""
    event = ev.CancelRequested(at_ns=6 * SECOND, reason=LEFT.message, num_tokens=4, finish_reason=finish_reason)
    verdict = Verdict(state=HandoffState.CANCELLED, error=LEFT, num_tokens=4)
    assert step(prefilling(), event)[0].verdict == verdict
    event = replace(event, finish_reason=None)
    assert step(committed(), event)[0].verdict == verdict


def test_a_first_token_that_ends_the_request_ends_it_with_its_reason() -> None:
    """One token; nothing is waited for."""
    handoff, effects = finished(prefilling(), finish_reason=FinishReason.LENGTH)
    assert handoff.verdict == Verdict(state=HandoffState.FINISHED, finish_reason=FinishReason.LENGTH, num_tokens=1)
    assert not of(effects, fx.CheckParts)


def test_what_is_complete_or_has_failed_is_not_looked_after() -> None:
    """Only parts that are missing are asked for after a while."""
    _, effects = finished(step(prefilling(), report(KEY))[0])
    assert not of(effects, fx.CheckParts)
    pulled = stored(reserved(reserving(KEY, STATE), pulled=(Role.SSM,))[0])[0]
    handoff, effects = finished(pulled, source=None)
    assert not of(effects, fx.CheckParts)
    assert handoff.verdict is not None
    assert handoff.verdict.error is not None
    assert handoff.verdict.error.message == "source: a prefill whose cache decode pulls names what may be read"


def test_reports_are_heard_until_the_commit_or_the_end() -> None:
    """Afterwards they change nothing."""
    more = report(KEY, revision=2)
    handoff = committed()
    assert step(handoff, more) == (handoff, ())
    judged, _ = step(prefilling(), ev.CancelRequested(at_ns=5 * SECOND, reason="gone"))
    assert step(judged, more) == (judged, ())


def test_a_refusal_means_nothing_before_anybody_was_asked() -> None:
    """The record is not stored yet."""
    handoff, _ = begin(submitted(), POLICY)
    assert step(handoff, ev.AskRefused(at_ns=2 * SECOND, ask=ev.Ask.RUN, error=TROUBLE)) == (handoff, ())


def test_a_record_that_is_stored_after_the_deadline_admits_nobody() -> None:
    """The router has its answer: one."""
    handoff, _ = begin(submitted(), POLICY)
    handoff, effects = step(handoff, ev.DeadlinePassed(at_ns=12 * SECOND))
    (answer,) = of(effects, fx.AnswerSubmit)
    assert answer.error is not None
    _, effects = step(handoff, ev.RecordStored(at_ns=13 * SECOND, write=1, revision=1))
    assert [type(effect) for effect in effects] == [fx.StoreRecord]


def test_a_failure_with_everything_there_names_no_missing_parts() -> None:
    """The cache had arrived: something else went wrong."""
    handoff, _ = step(prefilling(), report(KEY))
    handoff, effects = step(handoff, ev.DeadlinePassed(at_ns=12 * SECOND))
    (end,) = [effect for effect in of(effects, fx.Publish) if effect.name is EventName.REQUEST_FAILED]
    assert not {"missing_parts", "num_missing_parts"} & end.fields.keys()


def test_a_worker_that_has_let_go_is_not_released_when_it_answers_late() -> None:
    """Decode said itself that it holds nothing: a grant that is still under way is one of before."""
    handoff, _ = ended(committed(), finish_reason=FinishReason.LENGTH)
    handoff, _ = stored(handoff)
    assert handoff.state is HandoffState.FINISHED
    assert reserved(handoff) == (handoff, ())


def test_an_end_that_loses_to_an_older_record_before_anybody_was_told_is_written_again() -> None:
    """It is this very handoff's record, not somebody else's."""
    handoff, _ = begin(submitted(), POLICY)
    first = handoff.writing
    handoff, _ = step(handoff, ev.CancelRequested(at_ns=2 * SECOND, reason="gone"))
    handoff, _ = step(handoff, ev.RecordStored(at_ns=2 * SECOND, write=1, revision=1))
    assert not handoff.told
    conflict = ev.RecordConflict(at_ns=3 * SECOND, write=handoff.num_writes, found=first, revision=3)
    handoff, effects = step(handoff, conflict)
    (store,) = of(effects, fx.StoreRecord)
    assert (store.last, store.record.state) == (3, HandoffState.CANCELLED)


def test_who_makes_way_remembers_only_what_it_found() -> None:
    """Neither a write under way nor a ledger: what is kept answers repetitions."""
    handoff, _ = reserved(reserving(KEY))
    later = replace(handoff.record, fence=5)
    handoff, _ = step(handoff, ev.RecordConflict(at_ns=4 * SECOND, write=2, found=later, revision=7))
    assert (handoff.stored, handoff.revision, handoff.writing, handoff.ledger) == (later, 7, None, None)


def test_a_lock_is_freed_with_the_error_that_ended_it() -> None:
    """People see why."""
    pulled = stored(reserved(reserving(KEY, STATE), pulled=(Role.SSM,))[0])[0]
    handoff, _ = finished(pulled, source=SOURCE)
    handoff, effects = step(handoff, ev.DeadlinePassed(at_ns=12 * SECOND))
    (unlocked,) = [effect for effect in of(effects, fx.Publish) if effect.name is EventName.REQUEST_UNLOCKED]
    assert handoff.record.error is not None
    assert unlocked.fields["error"] == handoff.record.error


def test_who_is_refused_hears_why() -> None:
    """A message of a role that the route has not, or of another start of the worker."""
    route = MixedRoute(mixed=WorkerRef(worker_id="m0", incarnation="im"))
    mixed, _ = adopted(HandoffState.DECODING, route=route)
    message = PrefillFinished(handoff_id="r1-0", incarnation="ip", first_token=5)
    assert refusal(mixed, message) == ErrorInfo(code=ErrorCode.PROTOCOL, message="r1-0 has no prefill worker")
    old = replace(message, incarnation="old")
    assert refusal(prefilling(), old) == ErrorInfo(
        code=ErrorCode.INCARNATION_CHANGED, message="r1-0 belongs to ip of p0, not to old"
    )
    assert refusal(prefilling(), message) is None


def test_time_is_left_in_whole_milliseconds() -> None:
    """Rounded down, and never negative."""
    handoff = prefilling()
    left = handoff.remaining_ms(SECOND + 1)
    assert (left, type(left)) == (9_999, int)
    assert handoff.remaining_ms(12 * SECOND) == 0


def test_a_plan_in_blocks_of_another_size_is_owed_in_them() -> None:
    """The size that came with the submit is the one that counts: of blocks 2 to 4 the rank keeps block 3, as its second one."""
    begun = replace(submitted(replace(KEY, modulus=2, residue=1)), block_size=8)
    handoff, _ = begin(begun, POLICY)
    handoff, _ = step(handoff, ev.RecordStored(at_ns=SECOND, write=1, revision=1))
    handoff, effects = reserved(handoff)
    assert EventName.DECODE_RESERVED in names_of(effects)
    assert handoff.ledger is not None
    assert [view.owed for view in handoff.ledger.part_views()] == [((8, 16),)]
    whole, _ = reserved(reserving(KEY), cached=40)
    assert whole.verdict is None
    assert whole.ledger_closed
    assert not whole.ledger.open_by(Transfer.PUSH)  # type: ignore[union-attr]  # it is closed, so it is there
