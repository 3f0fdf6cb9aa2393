"""Whole lives of a handoff: every message, record and event of every step, field by field."""

from __future__ import annotations

from msgspec.structs import replace

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import (
    CommitHandoff,
    HandoffRecord,
    HandoffState,
    PartDigest,
    PrefillFinished,
    PromptTimes,
    QueryParts,
    ReleaseHandoff,
    RequestEnded,
    ReserveDecode,
    RunMixed,
    RunPrefill,
    SourceProgress,
    TakenOver,
)
from contracts.manifest import Namespace, Role
from contracts.pull import Transfer
from contracts.requests import (
    CancelWork,
    DisaggregatedRoute,
    FinishReason,
    MixedRoute,
    SamplingParams,
    TokenFrame,
    WorkerRef,
)
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff
from services.broker.core.step import begin, step
from tests.unit.broker_steps import (
    DECODE,
    GRANT,
    KEY,
    POLICY,
    PREFILL,
    SECOND,
    STATE,
    finished,
    report,
    reserved,
    reserving,
    submitted,
)

SAMPLING = SamplingParams(max_tokens=8, seed=1)
MIXED = WorkerRef(worker_id="m0", incarnation="im")
NAMES = {"prefill_worker": "p0", "decode_worker": "d0"}
RECORD = HandoffRecord(
    handoff_id="r1-0",
    request_id="r1",
    attempt=0,
    router_id="router-0",
    route=DisaggregatedRoute(prefill=PREFILL, decode=DECODE),
    state=HandoffState.RESERVING,
    fence=4,
    num_prompt_tokens=40,
    prompt_hash="h",
    sampling=SAMPLING,
    deadline_at="2030-01-01T00:00:10+00:00",
    submitted_at="2030-01-01T00:00:00.000+00:00",
    traceparent="",
    router_incarnation="ir",
    num_delivered_tokens=3,
)
BOTH = frozenset({WorkerRole.PREFILL, WorkerRole.DECODE})


def told(name: EventName, at_s: int, phase: str, **fields: object) -> fx.Publish:
    """An event about a handoff with two workers."""
    return fx.Publish(name=name, at_ns=at_s * SECOND, fields={"phase": phase, **NAMES, **fields})


def release(role: WorkerRole, reason: str, tombstone_ms: int) -> fx.AskRelease:
    """A release of one of both workers."""
    worker = PREFILL if role is WorkerRole.PREFILL else DECODE
    message = ReleaseHandoff(handoff_id="r1-0", reason=reason, tombstone_ms=tombstone_ms)
    return fx.AskRelease(role=role, worker=worker, message=message)


def written(handoff: Handoff, at_s: int) -> tuple[Handoff, tuple[fx.Effect, ...]]:
    """The bucket takes the write under way."""
    event = ev.RecordStored(at_ns=at_s * SECOND, write=handoff.num_writes, revision=handoff.revision + 1)
    return step(handoff, event)


