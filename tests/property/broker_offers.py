"""What workers and routers may say in answer to each effect of a broker's core, by what goes wrong."""

from __future__ import annotations

import msgspec

from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import (
    Grant,
    PrefillFinished,
    RequestEnded,
    Reserved,
    TakenOver,
)
from contracts.manifest import Role
from contracts.pull import PullEnded
from contracts.requests import FinishReason
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from tests.property.broker_model import (
    DIGEST,
    HANDOFF,
    OUTAGE,
    PLANNED,
    PULLED,
    PUSHED_BESIDE_A_PULL,
    REPORTS,
    SOURCE,
    TROUBLE,
    WRONG_REPORT,
)


def honest(effect: fx.Effect) -> tuple[ev.Event, ...]:
    """What well-behaved workers answer."""
    match effect:
        case fx.AskPlan():
            return (ev.PlanFound(at_ns=0, planned=PLANNED, block_size=1),)
        case fx.AskReserve():
            grant = Grant(worker_id="d0", incarnation="id", generation=1, block_ids=(0,), slot=0)
            answer = Reserved(handoff_id=HANDOFF, grant=grant, num_cached_tokens=0, prepare_ms=1.0)
            return (ev.DecodeReserved(at_ns=0, answer=answer, rpc_ms=1.0),)
        case fx.AskRun(role=WorkerRole.PREFILL):
            done = PrefillFinished(handoff_id=HANDOFF, incarnation="ip", first_token=5)
            reports = tuple(ev.PartsReported(at_ns=0, report=each) for each in REPORTS)
            return (ev.RunAccepted(at_ns=0, rpc_ms=1.0), *reports, ev.PrefillEnded(at_ns=0, message=done))
        case fx.AskRun():
            return (ev.RunAccepted(at_ns=0, rpc_ms=1.0), ended("im"))
        case fx.AskCommit():
            over = TakenOver(
                handoff_id=HANDOFF, incarnation="id", prepare_ms=0, enqueue_ms=0, total_ms=0, first_step_ns=0
            )
            return (
                ev.CommitAccepted(at_ns=0, rpc_ms=1.0),
                ev.DecodeTookOver(at_ns=0, message=over),
                ended("id"),
            )
        case fx.AskRelease(role=role):
            return (ev.ReleaseSettled(at_ns=0, role=role, acknowledged=True),)
        case fx.CheckParts():
            return (ev.PartsOverdue(at_ns=0),)
        case _:
            return ()


def unasked(effect: fx.Effect) -> tuple[ev.Event, ...]:
    """Honest workers, and no clock that asks for parts again."""
    return () if isinstance(effect, fx.CheckParts) else honest(effect)


def ended(incarnation: str, error: ErrorInfo | None = None) -> ev.WorkerEnded:
    """The last word of a decode or mixed worker."""
    reason = FinishReason.LENGTH if error is None else None
    return ev.WorkerEnded(
        at_ns=0,
        message=RequestEnded(
            handoff_id=HANDOFF, incarnation=incarnation, num_tokens=3, finish_reason=reason, error=error
        ),
    )


def refusing(effect: fx.Effect) -> tuple[ev.Event, ...]:
    """Workers that may also refuse, or fail after they have accepted."""
    match effect:
        case fx.AskReserve():
            bad: tuple[ev.Event, ...] = (ev.AskRefused(at_ns=0, ask=ev.Ask.RESERVE, error=TROUBLE),)
        case fx.AskRun(role=WorkerRole.PREFILL):
            failed = PrefillFinished(handoff_id=HANDOFF, incarnation="ip", error=TROUBLE)
            bad = (
                ev.AskRefused(at_ns=0, ask=ev.Ask.RUN, error=TROUBLE),
                ev.PrefillEnded(at_ns=0, message=failed),
                ev.PartsReported(at_ns=0, report=WRONG_REPORT),
            )
        case fx.AskRun():
            bad = (ev.AskRefused(at_ns=0, ask=ev.Ask.RUN, error=TROUBLE), ended("im", TROUBLE))
        case fx.AskCommit():
            bad = (ev.AskRefused(at_ns=0, ask=ev.Ask.COMMIT, error=TROUBLE), ended("id", TROUBLE))
        case _:
            bad = ()
    return (*honest(effect), *bad)


