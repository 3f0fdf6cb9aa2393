"""What whole lives of a handoff are held against: its record, its events, its releases."""

from __future__ import annotations

from msgspec.structs import replace

from contracts.events import EventName
from contracts.handoff import (
    HandoffRecord,
    HandoffState,
    ReleaseHandoff,
    RunMixed,
)
from contracts.requests import (
    DisaggregatedRoute,
    MixedRoute,
    SamplingParams,
    WorkerRef,
)
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff
from services.broker.core.step import begin, step
from tests.unit.broker_steps import (
    DECODE,
    POLICY,
    PREFILL,
    SECOND,
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
