"""Which commands a worker refuses, and why. Pure."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from common.worker.core.table import HandoffTable
from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import CommitHandoff, PullHandoff, ReserveDecode, RunMixed, RunPrefill

NewWork: TypeAlias = ReserveDecode | RunPrefill | RunMixed
Command: TypeAlias = NewWork | PullHandoff | CommitHandoff


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker can take now, and at all. `max_prompt_tokens` is the longest prompt that it computes, if any length is too long."""

    worker_id: str
    draining: bool
    max_sequence_tokens: int
    max_prompt_tokens: int | None = None
    num_waiting: int
    max_waiting: int


def refuse_command(command: Command, *, incarnation: str, table: HandoffTable) -> ErrorInfo | None:
    """Why a command must not be obeyed: meant for another start, from a deposed broker, or for a handoff that is over."""
    if command.incarnation != incarnation:
        return ErrorInfo(
            code=ErrorCode.INCARNATION_CHANGED,
            message=f"incarnation: {command.incarnation!r} is gone; this worker is now {incarnation!r}",
        )
    if not table.admits_fence(command.fence):
        return ErrorInfo(code=ErrorCode.STALE_FENCE, message=f"fence: {command.fence} is below the highest one seen")
    if table.is_buried(command.handoff_id):
        return ErrorInfo(code=ErrorCode.CANCELLED, message=f"{command.handoff_id} has been released already")
    return None


def same_work(one: NewWork, other: NewWork) -> bool:
    """Whether both ask for the same: the later one may be another broker's, and has less time."""
    return msgspec.structs.replace(one, fence=other.fence, timeout_ms=other.timeout_ms) == other


def refuse_new(command: NewWork, num_tokens: int, room: Room) -> ErrorInfo | None:
    """Why new work of `num_tokens` cannot be taken."""
    if command.num_delivered_tokens > command.num_prompt_tokens:
        return ErrorInfo(
            code=ErrorCode.PROTOCOL,
            message=f"num_delivered_tokens: {command.num_delivered_tokens} is not allowed; "
            f"the rule is: at most num_prompt_tokens = {command.num_prompt_tokens}, whose end they are",
        )
    if room.draining:
        return ErrorInfo(code=ErrorCode.DRAINING, message=f"{room.worker_id} is draining")
    if num_tokens > room.max_sequence_tokens:
        return ErrorInfo(
            code=ErrorCode.PROMPT_TOO_LONG,
            message=f"num_prompt_tokens + max_tokens: {num_tokens} is not allowed; "
            f"the rule is: at most {room.max_sequence_tokens} on {room.worker_id}",
        )
    if room.max_prompt_tokens is not None and command.num_prompt_tokens > room.max_prompt_tokens:
        return ErrorInfo(
            code=ErrorCode.PROMPT_TOO_LONG,
            message=f"num_prompt_tokens: {command.num_prompt_tokens} is not allowed; the rule is: at most "
            f"{room.max_prompt_tokens} (max_step_tokens) on {room.worker_id}, which computes a prompt in one step: "
            "chunked_prefill is off there",
        )
    if room.num_waiting >= room.max_waiting:
        return ErrorInfo(code=ErrorCode.OVERLOADED, message=f"{room.num_waiting} sequences wait for memory")
    return None
