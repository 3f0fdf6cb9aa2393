"""What a broker believes of a handoff that it adopted, state by state, and what it hears of it later."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import HandoffState, RequestEnded, TakenOver
from contracts.manifest import PlannedPart, Role
from contracts.pull import RequestLock
from contracts.requests import FinishReason, MixedRoute, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.step import adopt, begin, step
from tests.unit.broker_steps import (
    DECODE,
    GRANT,
    KEY,
    POLICY,
    SECOND,
    SOURCE,
    STATE,
    adopted,
    adopting,
    finished,
    of,
    record,
    reserved,
    submitted,
)

LOCK = RequestLock(number=2, holder=DECODE, taken_at="2030-01-01T00:00:01.000+00:00")
OVER = TakenOver(handoff_id="r1-0", incarnation="id", prepare_ms=0, enqueue_ms=0, total_ms=0, first_step_ns=0)
GONE = ErrorInfo(code=ErrorCode.WORKER_LOST, message="gone")
FORGOTTEN = ErrorInfo(code=ErrorCode.CANCELLED, message="r1-0 has been released already")


def plan(*parts: PlannedPart, block_size: int = 16) -> ev.PlanFound:
    """What is owed, learnt anew at 2 s."""
    return ev.PlanFound(at_ns=2 * SECOND, planned=parts, block_size=block_size)


def test_a_record_of_the_same_term_is_not_written_again() -> None:
    """The bucket holds it already, at the revision at which it was found."""
    known = replace(record(HandoffState.PREFILLING), fence=POLICY.fence)
    event = ev.Adopted(at_ns=SECOND, record=known, revision=8, deadline_ns=11 * SECOND, begun_ns=0)
    handoff, effects = adopt(event, POLICY)
    assert not of(effects, fx.StoreRecord)
    assert handoff.stored == known
    assert (handoff.revision, handoff.told) == (8, frozenset({WorkerRole.PREFILL, WorkerRole.DECODE}))


def test_the_plan_is_asked_for_by_route() -> None:
    """It depends on who the two are."""
    handoff, effects = adopted(HandoffState.RESERVING)
    assert of(effects, fx.AskPlan) == [fx.AskPlan(route=handoff.record.route)]


@pytest.mark.parametrize("lock", [None, LOCK])
def test_locks_are_counted_on_from_the_record(lock: RequestLock | None) -> None:
    """A number is never given twice: the lock after one that is held has the next number, the first one has number 1."""
    handoff, _ = adopted(HandoffState.PREFILLING, pulled=(Role.SSM,), lock=lock)
    assert handoff.num_locks == (0 if lock is None else 2)
    handoff, _ = step(handoff, plan(STATE))
    handoff, _ = reserved(handoff, pulled=(Role.SSM,))
    handoff, effects = finished(handoff, source=SOURCE)
    assert [pull.message.lock for pull in of(effects, fx.AskPull)] == [1 if lock is None else 2]
    assert handoff.record.source == SOURCE


def test_a_decoding_record_has_everything_behind_it() -> None:
    """Acceptances, takeover and refusals of what was asked before are old news; the end is not."""
    handoff, _ = adopted(HandoffState.DECODING)
    for event in (
        ev.RunAccepted(at_ns=2 * SECOND, rpc_ms=1.0),
        ev.CommitAccepted(at_ns=2 * SECOND, rpc_ms=1.0),
        ev.DecodeTookOver(at_ns=2 * SECOND, message=OVER),
        ev.AskRefused(at_ns=2 * SECOND, ask=ev.Ask.COMMIT, error=GONE),
        ev.AskRefused(at_ns=2 * SECOND, ask=ev.Ask.RUN, error=GONE),
    ):
        assert step(handoff, event) == (handoff, ())
    ended = RequestEnded(handoff_id="r1-0", incarnation="id", num_tokens=8, finish_reason=FinishReason.LENGTH)
    handoff, effects = step(handoff, ev.WorkerEnded(at_ns=3 * SECOND, message=ended))
    assert handoff.verdict is not None
    assert (handoff.verdict.state, handoff.verdict.finish_reason) == (HandoffState.FINISHED, FinishReason.LENGTH)
    assert not of(effects, fx.AskRelease)  # prefill was released when the handoff was adopted


def test_the_total_of_an_adopted_handoff_begins_at_its_submit() -> None:
    """Not at the adoption: it was submitted at 0 s, adopted at 1 s, and ends at 3 s."""
    handoff, _ = adopted(HandoffState.DECODING)
    ended = RequestEnded(handoff_id="r1-0", incarnation="id", num_tokens=8, finish_reason=FinishReason.LENGTH)
    handoff, _ = step(handoff, ev.WorkerEnded(at_ns=3 * SECOND, message=ended))
    event = ev.RecordStored(at_ns=3 * SECOND, write=handoff.num_writes, revision=handoff.revision + 1)
    _, effects = step(handoff, event)
    (told,) = (each for each in of(effects, fx.Publish) if each.name is EventName.REQUEST_FINISHED)
    assert told.fields["total_ms"] == 3000


def test_a_record_says_when_it_was_submitted() -> None:
    """In wall time, so that any other broker can go on counting: 10 s before the deadline."""
    handoff, _ = begin(submitted(), POLICY)
    assert handoff.record.submitted_at == "2030-01-01T00:00:00.000+00:00"


@pytest.mark.parametrize(("response_rpc_ms", "told"), [(None, 0), (0.75, 1)])
def test_a_release_that_an_earlier_broker_told_is_not_told_again(response_rpc_ms: float | None, told: int) -> None:
    """Prefill that knows nothing of a request that decode has taken over had been released; if it does know it, this is the release."""
    handoff, _ = adopted(HandoffState.DECODING)
    ended = RequestEnded(handoff_id="r1-0", incarnation="id", num_tokens=8, finish_reason=FinishReason.LENGTH)
    handoff, _ = step(handoff, ev.WorkerEnded(at_ns=3 * SECOND, message=ended))
    settled = ev.ReleaseSettled(
        at_ns=4 * SECOND, role=WorkerRole.PREFILL, acknowledged=True, response_rpc_ms=response_rpc_ms
    )
    _, effects = step(handoff, settled)
    assert [each.name for each in of(effects, fx.Publish)] == [EventName.PREFILL_RELEASED] * told


def test_a_committed_record_without_its_token_breaks_the_protocol() -> None:
    """Nothing can be committed without one."""
    handoff, effects = adopted(HandoffState.COMMITTED, first_token=None)
    assert not of(effects, fx.AskCommit)
    assert handoff.verdict is not None
    assert handoff.verdict.error == ErrorInfo(code=ErrorCode.PROTOCOL, message="a committed record has a first token")


@pytest.mark.parametrize("state", [HandoffState.COMMITTED, HandoffState.DECODING])
def test_a_grant_or_a_plan_is_not_heard_after_the_commit(state: HandoffState) -> None:
    """They are late answers to another broker's questions."""
    handoff, _ = adopted(state)
    assert reserved(handoff) == (handoff, ())
    assert step(handoff, plan(KEY)) == (handoff, ())


