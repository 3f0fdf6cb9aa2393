"""Whole lives of a handoff: every message, record and event of every step, field by field."""

from __future__ import annotations

from msgspec.structs import replace

from contracts.events import EventName
from contracts.handoff import (
    CommitHandoff,
    HandoffState,
    PartDigest,
    PromptTimes,
    RequestEnded,
    ReserveDecode,
    RunPrefill,
    SourceProgress,
    TakenOver,
)
from contracts.manifest import Namespace, Role
from contracts.pull import Transfer
from contracts.requests import (
    FinishReason,
)
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.step import begin, step
from tests.unit.broker_lives import BOTH, RECORD, SAMPLING, mixed, release, told, written
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
    submitted,
)


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
