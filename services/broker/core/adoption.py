"""Adoption: a broker goes on with a handoff that another one, which is gone, has begun.

Everything is asked for again, which for the workers is delivery: decode answers with the grant that it gave, prefill goes on
computing, and what both had reported comes with their answers to `parts`. Only what a worker no longer knows is lost.
"""

from __future__ import annotations

import msgspec

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import HandoffRecord, HandoffState, Reserved
from contracts.workers import WorkerRole
from services.broker.core import messages
from services.broker.core.deadline_text import seconds_between
from services.broker.core.effects import AnswerSubmit, AskPlan, CheckParts
from services.broker.core.events import Adopted, PartsUnanswered, PlanFound
from services.broker.core.handoff import Handoff, Policy
from services.broker.core.turn import Turn


def adopted(event: Adopted, policy: Policy) -> Turn:
    """The first step. A handoff that has ended is told again to all whom it concerns, but not to people.

    Workers are asked once the bucket holds this term: until then whoever led may still write, and what workers refuse may be
    true of what it asked for.
    """
    record = msgspec.structs.replace(event.record, fence=policy.fence)
    handoff = Handoff(
        policy=policy,
        record=record,
        deadline_ns=event.deadline_ns,
        begun_ns=event.begun_ns,
        stored=event.record,
        revision=event.revision,
        submit_answered=True,
        adopted=True,
        resumed=False,
        num_locks=_num_locks(record),
    )
    turn = Turn(handoff, event.at_ns)
    turn.set(told=frozenset(handoff.workers))
    if record.state.terminal:
        turn.set(stored=messages.for_bucket(record))
        turn.part()
        return turn
    turn.publish(EventName.HANDOFF_ADOPTED)
    turn.set(may_be_over=_may_be_over(turn))
    _believe(turn)
    if messages.for_bucket(record) == event.record:  # it is of this very term
        resume(turn)
    return turn


def resume(turn: Turn) -> None:
    """The bucket holds this term: ask the workers for what the broker before had asked them for. Once."""
    handoff = turn.handoff
    if handoff.resumed or not turn.open:
        return
    turn.set(resumed=True)
    match turn.state:
        case HandoffState.RESERVING | HandoffState.PREFILLING:
            if turn.is_mixed:
                turn.ask_run(WorkerRole.MIXED)
            else:
                turn.effects.append(AskPlan(route=handoff.record.route))
        case HandoffState.COMMITTED if handoff.digests_awaited:
            turn.ask_parts(WorkerRole.PREFILL)
        case HandoffState.COMMITTED:
            turn.ask_commit()
        case HandoffState.DECODING if not turn.is_mixed:
            turn.release(WorkerRole.PREFILL, "decode has taken over")  # the broker before may not have come to that
        case _:
            pass  # it decodes


def obey(turn: Turn, found: HandoffRecord, revision: int) -> None:
    """The broker before was not quite gone: it committed after its record was read. Go on from what it wrote last."""
    record = msgspec.structs.replace(found, fence=turn.handoff.policy.fence)
    turn.set(record=record, stored=found, revision=revision, writing=None, ledger=None, finished=None, resumed=False)
    if turn.open:
        _believe(turn)


def take_over(turn: Turn, found: HandoffRecord, revision: int) -> None:
    """The request is under way already: a broker of an earlier term, which only stood still, took it on before it came here."""
    turn.set(told=frozenset(turn.handoff.workers))
    if turn.handoff.terminal:  # its deadline has passed here: the end stays, and is written over what was found
        turn.set(stored=found, revision=revision, writing=None)
        turn.part()
        return
    turn.set(
        adopted=True,
        planned=(),
        submit_answered=True,
        num_locks=_num_locks(found),
        begun_ns=_begun_ns(turn.handoff, found),
    )
    turn.effects.append(AnswerSubmit(error=None))
    obey(turn, found, revision)
    turn.set(may_be_over=_may_be_over(turn))
    turn.publish(EventName.HANDOFF_ADOPTED)


def _num_locks(record: HandoffRecord) -> int:
    """How often the request's lock has been taken, as far as its record says."""
    return 0 if record.lock is None else record.lock.number


def _begun_ns(handoff: Handoff, found: HandoffRecord) -> int:
    """When it was submitted first, as the record that was found says; where it does not, when it was submitted here."""
    try:
        lasts_s = seconds_between(found.submitted_at, found.deadline_at)
    except ValueError:
        return handoff.begun_ns
    return min(handoff.begun_ns, handoff.deadline_ns - round(lasts_s * 1e9))


def _may_be_over(turn: Turn) -> bool:
    """Whether a mixed worker, which is asked to run once more, may be through with it."""
    return turn.is_mixed and turn.state in {HandoffState.RESERVING, HandoffState.PREFILLING}


def _believe(turn: Turn) -> None:
    """What a record says of what lies behind it."""
    match turn.state:
        case HandoffState.COMMITTED:
            turn.set(commit_asked=True, digests_awaited=turn.handoff.record.verify)
        case HandoffState.DECODING:
            turn.set(run_accepted=True, commit_asked=True, commit_accepted=True, taken_over=True)
        case _:
            pass


def plan_found(turn: Turn, event: PlanFound) -> None:
    """What is owed is known: ask decode for its grant."""
    handoff = turn.handoff
    waiting = turn.open and handoff.adopted and handoff.ledger is None
    if waiting and turn.state in {HandoffState.RESERVING, HandoffState.PREFILLING} and not handoff.planned:
        turn.set(planned=event.planned, block_size=event.block_size)
        turn.ask_reserve()


def keeps_grant(turn: Turn, answer: Reserved) -> bool:
    """Whether decode still holds what it had granted to this handoff; else the handoff fails, and the router tries again."""
    record = turn.handoff.record
    if record.grant is None:
        return True
    told = (record.grant, record.num_cached_tokens, record.pulled, record.verify)
    again = (messages.without_secret(answer.grant), answer.num_cached_tokens, answer.pulled, answer.verify)
    if told == again:
        return True
    text = "another broker went on, and decode no longer held what it had granted"
    turn.fail(ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message=text))
    return False


def parts_unanswered(turn: Turn, event: PartsUnanswered) -> None:
    """Without digests decode is asked to commit all the same: it may have done so for the broker before."""
    handoff = turn.handoff
    if not turn.open or not handoff.digests_awaited or event.role is not WorkerRole.PREFILL:
        return
    if event.error.code is ErrorCode.UNKNOWN_HANDOFF:
        commit_again(turn)
    else:
        turn.effects.append(CheckParts(after_ms=handoff.policy.parts_query_ms))


def commit_again(turn: Turn) -> None:
    """Nothing more is to be learnt before the commit of an adopted handoff is sent: now, or once the bucket holds this term."""
    turn.set(digests_awaited=False)
    if turn.handoff.resumed and not turn.handoff.taken_over:
        turn.ask_commit()
