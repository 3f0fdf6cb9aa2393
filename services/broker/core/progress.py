"""How a handoff goes on and how it ends: what each event means, apart from those of the record."""

from __future__ import annotations

from typing import Any, Final, assert_never

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.guesses import Guesses
from contracts.handoff import (
    HandoffState,
    PartsReport,
    PrefillFinished,
    RequestEnded,
    Reserved,
    TakenOver,
)
from contracts.pull import Transfer
from contracts.requests import CancelWork, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core import adoption, messages, pulling
from services.broker.core.effects import CheckParts, HintCancel
from services.broker.core.events import (
    Ask,
    CancelRequested,
    ReleaseSettled,
    RouterGone,
)
from services.broker.core.handoff import Verdict, refusal
from services.broker.core.ledger import Ledger, LedgerError
from services.broker.core.turn import Turn

MAX_QUERY_DOUBLINGS: Final = 5
_NO_DIGESTS: Final = messages.protocol("digests: a prefill whose cache decode verifies brings some")


def reserved(turn: Turn, answer: Reserved, rpc_ms: float) -> None:
    """Decode has set memory aside: let prefill compute into it."""
    handoff = turn.handoff
    if handoff.terminal:
        turn.release_again(WorkerRole.DECODE)
        return
    worker = handoff.workers.get(WorkerRole.DECODE)
    again = handoff.adopted and turn.state is HandoffState.PREFILLING and handoff.ledger is None
    expected = turn.state is HandoffState.RESERVING or again
    if not turn.open or not expected or WorkerRole.DECODE not in handoff.told:
        return
    grant = answer.grant
    if worker is None or (grant.worker_id, grant.incarnation) != (worker.worker_id, worker.incarnation):
        turn.fail(messages.protocol(f"the grant is for {grant.worker_id} {grant.incarnation}, not for {worker}"))
        return
    if not 0 <= answer.num_cached_tokens <= handoff.record.num_prompt_tokens:
        turn.fail(messages.protocol(f"num_cached_tokens: {answer.num_cached_tokens} is not within the prompt"))
        return
    if not adoption.keeps_grant(turn, answer):
        return
    ledger = Ledger.open(
        handoff.planned,
        num_cached_tokens=answer.num_cached_tokens,
        num_prompt_tokens=handoff.record.num_prompt_tokens,
        block_size=handoff.block_size,
        pulled=answer.pulled,
    )
    turn.publish(
        EventName.DECODE_RESERVED,
        rpc_ms=rpc_ms,
        prepare_ms=answer.prepare_ms,
        num_tokens=answer.num_cached_tokens,
        destination_dp_rank=grant.dp_rank,
    )
    turn.amend(
        state=HandoffState.PREFILLING,
        grant=grant,
        num_cached_tokens=answer.num_cached_tokens,
        pulled=answer.pulled,
        verify=answer.verify,
        drafts=ledger.has_drafts,
    )
    turn.set(ledger=ledger)
    if turn.handoff.lacks_digests:
        turn.fail(_NO_DIGESTS)
        return
    turn.ask_run(WorkerRole.PREFILL)


def run_accepted(turn: Turn, rpc_ms: float) -> None:
    """The run was taken over."""
    mixed = turn.handoff.ending_role is WorkerRole.MIXED
    role = WorkerRole.MIXED if mixed else WorkerRole.PREFILL
    if turn.handoff.terminal:
        turn.release_again(role)
        return
    if role not in turn.handoff.told or turn.handoff.run_accepted:
        return
    turn.set(run_accepted=True)
    turn.publish(EventName.PREFILL_ACCEPTED, rpc_ms=rpc_ms, started_ns=turn.handoff.asked_ns)
    if mixed and turn.open:
        turn.amend(state=HandoffState.DECODING)
    elif turn.handoff.adopted and turn.open and turn.state is HandoffState.PREFILLING:
        turn.ask_parts(WorkerRole.PREFILL)  # it may have reported everything before
        _check_later(turn)


