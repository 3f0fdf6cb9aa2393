"""The life of a handoff, as a pure function: `step(handoff, event) -> (handoff, effects)`.

    RESERVING -> PREFILLING -> COMMITTED -> DECODING -> FINISHED      any of the first four -> CANCELLED or FAILED
    RESERVING -> DECODING -> FINISHED                                 on a mixed worker, without a transfer
    PREFILLING -> FINISHED                                            when the first token ends the request

What holds, whatever comes late, twice, out of order, or not at all:

1. Decode is asked to commit at most once, only with a closed ledger and a finished prefill, and only after the bucket took
   COMMITTED. That compare-and-set is the only change of hands; whoever loses one obeys what it finds.
2. Once the deadline has been told, the handoff is terminal, whatever the bucket does.
3. Every worker that was told of the request is told to release it, or has said that it did.
4. The router gets one final answer from here when the handoff fails or is cancelled, none when it finishes.
5. Nothing is asked of a worker after a release, but to release again.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import (
    HandoffState,
)
from services.broker.core import messages, progress, writes
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
    PrefillEnded,
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
        event.submit, fence=policy.fence, deadline_at=event.deadline_at, traceparent=event.traceparent
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
    """A handoff of a broker that is gone: what has been committed goes on, what has not fails, so that the router tries again.

    One that has ended may have done so in the last moment of that broker: it is told again to all whom it concerns, but not
    to people.
    """
    record = msgspec.structs.replace(event.record, fence=policy.fence)
    handoff = Handoff(
        policy=policy,
        record=record,
        deadline_ns=event.deadline_ns,
        begun_ns=event.at_ns,
        stored=event.record,
        revision=event.revision,
        submit_answered=True,
    )
    turn = Turn(handoff, event.at_ns)
    turn.set(told=frozenset(handoff.workers))
    match record.state:
        case HandoffState.RESERVING | HandoffState.PREFILLING:
            turn.fail(ErrorInfo(code=ErrorCode.BUS_UNAVAILABLE, message="the broker restarted before the commit"))
        case HandoffState.COMMITTED:
            turn.ask_commit()
        case HandoffState.DECODING:
            turn.set(run_accepted=True, commit_asked=True, commit_accepted=True, taken_over=True)
        case _:
            turn.set(stored=messages.for_bucket(record))
            turn.part()
    pump(turn)
    return turn.outcome


def step(handoff: Handoff, event: Event) -> Outcome:
    """What follows from `event`.

    An event that says nothing new changes nothing and asks for nothing, except that a late acceptance of an ended handoff is
    answered by another release.
    """
    if handoff.forgotten and not handoff.terminal:  # it made way for what another broker wrote
        return handoff, ()
    turn = Turn(handoff, event.at_ns)
    match event:
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
        case CommitAccepted():
            progress.commit_accepted(turn, event.rpc_ms)
        case AskRefused():
            progress.refused(turn, event.ask, event.error)
        case PartsReported():
            progress.parts_reported(turn, event.report)
        case PartsOverdue():
            progress.check_parts(turn)
        case PrefillEnded():
            progress.prefill_ended(turn, event.message)
        case DecodeTookOver():
            progress.decode_took_over(turn, event.message)
        case WorkerEnded():
            progress.worker_ended(turn, event.message)
        case CancelRequested():
            progress.cancel(turn, event)
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