def test_a_plan_means_nothing_to_a_handoff_that_was_not_adopted() -> None:
    """Nor to one that has been judged: nobody is asked for memory."""
    begun = submitted()
    route = MixedRoute(mixed=WorkerRef(worker_id="m0", incarnation="im"))
    mixed, _ = begin(replace(begun, submit=replace(begun.submit, route=route), planned=()), POLICY)
    assert step(mixed, plan(KEY)) == (mixed, ())
    judged, _ = step(adopted(HandoffState.PREFILLING)[0], ev.CancelRequested(at_ns=SECOND, reason="gone"))
    assert step(judged, plan(KEY)) == (judged, ())


def test_a_plan_that_was_found_is_not_refused_any_more() -> None:
    """A refusal of an earlier question is late."""
    handoff, _ = step(adopted(HandoffState.PREFILLING)[0], plan(KEY))
    refusal = ev.AskRefused(at_ns=3 * SECOND, ask=ev.Ask.PLAN, error=GONE)
    assert step(handoff, refusal) == (handoff, ())


def test_what_is_owed_follows_the_blocks_of_the_plan() -> None:
    """A part of every other block of 8 tokens, behind 16 cached ones of 40: of blocks 2 to 4 that is block 3, the rank's second one."""
    every_other = replace(KEY, modulus=2, residue=1)
    handoff, _ = step(adopted(HandoffState.PREFILLING)[0], plan(every_other, block_size=8))
    handoff, _ = reserved(handoff)
    assert handoff.ledger is not None
    assert [view.owed for view in handoff.ledger.part_views()] == [((8, 16),)]


