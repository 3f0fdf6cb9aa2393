"""The handoff's record in the bucket: one compare-and-set at a time, and what follows from its outcome."""

from __future__ import annotations

import msgspec

from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import (
    HandoffRecord,
    HandoffState,
)
from services.broker.core import adoption, messages
from services.broker.core.effects import (
    AnswerSubmit,
    Forget,
    StoreRecord,
)
from services.broker.core.handoff import Handoff, Verdict, same_identity
from services.broker.core.turn import Turn


def pump(turn: Turn) -> None:
    """Write what the bucket does not hold yet, unless a write is under way; and end what has ended."""
    handoff = turn.handoff
    if handoff.writing is None and not handoff.forgotten and not _is_anothers(handoff):
        wanted = messages.for_bucket(_wanted(turn))
        if wanted != handoff.stored:
            _write(turn, wanted)
    handoff = turn.handoff
    if handoff.terminal and handoff.writing is None and handoff.told <= handoff.settled and not handoff.forgotten:
        # What is kept of it answers repetitions; the ledger is most of its memory, and nothing asks for it any more.
        turn.set(forgotten=True, ledger=None)
        turn.effects.append(Forget())


def catch_up(turn: Turn) -> None:
    """Somebody asks for what only the bucket can promise, and the last write was given up: try once more, also after the end."""
    handoff = turn.handoff
    if handoff.is_behind and handoff.writing is None and not _is_anothers(handoff):
        _write(turn, messages.for_bucket(_wanted(turn)))


def _is_anothers(handoff: Handoff) -> bool:
    """Whether it has ended here while a broker of a later term goes on with it: that one has to hear of the end, and writes it."""
    return handoff.terminal and handoff.stored is not None and handoff.stored.fence > handoff.policy.fence


def _write(turn: Turn, wanted: HandoffRecord) -> None:
    write = turn.handoff.num_writes + 1
    turn.set(writing=wanted, num_writes=write)
    turn.effects.append(StoreRecord(write=write, record=wanted, last=turn.handoff.revision or None))


def _wanted(turn: Turn) -> HandoffRecord:
    handoff = turn.handoff
    if handoff.verdict is not None and not handoff.terminal and handoff.stored is not None:
        return messages.terminal_record(handoff, handoff.verdict)
    if handoff.commit_ready and handoff.verdict is None and handoff.finished is not None:
        return msgspec.structs.replace(
            messages.with_progress(handoff),
            state=HandoffState.COMMITTED,
            first_token=handoff.finished.first_token,
            num_prefill_cached_tokens=handoff.finished.num_cached_tokens,
        )
    return handoff.record


def stored(turn: Turn, write: int, revision: int) -> None:
    """The write won: admit, commit or end, whatever it was for."""
    record = turn.handoff.writing
    if record is None or write != turn.handoff.num_writes:
        return
    turn.set(stored=record, revision=revision, writing=None, is_behind=False)
    if not turn.handoff.submit_answered:
        turn.admit()
    if record.state is HandoffState.COMMITTED and turn.open and turn.state is HandoffState.PREFILLING:
        turn.set(record=record)
        turn.ask_commit()
    elif record.state.terminal and not turn.handoff.terminal:
        turn.conclude(record)
    adoption.resume(turn)


def conflicted(turn: Turn, write: int, found: HandoffRecord | None, revision: int) -> None:
    """The write lost: what was found decides."""
    handoff = turn.handoff
    if handoff.writing is None or write != handoff.num_writes:
        return
    if found == handoff.writing:  # an earlier try of this very write got through
        stored(turn, write, revision)
        return
    if (
        handoff.stored is None and found is not None and not handoff.told
    ):  # somebody else's request, or this one in another life
        if same_identity(found, handoff.record) and not found.state.terminal and found.fence < handoff.policy.fence:
            adoption.take_over(turn, found, revision)
        else:
            _yield_to(turn, found)
        return
    if found is not None and found.state.terminal:
        turn.set(stored=found, revision=revision, writing=None)
        if not handoff.terminal:
            turn.conclude(found)
        turn.set(stored=turn.handoff.record, is_behind=False)  # the loser obeys: what was found stays
        return
    if found is not None and found.fence > handoff.policy.fence:
        if handoff.terminal:  # an end that was told stays
            turn.set(stored=found, revision=revision, writing=None, is_behind=True)
        else:
            _make_way(turn, found, revision)
        return
    if found is not None and handoff.is_claiming and not handoff.terminal and _has_changed_hands(turn, found):
        adoption.obey(turn, found, revision)
        return
    turn.set(stored=found, revision=revision, writing=None)


def unwritten(turn: Turn, write: int, error: ErrorInfo) -> None:
    """The bucket cannot be reached: what had to be written first does not happen."""
    record = turn.handoff.writing
    if record is None or write != turn.handoff.num_writes:
        return
    never = turn.handoff.stored is None
    turn.set(stored=record, writing=None, is_behind=True)
    if never and not turn.handoff.terminal:
        turn.conclude(messages.terminal_record(turn.handoff, Verdict(state=HandoffState.FAILED, error=error)))
        turn.set(stored=turn.handoff.record)
    elif record.state.terminal and not turn.handoff.terminal:
        turn.conclude(record)
    elif record.state is HandoffState.COMMITTED and turn.state is HandoffState.PREFILLING:
        turn.fail(error)
    adoption.resume(turn)


def _yield_to(turn: Turn, found: HandoffRecord) -> None:
    """The key was taken before this handoff began: nobody has been told anything, so there is nothing to undo."""
    error = None
    if not same_identity(found, turn.handoff.record):
        error = ErrorInfo(code=ErrorCode.DUPLICATE, message=f"{found.handoff_id} is taken by another request")
    if not turn.handoff.submit_answered:
        turn.effects.append(AnswerSubmit(error=error))
    turn.set(writing=None, record=found, submit_answered=True, router_answered=True, forgotten=True)
    turn.effects.append(Forget())


def _has_changed_hands(turn: Turn, found: HandoffRecord) -> bool:
    before = {HandoffState.RESERVING, HandoffState.PREFILLING}
    return turn.state in before and found.state not in before


def _make_way(turn: Turn, found: HandoffRecord, revision: int) -> None:
    """A broker of a later term goes on with it: this one's word counts no more, and what it was told is asked for there."""
    turn.set(record=found, stored=found, revision=revision, writing=None, ledger=None, forgotten=True)
    turn.effects.append(Forget())
