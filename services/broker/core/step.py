"""The life of a handoff, as a pure function: `step(handoff, event) -> (handoff, effects)`.

    RESERVING -> PREFILLING -> COMMITTED -> DECODING -> FINISHED      any of the first four -> CANCELLED or FAILED
    RESERVING -> DECODING -> FINISHED                                 on a mixed worker, without a transfer
    PREFILLING -> FINISHED                                            when the first token ends the request

What holds, whatever comes late, twice, out of order, or not at all:

1. Decode is asked to commit at most once by a broker, only with a closed ledger, a finished prefill and a free lock, and only
   after the bucket took COMMITTED. That compare-and-set is the only change of hands; whoever loses one obeys what it finds.
   Who finds the record of a later term asks and writes nothing more.
2. Once the deadline has been told, the handoff is terminal, whatever the bucket does.
3. Every worker that was told of the request is told to release it, or has said that it did.
4. The router gets one final answer from here when the handoff fails or is cancelled, none when it finishes.
5. Nothing is asked of a worker after a release, but to release again.
6. Decode is asked to pull only while it holds the request's lock, which it gets after prefill has finished, once. The lock is
   free in every record that is committed or terminal.
7. A handoff that another broker began goes on by the same rules. What that one had been told is asked for again, and a grant
   that decode no longer holds fails it.
"""

from __future__ import annotations

from typing import assert_never

from services.broker.core import adoption, messages, progress, pulling, writes
from services.broker.core.deadline_text import moment_before
from services.broker.core.events import (
    Adopted,
    AskRefused,
    CancelRequested,
    CommitAccepted,
    DeadlinePassed,
    DecodeReserved,
    DecodeTookOver,
    Event,
    PartsOverdue,
    PartsReported,
    PartsUnanswered,
    PlanFound,
    PrefillEnded,
    PullAccepted,
    PullOver,
    RecordConflict,
    RecordStored,
    RecordUnwritten,
    ReleaseSettled,
    RouterGone,
    RunAccepted,
    Submitted,
    WorkerEnded,
    WorkerGone,
)
from services.broker.core.handoff import Handoff, Policy
from services.broker.core.turn import Outcome, Turn
from services.broker.core.writes import pump


def begin(event: Submitted, policy: Policy) -> Outcome:
    """A handoff that nobody knows yet: write its record before anybody is asked for anything."""
    record = messages.first_record(
        event.submit,
        fence=policy.fence,
        deadline_at=event.deadline_at,
        submitted_at=moment_before(event.deadline_at, (event.deadline_ns - event.at_ns) / 1e9),
        traceparent=event.traceparent,
    )
    handoff = Handoff(
        policy=policy,
        record=record,
        deadline_ns=event.deadline_ns,
        begun_ns=event.at_ns,
        planned=event.planned,
        block_size=event.block_size,
    )
    turn = Turn(handoff, event.at_ns)
    pump(turn)
    return turn.outcome


def adopt(event: Adopted, policy: Policy) -> Outcome:
    """A handoff of a broker that is gone: it goes on from its record and from what both workers still know."""
    turn = adoption.adopted(event, policy)
    pump(turn)
    return turn.outcome


def step(handoff: Handoff, event: Event) -> Outcome:
    """What follows from `event`.

    An event that says nothing new changes nothing and asks for nothing, except that a late acceptance of an ended handoff is
    answered by another release.
    """
    if handoff.is_elsewhere:  # it made way for what another broker wrote
        return handoff, ()
    turn = Turn(handoff, event.at_ns)
    match event:
        case PlanFound():
            adoption.plan_found(turn, event)
        case RecordStored():
            writes.stored(turn, event.write, event.revision)
        case RecordConflict():
            writes.conflicted(turn, event.write, event.found, event.revision)
        case RecordUnwritten():
            writes.unwritten(turn, event.write, event.error)
        case DecodeReserved():
            progress.reserved(turn, event.answer, event.rpc_ms)
        case RunAccepted():
            progress.run_accepted(turn, event.rpc_ms)
        case PullAccepted():
            pulling.accepted(turn)
        case CommitAccepted():
            progress.commit_accepted(turn, event.rpc_ms)
        case AskRefused():
            progress.refused(turn, event.ask, event.error)
        case PartsReported():
            progress.parts_reported(turn, event.report)
        case PartsUnanswered():
            adoption.parts_unanswered(turn, event)
        case PartsOverdue():
            progress.check_parts(turn)
        case PrefillEnded():
            progress.prefill_ended(turn, event.message)
        case PullOver():
            pulling.ended(turn, event.message)
        case DecodeTookOver():
            progress.decode_took_over(turn, event.message)
            writes.catch_up(turn)
        case WorkerEnded():
            progress.worker_ended(turn, event.message)
            writes.catch_up(turn)
        case CancelRequested():
            progress.cancel(turn, event)
            writes.catch_up(turn)
        case DeadlinePassed():
            progress.expire(turn)
        case WorkerGone():
            progress.worker_gone(turn, event.worker)
        case RouterGone():
            progress.router_gone(turn, event)
        case ReleaseSettled():
            progress.settle(turn, event)
        case _:
            assert_never(event)
    pump(turn)
    return turn.outcome