def parts_reported(turn: Turn, report: PartsReport) -> None:
    """A source rank tells what it has pushed, or decode what it has pulled."""
    handoff = turn.handoff
    if not turn.open or turn.state is not HandoffState.PREFILLING or handoff.ledger is None:
        return
    reporter = WorkerRole.DECODE if report.transfer is Transfer.PULL else WorkerRole.PREFILL
    if report.incarnation != handoff.workers[reporter].incarnation:
        return
    try:
        ledger = handoff.ledger.take(report)
    except LedgerError as error:
        turn.fail(error.info)
        return
    turn.set(ledger=ledger)
    source = (report.transfer, report.source_rank)
    newly_closed = source in ledger.closed_sources - handoff.ledger.closed_sources
    if newly_closed and report.transfer is Transfer.PUSH:
        turn.publish(
            EventName.RANK_PUSHED,
            source_dp_rank=report.source_dp_rank,
            source_rank=report.source_rank,
            num_parts=ledger.num_parts(source),
            num_bytes=report.num_bytes,
            duration_ms=report.push_ms,
        )
    if ledger.closed and not handoff.ledger.closed:
        turn.publish(
            EventName.LEDGER_CLOSED,
            num_parts=ledger.num_owed_parts,
            num_bytes=ledger.num_bytes,
            started_ns=handoff.asked_ns,
            duration_ms=turn.since(handoff.asked_ns),
        )


def check_parts(turn: Turn) -> None:
    """The prompt is computed but parts, or the end of a pull, are missing: a report may have been lost."""
    handoff = turn.handoff
    if turn.open and handoff.digests_awaited:
        turn.ask_parts(WorkerRole.PREFILL)
        return
    waiting = turn.open and turn.state is HandoffState.PREFILLING and (handoff.finished is not None or handoff.adopted)
    if not waiting or handoff.commit_ready or handoff.ledger is None:
        return
    if handoff.finished is None or handoff.ledger.open_by(Transfer.PUSH):
        turn.ask_parts(WorkerRole.PREFILL)
    if handoff.num_locks and (handoff.reading or handoff.ledger.open_by(Transfer.PULL)):
        turn.ask_parts(WorkerRole.DECODE)
    turn.set(num_queries=min(handoff.num_queries + 1, MAX_QUERY_DOUBLINGS))
    _check_later(turn)


def prefill_ended(turn: Turn, message: PrefillFinished) -> None:
    """The prompt is computed: its first token, or an error. An error may follow a token: the last pushes outlast the computing."""
    handoff = turn.handoff
    if refusal(handoff, message) or not turn.open:
        return
    if handoff.finished is not None:
        if message.error is not None and turn.state is HandoffState.PREFILLING:
            turn.fail(message.error)
        return
    if handoff.digests_awaited:
        turn.set(finished=message)
        adoption.commit_again(turn)
        return
    if turn.state is not HandoffState.PREFILLING:
        return
    turn.set(finished=message)
    if message.error is not None:
        turn.fail(message.error)
        return
    if message.first_token is None:
        turn.fail(messages.protocol("first_token: a prefill that finished without an error has one"))
        return
    turn.publish(
        EventName.PREFILL_FINISHED,
        prepare_ms=message.queue_ms,
        duration_ms=message.compute_ms,
        total_ms=message.queue_ms + message.compute_ms,
        response_prepare_ms=message.response_prepare_ms,
        num_tokens=handoff.record.num_prompt_tokens - message.num_cached_tokens,
    )
    if message.finish_reason is not None:
        num_tokens = handoff.record.num_delivered_tokens + 1
        turn.judge(Verdict(state=HandoffState.FINISHED, finish_reason=message.finish_reason, num_tokens=num_tokens))
        return
    if turn.handoff.lacks_digests:
        turn.fail(_NO_DIGESTS)
        return
    if turn.handoff.reading:
        pulling.begin(turn, message)
    if not turn.handoff.commit_ready and turn.open:
        _check_later(turn)


def commit_accepted(turn: Turn, rpc_ms: float) -> None:
    """Decode took the commit over."""
    if turn.handoff.commit_asked and not turn.handoff.commit_accepted:
        turn.set(commit_accepted=True)
        turn.publish(EventName.HANDOFF_COMMITTED, rpc_ms=rpc_ms)


