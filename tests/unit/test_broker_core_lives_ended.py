"""Lives of a handoff that end before their last token: every message and event of the end, field by field."""

from __future__ import annotations

from msgspec.structs import replace

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import (
    HandoffState,
    PrefillFinished,
    QueryParts,
    TakenOver,
)
from contracts.requests import (
    CancelWork,
    TokenFrame,
)
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff
from services.broker.core.step import step
from tests.unit.broker_lives import MIXED, mixed, release, told, written
from tests.unit.broker_steps import (
    DECODE,
    GRANT,
    KEY,
    PREFILL,
    SECOND,
    STATE,
    finished,
    report,
    reserved,
    reserving,
)


def test_a_cancel_hints_to_all_then_releases_all_and_answers_the_router() -> None:
    """The workers may stop at once; memory is taken back when the bucket says that it is over."""
    handoff, _ = reserved(reserving(KEY, STATE, delivered=3))
    handoff, _ = written(handoff, 3)
    handoff, effects = step(handoff, ev.CancelRequested(at_ns=5 * SECOND, reason="the client has left", num_tokens=2))
    error = ErrorInfo(code=ErrorCode.CANCELLED, message="the client has left")
    hint = CancelWork(handoff_id="r1-0")
    assert effects[:2] == (
        fx.HintCancel(worker=DECODE, request_id="r1", message=hint),
        fx.HintCancel(worker=PREFILL, request_id="r1", message=hint),
    )
    (store,) = effects[2:]
    assert isinstance(store, fx.StoreRecord)
    assert (store.record.state, store.record.error, store.record.num_tokens) == (HandoffState.CANCELLED, error, 3)
    handoff, effects = written(handoff, 6)
    frame = TokenFrame(
        handoff_id="r1-0", request_id="r1", attempt=0, index=3, token_ids=(), final=True, num_tokens=3, error=error
    )
    assert effects == (
        release(WorkerRole.DECODE, "the client has left", 7_000),
        release(WorkerRole.PREFILL, "the client has left", 7_000),
        fx.AnswerRouter(router_id="router-0", frame=frame),
        told(EventName.REQUEST_CANCELLED, 6, "cancelled", total_ms=5000.0, num_tokens=3, error=error),
    )
    for role, name in (
        (WorkerRole.DECODE, EventName.DECODE_RELEASED),
        (WorkerRole.PREFILL, EventName.PREFILL_RELEASED),
    ):
        event = ev.ReleaseSettled(at_ns=7 * SECOND, role=role, acknowledged=role is WorkerRole.DECODE, rpc_ms=0.5)
        handoff, effects = step(handoff, event)
        if role is WorkerRole.DECODE:
            assert effects == (told(name, 7, "cancelled", rpc_ms=0.5),)
        else:
            assert effects == (fx.Forget(),)


def test_a_deadline_names_the_parts_that_had_not_arrived() -> None:
    """Where it was, how many parts of how many, and the first of them with what they lack."""
    handoff, _ = reserved(reserving(KEY, STATE))
    handoff, _ = written(handoff, 3)
    handoff, _ = step(handoff, report(KEY))
    handoff, effects = step(handoff, ev.DeadlinePassed(at_ns=12 * SECOND))
    text = "the deadline passed while prefilling: 1 of 2 parts of the cache had not arrived"
    error = ErrorInfo(code=ErrorCode.DEADLINE_EXCEEDED, message=text)
    frame = TokenFrame(
        handoff_id="r1-0", request_id="r1", attempt=0, index=0, token_ids=(), final=True, num_tokens=0, error=error
    )
    missing = ("target ssm of layer 1 for destination rank 0 from source rank 0: [0, 1)",)
    assert effects[:-1] == (
        release(WorkerRole.DECODE, text, 2_000),
        release(WorkerRole.PREFILL, text, 2_000),
        fx.AnswerRouter(router_id="router-0", frame=frame),
        told(
            EventName.REQUEST_FAILED,
            12,
            "failed",
            total_ms=11000.0,
            num_tokens=0,
            error=error,
            missing_parts=missing,
            num_missing_parts=1,
        ),
    )
    assert handoff.record.error == error
    assert step(handoff, ev.DeadlinePassed(at_ns=13 * SECOND))[1] == ()
    late, effects = step(reserving(), ev.DeadlinePassed(at_ns=12 * SECOND))
    assert late.record.error is not None
    assert late.record.error.message == "the deadline passed while reserving"
    (end,) = [effect for effect in effects if isinstance(effect, fx.Publish)]
    assert not {"missing_parts", "num_missing_parts"} & end.fields.keys()


def test_an_acceptance_after_the_end_is_released_word_for_word() -> None:
    """The late taker is told that it is over; whoever never was asked is not."""
    handoff, _ = step(reserving(), ev.DeadlinePassed(at_ns=10 * SECOND))
    again = release(WorkerRole.PREFILL, "the handoff has ended", 3_000)
    assert step(handoff, ev.RunAccepted(at_ns=10 * SECOND, rpc_ms=1.0)) == (handoff, (again,))


def test_missing_reports_are_asked_for_at_growing_intervals() -> None:
    """Twice as long each time, up to 32 times; not before the prompt is computed, and not once all has arrived."""
    handoff, _ = reserved(reserving(KEY))
    overdue = ev.PartsOverdue(at_ns=5 * SECOND)
    assert step(handoff, overdue) == (handoff, ())
    handoff, _ = finished(handoff)
    query = fx.AskParts(role=WorkerRole.PREFILL, worker=PREFILL, message=QueryParts(handoff_id="r1-0"))
    for after_ms in (100, 200, 400, 800, 1600, 1600):
        handoff, effects = step(handoff, overdue)
        assert effects == (query, fx.CheckParts(after_ms=after_ms))
    handoff, _ = step(handoff, report(KEY))
    assert step(handoff, overdue) == (handoff, ())