def test_a_life_from_submit_to_the_last_token() -> None:
    """Reserve, run, parts, commit, takeover, end, releases: each at its time, with what the one before has brought."""
    begun = replace(submitted(KEY, STATE, delivered=3), traceparent="trace")
    first = replace(RECORD, traceparent="trace")
    handoff, effects = begin(begun, POLICY)
    assert effects == (fx.StoreRecord(write=1, record=first, last=None),)

    handoff, effects = written(handoff, 2)
    assert effects == (
        fx.AnswerSubmit(error=None),
        told(EventName.REQUEST_SUBMITTED, 2, "reserving", num_tokens=40),
        fx.AskReserve(
            worker=DECODE,
            message=ReserveDecode(
                handoff_id="r1-0",
                request_id="r1",
                attempt=0,
                router_id="router-0",
                incarnation="id",
                source=PREFILL,
                fence=4,
                num_prompt_tokens=40,
                sampling=SAMPLING,
                timeout_ms=9_000,
                num_delivered_tokens=3,
            ),
        ),
    )
    assert (handoff.told, handoff.asked_ns) == (BOTH, 2 * SECOND)

    handoff, effects = reserved(handoff, verify=True)
    second = replace(first, state=HandoffState.PREFILLING, grant=GRANT, num_cached_tokens=16, verify=True)
    assert effects == (
        told(
            EventName.DECODE_RESERVED,
            3,
            "reserving",
            rpc_ms=1.0,
            prepare_ms=0.5,
            num_tokens=16,
            destination_dp_rank=0,
        ),
        fx.AskRun(
            role=WorkerRole.PREFILL,
            worker=PREFILL,
            message=RunPrefill(
                handoff_id="r1-0",
                request_id="r1",
                attempt=0,
                router_id="router-0",
                incarnation="ip",
                fence=4,
                num_prompt_tokens=40,
                prompt_hash="h",
                sampling=SAMPLING,
                timeout_ms=8_000,
                grant=GRANT,
                num_cached_tokens=16,
                num_delivered_tokens=3,
                verify=True,
            ),
        ),
        fx.StoreRecord(write=2, record=second, last=1),
    )
    assert handoff.asked_ns == 3 * SECOND

    handoff, effects = step(handoff, ev.RunAccepted(at_ns=3 * SECOND, rpc_ms=0.25))
    assert effects == (told(EventName.PREFILL_ACCEPTED, 3, "prefilling", rpc_ms=0.25, started_ns=3 * SECOND),)
    assert step(handoff, ev.RunAccepted(at_ns=3 * SECOND, rpc_ms=0.25)) == (handoff, ())
    handoff, effects = written(handoff, 3)
    assert effects == ()

    digests = (PartDigest(namespace=Namespace.TARGET, role=Role.KEY, layer=0, destination_rank=0, digest="aa"),)
    says = {"queue_ms": 2.0, "compute_ms": 30.0, "response_prepare_ms": 0.5, "num_cached_tokens": 8, "digests": digests}
    handoff, effects = finished(handoff, **says)
    assert effects == (
        told(
            EventName.PREFILL_FINISHED,
            4,
            "prefilling",
            prepare_ms=2.0,
            duration_ms=30.0,
            total_ms=32.0,
            response_prepare_ms=0.5,
            num_tokens=32,
        ),
        fx.CheckParts(after_ms=50),
    )

    handoff, effects = step(handoff, report(KEY))
    assert effects == ()
    handoff, effects = step(handoff, report(KEY, STATE, revision=2, num_bytes=300, push_ms=7.0))
    done = SourceProgress(transfer=Transfer.PUSH, source_rank=0, num_parts=2, num_done=2, num_bytes=300)
    committed = replace(
        second,
        state=HandoffState.COMMITTED,
        first_token=5,
        num_prefill_cached_tokens=8,
        progress=(done,),
    )
    assert effects == (
        told(
            EventName.RANK_PUSHED,
            4,
            "prefilling",
            source_dp_rank=0,
            source_rank=0,
            num_parts=2,
            num_bytes=300,
            duration_ms=7.0,
        ),
        told(
            EventName.LEDGER_CLOSED,
            4,
            "prefilling",
            num_parts=2,
            num_bytes=300,
            started_ns=3 * SECOND,
            duration_ms=1000.0,
        ),
        fx.StoreRecord(write=3, record=committed, last=2),
    )

    handoff, effects = written(handoff, 5)
    commit = CommitHandoff(
        handoff_id="r1-0",
        incarnation="id",
        fence=4,
        first_token=5,
        num_cached_tokens=8,
        timeout_ms=6_000,
        digests=digests,
    )
    assert effects == (fx.AskCommit(worker=DECODE, message=commit),)
    assert (handoff.record, handoff.commit_asked, handoff.asked_ns) == (committed, True, 5 * SECOND)

    handoff, effects = step(handoff, ev.CommitAccepted(at_ns=6 * SECOND, rpc_ms=0.75))
    assert effects == (told(EventName.HANDOFF_COMMITTED, 6, "committed", rpc_ms=0.75),)
    assert step(handoff, ev.CommitAccepted(at_ns=6 * SECOND, rpc_ms=0.75)) == (handoff, ())

    over = TakenOver(
        handoff_id="r1-0",
        incarnation="id",
        prepare_ms=1.0,
        enqueue_ms=2.0,
        total_ms=3.5,
        first_step_ns=77,
        first_token_prepare_ms=0.5,
        first_token_rpc_ms=0.125,
    )
    handoff, effects = step(handoff, ev.DecodeTookOver(at_ns=6 * SECOND, message=over))
    decoding = replace(committed, state=HandoffState.DECODING)
    assert effects == (
        told(
            EventName.TAKEN_OVER,
            6,
            "decoding",
            prepare_ms=1.0,
            enqueue_ms=2.0,
            total_ms=3.5,
            started_ns=77,
            first_token_prepare_ms=0.5,
            first_token_rpc_ms=0.125,
        ),
        release(WorkerRole.PREFILL, "decode has taken over", 7_000),
        fx.StoreRecord(write=4, record=decoding, last=3),
    )
    handoff, _ = written(handoff, 6)

    settled = ev.ReleaseSettled(
        at_ns=7 * SECOND, role=WorkerRole.PREFILL, acknowledged=True, rpc_ms=0.5, response_rpc_ms=0.25
    )
    handoff, effects = step(handoff, settled)
    assert effects == (told(EventName.PREFILL_RELEASED, 7, "decoding", rpc_ms=0.5, response_rpc_ms=0.25),)
    assert step(handoff, settled) == (handoff, ())

    ended = RequestEnded(handoff_id="r1-0", incarnation="id", num_tokens=11, finish_reason=FinishReason.LENGTH)
    handoff, effects = step(handoff, ev.WorkerEnded(at_ns=8 * SECOND, message=ended))
    last = replace(decoding, state=HandoffState.FINISHED, finish_reason=FinishReason.LENGTH, num_tokens=11)
    assert effects == (
        told(EventName.DECODE_RELEASED, 8, "decoding"),
        fx.StoreRecord(write=5, record=last, last=4),
    )
    handoff, effects = written(handoff, 9)
    assert effects == (
        told(EventName.REQUEST_FINISHED, 9, "finished", total_ms=8000.0, num_tokens=11, finish_reason="length"),
        fx.Forget(),
    )
    assert (handoff.record, handoff.forgotten, handoff.ledger) == (last, True, None)
    assert (handoff.submit_answered, handoff.router_answered) == (True, True)