def test_a_grant_that_is_gone_is_told_word_for_word() -> None:
    """The router tries again."""
    handoff, _ = step(adopted(HandoffState.PREFILLING)[0], plan(KEY))
    handoff, _ = reserved(handoff, grant=replace(GRANT, generation=99))
    assert handoff.verdict is not None
    assert handoff.verdict.error == ErrorInfo(
        code=ErrorCode.TRANSFER_FAILED,
        message="another broker went on, and decode no longer held what it had granted",
    )


def test_digests_that_are_found_missing_only_with_the_plan_fail_the_handoff() -> None:
    """Prefill's end came first, when nobody knew what was owed."""
    handoff, _ = adopted(HandoffState.PREFILLING, verify=True)
    handoff, _ = finished(handoff)
    assert handoff.verdict is None
    handoff, _ = step(handoff, plan(KEY))
    handoff, effects = reserved(handoff, verify=True)
    assert not of(effects, fx.AskRun)
    assert handoff.verdict is not None
    assert handoff.verdict.error == ErrorInfo(
        code=ErrorCode.PROTOCOL, message="digests: a prefill whose cache decode verifies brings some"
    )


def test_decode_is_asked_for_its_pull_only_once_it_may_pull() -> None:
    """Before prefill's end is known nobody holds the lock: prefill alone is asked."""
    handoff, _ = adopted(HandoffState.PREFILLING, pulled=(Role.SSM,))
    handoff, _ = step(handoff, plan(KEY, STATE))
    handoff, _ = reserved(handoff, pulled=(Role.SSM,))
    handoff, _ = step(handoff, ev.RunAccepted(at_ns=3 * SECOND, rpc_ms=1.0))
    _, effects = step(handoff, ev.PartsOverdue(at_ns=4 * SECOND))
    assert [ask.role for ask in of(effects, fx.AskParts)] == [WorkerRole.PREFILL]


def test_silence_about_digests_is_broken_after_the_usual_time() -> None:
    """Prefill is asked again as soon as about anything else."""
    handoff, _ = adopted(HandoffState.COMMITTED, verify=True)
    silent = ErrorInfo(code=ErrorCode.DEADLINE_EXCEEDED, message="no answer")
    event = ev.PartsUnanswered(at_ns=SECOND, role=WorkerRole.PREFILL, error=silent)
    assert step(handoff, event)[1] == (fx.CheckParts(after_ms=POLICY.parts_query_ms),)


@pytest.mark.parametrize("state", [HandoffState.FINISHED, HandoffState.CANCELLED])
def test_an_end_without_an_error_is_released_by_its_name(state: HandoffState) -> None:
    """There is no better reason."""
    _, effects = adopting(state)
    assert {release.message.reason for release in of(effects, fx.AskRelease)} == {str(state)}


def test_a_commit_that_is_refused_as_over_waits_for_the_word_of_its_end() -> None:
    """Whether or not digests were waited for: decode took over for another broker, and says so itself."""
    for verify in (False, True):
        handoff, _ = adopted(HandoffState.COMMITTED, verify=verify)
        refusal = ev.AskRefused(at_ns=2 * SECOND, ask=ev.Ask.COMMIT, error=FORGOTTEN)
        assert step(handoff, refusal) == (handoff, ())