def decode_took_over(turn: Turn, message: TakenOver) -> None:
    """Decode has begun: prefill may forget the request."""
    handoff = turn.handoff
    if refusal(handoff, message) or handoff.taken_over:
        return
    if not handoff.commit_asked:
        if turn.open:
            turn.fail(messages.protocol("taken over before the commit"))
        return
    turn.set(taken_over=True)
    if turn.state is HandoffState.COMMITTED:
        turn.amend(state=HandoffState.DECODING)
    turn.publish(
        EventName.TAKEN_OVER,
        prepare_ms=message.prepare_ms,
        enqueue_ms=message.enqueue_ms,
        total_ms=message.total_ms,
        started_ns=message.first_step_ns,
        first_token_prepare_ms=message.first_token_prepare_ms,
        first_token_rpc_ms=message.first_token_rpc_ms,
    )
    turn.release(WorkerRole.PREFILL, "decode has taken over")


def refused(turn: Turn, ask: Ask, error: ErrorInfo) -> None:
    """A worker refused, or did not answer in all of its time. Later signs of life count more."""
    handoff = turn.handoff
    if not turn.open or (
        ask is not Ask.COMMIT
        and turn.state in {HandoffState.COMMITTED, HandoffState.DECODING}
        and turn.handoff.commit_asked
    ):
        return
    match ask:
        case Ask.RESERVE:
            outstanding = handoff.ledger is None and WorkerRole.DECODE in handoff.told
            if outstanding:
                turn.publish(EventName.RESERVE_REFUSED, error=error)
        case Ask.PLAN:
            outstanding = handoff.adopted and not handoff.planned and handoff.ledger is None
        case Ask.PULL:
            outstanding = handoff.record.lock is not None and not handoff.pull_accepted
        case Ask.RUN:
            computing = {WorkerRole.PREFILL, WorkerRole.MIXED} & handoff.told
            heard = handoff.run_accepted or handoff.finished is not None
            heard = heard or (handoff.ledger is not None and bool(handoff.ledger.reports))
            outstanding = bool(computing) and not heard
        case Ask.COMMIT:
            outstanding = handoff.commit_asked and not handoff.commit_accepted and not handoff.taken_over
        case _:
            assert_never(ask)
    if error.code is ErrorCode.CANCELLED and (handoff.may_be_over or ask is Ask.COMMIT):
        # It knows of no such handoff any more. If it was asked before and its answer was lost, it may be through with it: what it
        # said when it ended is delivered until it is written down. If it was cancelled, who did that tells the broker, too.
        return
    if outstanding:
        turn.fail(error)


def worker_ended(turn: Turn, message: RequestEnded) -> None:
    """The last token has been sent, or an error."""
    handoff, role = turn.handoff, turn.handoff.ending_role
    if refusal(handoff, message) or role not in handoff.told:
        return
    if role not in handoff.settled - handoff.unheard:
        _given_back(turn, role, quarantined=message.quarantined)
        turn.publish(EventName.DECODE_RELEASED, quarantined=message.quarantined or None, **_counted(message.guesses))
        turn.measured(message.prompt)
    if role is WorkerRole.DECODE:
        turn.release(WorkerRole.PREFILL, "the request has ended")
    if message.error is not None:
        cancelled = message.error.code is ErrorCode.CANCELLED
        state = HandoffState.CANCELLED if cancelled else HandoffState.FAILED
        turn.judge(Verdict(state=state, error=message.error, num_tokens=message.num_tokens))
    elif role is WorkerRole.DECODE and not handoff.commit_asked:
        turn.fail(messages.protocol("decode ended a request that it was never given"))
    else:
        turn.judge(
            Verdict(state=HandoffState.FINISHED, finish_reason=message.finish_reason, num_tokens=message.num_tokens)
        )


def cancel(turn: Turn, event: CancelRequested) -> None:
    """Nobody waits any more: given up, or complete as the router sees it, which it can be only once tokens were sent."""
    if not turn.open:
        return
    handoff = turn.handoff
    for role in sorted(handoff.told - handoff.settled - handoff.release_asked):
        message = CancelWork(handoff_id=handoff.handoff_id)
        hint = HintCancel(worker=handoff.workers[role], request_id=handoff.record.request_id, message=message)
        turn.effects.append(hint)
    decoding = handoff.commit_asked or turn.state is HandoffState.DECODING
    if event.finish_reason is not None and decoding:
        turn.judge(Verdict(state=HandoffState.FINISHED, finish_reason=event.finish_reason, num_tokens=event.num_tokens))
        return
    state = HandoffState.CANCELLED if event.error is None else HandoffState.FAILED
    error = event.error or ErrorInfo(code=ErrorCode.CANCELLED, message=event.reason)
    turn.judge(Verdict(state=state, error=error, num_tokens=event.num_tokens))