def mixed() -> Handoff:
    """A handoff to a mixed worker that has been asked to run, at 2 s."""
    begun = submitted(delivered=3)
    handoff, _ = begin(
        replace(begun, submit=replace(begun.submit, route=MixedRoute(mixed=MIXED)), planned=()),
        POLICY,
    )
    handoff, effects = written(handoff, 2)
    assert effects == (
        fx.AnswerSubmit(error=None),
        fx.Publish(
            name=EventName.REQUEST_SUBMITTED,
            at_ns=2 * SECOND,
            fields={"phase": "reserving", "mixed_worker": "m0", "num_tokens": 40},
        ),
        fx.AskRun(
            role=WorkerRole.MIXED,
            worker=MIXED,
            message=RunMixed(
                handoff_id="r1-0",
                request_id="r1",
                attempt=0,
                router_id="router-0",
                incarnation="im",
                fence=4,
                num_prompt_tokens=40,
                prompt_hash="h",
                sampling=SAMPLING,
                timeout_ms=9_000,
                num_delivered_tokens=3,
            ),
        ),
    )
    return handoff


def test_a_life_on_a_mixed_worker() -> None:
    """Run, end: the prompt's times come with the end and are counted once."""
    handoff = mixed()
    handoff, effects = step(handoff, ev.RunAccepted(at_ns=3 * SECOND, rpc_ms=0.25))
    store = effects[-1]
    assert isinstance(store, fx.StoreRecord)
    assert (store.write, store.last, store.record.state) == (2, 1, HandoffState.DECODING)
    accepted = {"phase": "reserving", "mixed_worker": "m0", "rpc_ms": 0.25, "started_ns": 2 * SECOND}
    assert effects[:-1] == (fx.Publish(name=EventName.PREFILL_ACCEPTED, at_ns=3 * SECOND, fields=accepted),)
    handoff, _ = written(handoff, 3)
    prompt = PromptTimes(queue_ms=1.0, compute_ms=2.0)
    ended = RequestEnded(
        handoff_id="r1-0", incarnation="im", num_tokens=9, finish_reason=FinishReason.STOP, prompt=prompt
    )
    handoff, effects = step(handoff, ev.WorkerEnded(at_ns=4 * SECOND, message=ended))
    assert effects[:-1] == (
        fx.Publish(
            name=EventName.DECODE_RELEASED, at_ns=4 * SECOND, fields={"phase": "decoding", "mixed_worker": "m0"}
        ),
        fx.Measured(prompt=prompt),
    )
    assert step(handoff, ev.WorkerEnded(at_ns=4 * SECOND, message=ended)) == (handoff, ())
    handoff, effects = written(handoff, 5)
    end = {
        "phase": "finished",
        "mixed_worker": "m0",
        "total_ms": 4000.0,
        "num_tokens": 9,
        "finish_reason": "stop",
    }
    assert effects == (
        fx.Publish(name=EventName.REQUEST_FINISHED, at_ns=5 * SECOND, fields=end),
        fx.Forget(),
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