def test_a_worker_that_is_gone_is_named() -> None:
    """With its role and start; prefill is not needed any more once all has arrived."""
    handoff, _ = reserved(reserving(KEY))
    for worker, role in ((PREFILL, "prefill"), (DECODE, "decode")):
        failed, _ = step(handoff, ev.WorkerGone(at_ns=4 * SECOND, worker=worker))
        assert failed.verdict is not None
        text = f"{role} worker {worker.worker_id} ({worker.incarnation}) is gone"
        assert failed.verdict.error == ErrorInfo(code=ErrorCode.WORKER_LOST, message=text)
        assert failed.verdict.state is HandoffState.FAILED
    complete, _ = finished(step(handoff, report(KEY))[0])
    assert step(complete, ev.WorkerGone(at_ns=4 * SECOND, worker=PREFILL)) == (complete, ())
    assert step(handoff, ev.WorkerGone(at_ns=4 * SECOND, worker=MIXED)) == (handoff, ())


def test_what_breaks_the_protocol_is_told_word_for_word() -> None:
    """A prefill without token or digests, a takeover before the commit, an answer that cannot be."""
    handoff, _ = reserved(reserving(KEY))
    over = TakenOver(handoff_id="r1-0", incarnation="id", prepare_ms=0, enqueue_ms=0, total_ms=0, first_step_ns=0)
    other = replace(GRANT, worker_id="d9")
    verified, _ = reserved(reserving(KEY), verify=True)
    cases = (
        (finished(handoff, first_token=None), "first_token: a prefill that finished without an error has one"),
        (finished(verified), "digests: a prefill whose cache decode verifies brings some"),
        (step(handoff, ev.DecodeTookOver(at_ns=4 * SECOND, message=over)), "taken over before the commit"),
        (reserved(reserving(KEY), grant=other), f"the grant is for d9 id, not for {DECODE}"),
        (reserved(reserving(KEY), cached=41), "num_cached_tokens: 41 is not within the prompt"),
    )
    for (failed, _), text in cases:
        assert failed.verdict is not None
        assert failed.verdict.error == ErrorInfo(code=ErrorCode.PROTOCOL, message=text)


def test_a_prefill_that_failed_fails_the_handoff_with_its_error() -> None:
    """Nothing is told as finished."""
    handoff, _ = reserved(reserving(KEY))
    handoff, _ = written(handoff, 3)
    error = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message="a part could not be pushed")
    handoff, effects = finished(handoff, first_token=None, error=error)
    assert handoff.verdict is not None
    assert handoff.verdict.error == error
    assert [type(effect) for effect in effects] == [fx.StoreRecord]
    message = PrefillFinished(handoff_id="r1-0", incarnation="ip", first_token=5)
    assert step(handoff, ev.PrefillEnded(at_ns=5 * SECOND, message=message)) == (handoff, ())


def test_a_refusal_counts_only_while_its_question_is_open() -> None:
    """A sign of life that came before it counts more: what was done is not undone by a late refusal."""
    error = ErrorInfo(code=ErrorCode.OVERLOADED, message="full")
    waiting = reserving(KEY)

    def fails(handoff: Handoff, ask: ev.Ask) -> bool:
        after, _ = step(handoff, ev.AskRefused(at_ns=4 * SECOND, ask=ask, error=error))
        return after.verdict is not None and after.verdict.error == error

    running, _ = reserved(waiting)
    accepted, _ = step(running, ev.RunAccepted(at_ns=3 * SECOND, rpc_ms=1.0))
    heard, _ = step(running, report())
    computed, _ = finished(running)
    committing, _ = step(computed, report(KEY))
    committing, _ = written(committing, 4)
    committing, _ = written(committing, 4)
    agreed, _ = step(committing, ev.CommitAccepted(at_ns=5 * SECOND, rpc_ms=1.0))
    assert {
        ("reserve", fails(waiting, ev.Ask.RESERVE)),
        ("reserve, granted", fails(running, ev.Ask.RESERVE)),
        ("run", fails(running, ev.Ask.RUN)),
        ("run, accepted", fails(accepted, ev.Ask.RUN)),
        ("run, heard of", fails(heard, ev.Ask.RUN)),
        ("run, computed", fails(computed, ev.Ask.RUN)),
        ("commit", fails(committing, ev.Ask.COMMIT)),
        ("commit, accepted", fails(agreed, ev.Ask.COMMIT)),
        ("commit, not asked", fails(computed, ev.Ask.COMMIT)),
        ("pull, not asked", fails(running, ev.Ask.PULL)),
        ("plan, not asked", fails(waiting, ev.Ask.PLAN)),
        ("mixed run", fails(mixed(), ev.Ask.RUN)),
    } == {
        ("reserve", True),
        ("reserve, granted", False),
        ("run", True),
        ("run, accepted", False),
        ("run, heard of", False),
        ("run, computed", False),
        ("commit", True),
        ("commit, accepted", False),
        ("commit, not asked", False),
        ("pull, not asked", False),
        ("plan, not asked", False),
        ("mixed run", True),
    }
    _, effects = step(waiting, ev.AskRefused(at_ns=4 * SECOND, ask=ev.Ask.RESERVE, error=error))
    assert effects[0] == told(EventName.RESERVE_REFUSED, 4, "reserving", error=error)