def expire(turn: Turn) -> None:
    """The deadline has passed: end now; the bucket hears of it when it can."""
    if turn.handoff.terminal:
        return
    text = f"the deadline passed while {turn.state}"
    if turn.handoff.num_missing_parts:
        text += f": {turn.handoff.num_missing_parts} of {len(turn.handoff.planned)} parts of the cache had not arrived"
    turn.fail(ErrorInfo(code=ErrorCode.DEADLINE_EXCEEDED, message=text))
    verdict = turn.handoff.verdict
    if verdict is not None:
        turn.conclude(messages.terminal_record(turn.handoff, verdict))


def worker_gone(turn: Turn, worker: WorkerRef) -> None:
    """A worker has lost its lease."""
    handoff = turn.handoff
    roles = [role for role, one in handoff.workers.items() if one == worker]
    if not roles or not turn.open:
        return
    if roles == [WorkerRole.PREFILL] and handoff.digests_awaited:
        adoption.commit_again(turn)  # nobody else has the digests
        return
    if roles == [WorkerRole.PREFILL]:
        # After the commit prefill is not needed; with everything there, not before it either.
        needed = turn.state in {HandoffState.RESERVING, HandoffState.PREFILLING} and not handoff.commit_ready
        if not needed:
            return
    text = f"{roles[0]} worker {worker.worker_id} ({worker.incarnation}) is gone"
    turn.fail(ErrorInfo(code=ErrorCode.WORKER_LOST, message=text))


def router_gone(turn: Turn, event: RouterGone) -> None:
    """A router's start is no more: whatever it asked for is cancelled. One that named no start of itself is not judged."""
    record = turn.handoff.record
    if (record.router_id, record.router_incarnation) == (event.router_id, event.incarnation):
        reason = f"router {event.router_id} ({event.incarnation}) is gone"
        cancel(turn, CancelRequested(at_ns=event.at_ns, reason=reason))


def settle(turn: Turn, event: ReleaseSettled) -> None:
    """A worker holds nothing any more, or does not answer: it is not waited for. Should it answer a later release, that counts."""
    handoff, role = turn.handoff, event.role
    if role not in handoff.release_asked or role in handoff.settled - handoff.unheard:
        return
    if event.acknowledged:
        _given_back(turn, role, quarantined=event.quarantined)
    else:
        turn.set(settled=handoff.settled | {role}, unheard=handoff.unheard | {role})
    # Prefill holds what it has reported until it is released: if it knows nothing of it, the broker before has told people.
    told_before = (
        handoff.adopted and handoff.taken_over and role is WorkerRole.PREFILL and event.response_rpc_ms is None
    )
    if event.acknowledged and not told_before:
        name = EventName.PREFILL_RELEASED if role is WorkerRole.PREFILL else EventName.DECODE_RELEASED
        told = _counted(event.guesses) | {"quarantined": event.quarantined or None}
        turn.publish(name, rpc_ms=event.rpc_ms, response_rpc_ms=event.response_rpc_ms, **told)
        turn.measured(event.prompt)


def _given_back(turn: Turn, role: WorkerRole, *, quarantined: bool) -> None:
    """A worker says that it holds nothing any more; in quarantine its memory is nobody's, and not free."""
    handoff = turn.handoff
    turn.set(settled=handoff.settled | {role}, unheard=handoff.unheard - {role})
    if quarantined:
        turn.set(quarantined=handoff.quarantined | {role})


def _counted(guesses: Guesses | None) -> dict[str, Any]:
    """What came of a worker's guesses, as fields of an event."""
    if guesses is None:
        return {}
    return {
        "num_steps": guesses.num_steps,
        "num_drafted": guesses.num_drafted,
        "num_accepted": guesses.num_accepted,
        "accepted_at": guesses.accepted,
        "draft_ms": guesses.draft_ms,
        "verify_ms": guesses.verify_ms,
    }


def _check_later(turn: Turn) -> None:
    turn.effects.append(CheckParts(after_ms=turn.handoff.policy.parts_query_ms << turn.handoff.num_queries))