def pulling(effect: fx.Effect) -> tuple[ev.Event, ...]:
    """A decode worker that pulls states: prefill pushes the rest, and lets it read."""
    match effect:
        case fx.AskReserve():
            (answered,) = honest(effect)
            assert isinstance(answered, ev.DecodeReserved)
            answer = msgspec.structs.replace(answered.answer, pulled=(Role.SSM,))
            return (msgspec.structs.replace(answered, answer=answer),)
        case fx.AskRun(role=WorkerRole.PREFILL):
            done = PrefillFinished(handoff_id=HANDOFF, incarnation="ip", first_token=5, source=SOURCE)
            reports = tuple(ev.PartsReported(at_ns=0, report=each) for each in PUSHED_BESIDE_A_PULL)
            return (ev.RunAccepted(at_ns=0, rpc_ms=1.0), *reports, ev.PrefillEnded(at_ns=0, message=done))
        case fx.AskPull(message=message):
            return (
                ev.PullAccepted(at_ns=0, rpc_ms=1.0),
                ev.PartsReported(at_ns=0, report=PULLED),
                pull_over(message.lock),
            )
        case _:
            return unasked(effect)


def pull_over(lock: int, error: ErrorInfo | None = None) -> ev.PullOver:
    """Decode's last word about one pull."""
    message = PullEnded(handoff_id=HANDOFF, incarnation="id", lock=lock, error=error)
    return ev.PullOver(at_ns=0, message=message)


def pulling_badly(effect: fx.Effect) -> tuple[ev.Event, ...]:
    """The same with refusals, pulls that fail, and parts that move the wrong way."""
    match effect:
        case fx.AskPull(message=message):
            refused = ev.AskRefused(at_ns=0, ask=ev.Ask.PULL, error=TROUBLE)
            return (*pulling(effect), refused, pull_over(message.lock, TROUBLE))
        case fx.AskRun(role=WorkerRole.PREFILL):
            closed = PrefillFinished(handoff_id=HANDOFF, incarnation="ip", first_token=5)
            both_ways = ev.PartsReported(at_ns=0, report=REPORTS[2])
            return (*pulling(effect), both_ways, ev.PrefillEnded(at_ns=0, message=closed))
        case fx.AskPlan():
            return (*honest(effect), ev.AskRefused(at_ns=0, ask=ev.Ask.PLAN, error=TROUBLE))
        case _:
            return pulling(effect)


def through(effect: fx.Effect) -> tuple[ev.Event, ...]:
    """A decode worker that has ended a request whose commit it is asked for again."""
    answers = unasked(effect)
    if isinstance(effect, fx.AskCommit) and effect.message.fence > 1:
        gone = ErrorInfo(code=ErrorCode.CANCELLED, message="released already")
        return (*answers, ev.AskRefused(at_ns=0, ask=ev.Ask.COMMIT, error=gone))
    return answers


def verifying(effect: fx.Effect) -> tuple[ev.Event, ...]:
    """A decode worker that wants digests, and a prefill worker that brings them, or no longer knows them."""
    match effect:
        case fx.AskReserve():
            (answered,) = honest(effect)
            assert isinstance(answered, ev.DecodeReserved)
            return (msgspec.structs.replace(answered, answer=msgspec.structs.replace(answered.answer, verify=True)),)
        case fx.AskRun(role=WorkerRole.PREFILL):
            done = PrefillFinished(handoff_id=HANDOFF, incarnation="ip", first_token=5, digests=(DIGEST,))
            reports = tuple(ev.PartsReported(at_ns=0, report=each) for each in REPORTS)
            return (ev.RunAccepted(at_ns=0, rpc_ms=1.0), *reports, ev.PrefillEnded(at_ns=0, message=done))
        case fx.AskParts(role=role):
            unknown = ErrorInfo(code=ErrorCode.UNKNOWN_HANDOFF, message="what?")
            return (
                ev.PartsUnanswered(at_ns=0, role=role, error=unknown),
                ev.PartsUnanswered(at_ns=0, role=role, error=OUTAGE),
            )
        case fx.CheckParts():
            return (ev.PartsOverdue(at_ns=0),)
        case _:
            return unasked(effect)


def short(effect: fx.Effect) -> tuple[ev.Event, ...]:
    """A prefill whose first token is the last one."""
    answers = honest(effect)
    if isinstance(effect, fx.AskRun):
        done = PrefillFinished(handoff_id=HANDOFF, incarnation="ip", first_token=5, finish_reason=FinishReason.STOP)
        answers = (*answers[:-1], ev.PrefillEnded(at_ns=0, message=done))
    return answers
