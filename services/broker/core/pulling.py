"""Pulling: decode reads some of the cache itself once prefill has finished, under the request's lock.

The lock is the right to move the request's bytes by pulling. The broker takes it for decode, counts how often, and frees it
when decode says that no shard is being read any more, or when the handoff ends. Only with a free lock is there a commit.
"""

from __future__ import annotations

import msgspec

from contracts.events import EventName
from contracts.handoff import HandoffState, PrefillFinished
from contracts.pull import PullEnded, RequestLock, Transfer
from contracts.workers import WorkerRole
from services.broker.core import messages
from services.broker.core.deadline_text import moment_before
from services.broker.core.effects import AskPull
from services.broker.core.handoff import refusal
from services.broker.core.turn import Turn


def begin(turn: Turn, message: PrefillFinished) -> None:
    """The prompt is computed: take the lock for decode, and let it read. An adopted lock stays the one that it was."""
    handoff, source = turn.handoff, message.source
    prefill = handoff.workers[WorkerRole.PREFILL]
    if source is None:
        turn.fail(messages.protocol("source: a prefill whose cache decode pulls names what may be read"))
        return
    if (source.worker_id, source.incarnation) != (prefill.worker_id, prefill.incarnation):
        turn.fail(messages.protocol(f"source is of {source.worker_id} {source.incarnation}, not of {prefill}"))
        return
    lock = handoff.record.lock
    if lock is None:
        lock = RequestLock(
            number=handoff.num_locks + 1,
            holder=handoff.workers[WorkerRole.DECODE],
            taken_at=moment_before(handoff.record.deadline_at, (handoff.deadline_ns - turn.at_ns) / 1e9),
        )
        turn.set(num_locks=lock.number, lock_taken_ns=turn.at_ns)
        record = messages.with_progress(turn.handoff)
        turn.set(record=msgspec.structs.replace(record, lock=lock, source=source))
        turn.publish(EventName.REQUEST_LOCKED, lock=lock.number, lock_holder=lock.holder.worker_id)
    else:
        turn.amend(source=source)
    turn.effects.append(AskPull(worker=lock.holder, message=messages.pull(turn.handoff, source, lock, turn.at_ns)))


def accepted(turn: Turn) -> None:
    """Decode took the pull over. What it told another broker of it is asked for."""
    handoff = turn.handoff
    if handoff.terminal:
        turn.release_again(WorkerRole.DECODE)
        return
    if handoff.record.lock is None or handoff.pull_accepted:
        return
    turn.set(pull_accepted=True)
    if handoff.adopted and turn.open and handoff.reading:
        turn.ask_parts(WorkerRole.DECODE)


def ended(turn: Turn, message: PullEnded) -> None:
    """Decode reads nothing any more: the lock is free. What it says of another taking of the lock is old."""
    handoff = turn.handoff
    lock = handoff.record.lock
    if refusal(handoff, message) or not turn.open or turn.state is not HandoffState.PREFILLING:
        return
    if lock is None or message.lock != lock.number:
        return
    turn.set(pull_ended=message, record=messages.with_progress(handoff))
    turn.unlock(
        wait_ms=message.wait_ms,
        merge_ms=sum(each.merge_ms for each in message.merges),
        total_ms=message.total_ms,
        duration_ms=turn.since(handoff.lock_taken_ns) if handoff.lock_taken_ns else None,
        started_ns=handoff.lock_taken_ns or None,
        parallel=message.parallel,
        error=message.error,
        **_moved(turn),
    )
    if message.error is not None:
        turn.fail(message.error)
    elif handoff.ledger is not None and handoff.ledger.open_by(Transfer.PULL):
        turn.ask_parts(WorkerRole.DECODE)  # it has reported everything: a report is late, or lost


def _moved(turn: Turn) -> dict[str, int]:
    """How much has been pulled, as far as it was reported."""
    pulled = [one for one in turn.handoff.record.progress if one.transfer is Transfer.PULL]
    return {"num_parts": sum(one.num_done for one in pulled), "num_bytes": sum(one.num_bytes for one in pulled)}
