"""What can happen to a handoff. Each carries `at_ns`, the monotonic time at which the shell learned of it.

Any of them may come late, twice, or before another that caused it: `step` treats that as ordinary.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from contracts.errors import ErrorInfo
from contracts.guesses import Guesses
from contracts.handoff import (
    HandoffRecord,
    PartsReport,
    PrefillFinished,
    PromptTimes,
    RequestEnded,
    Reserved,
    TakenOver,
)
from contracts.manifest import PlannedPart
from contracts.pull import PullEnded
from contracts.requests import FinishReason, SubmitRequest, WorkerRef
from contracts.workers import WorkerRole


class Ask(StrEnum):
    """What was asked and may be refused: by a worker, or, for a plan, by what both workers are."""

    PLAN = "plan"
    RESERVE = "reserve"
    RUN = "run"
    PULL = "pull"
    COMMIT = "commit"


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """The router asks for a handoff that is not known yet. `planned` is empty for a mixed route."""

    at_ns: int
    submit: SubmitRequest
    deadline_ns: int
    deadline_at: str
    traceparent: str = ""
    planned: tuple[PlannedPart, ...] = ()
    block_size: int = 1


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """A broker has started and found the record of a handoff that has not ended, submitted at `begun_ns` by its own clock."""

    at_ns: int
    record: HandoffRecord
    revision: int
    deadline_ns: int
    begun_ns: int


class PlanFound(msgspec.Struct, frozen=True, kw_only=True):
    """What is owed on the route of a handoff that another broker began."""

    at_ns: int
    planned: tuple[PlannedPart, ...]
    block_size: int


class RecordStored(msgspec.Struct, frozen=True, kw_only=True):
    """The compare-and-set number `write` won."""

    at_ns: int
    write: int
    revision: int


class RecordConflict(msgspec.Struct, frozen=True, kw_only=True):
    """The compare-and-set number `write` lost to `found` at `revision`; None and 0 when the key is gone."""

    at_ns: int
    write: int
    found: HandoffRecord | None
    revision: int


class RecordUnwritten(msgspec.Struct, frozen=True, kw_only=True):
    """The compare-and-set number `write` got no answer in all of its time: its outcome is unknown."""

    at_ns: int
    write: int
    error: ErrorInfo


class DecodeReserved(msgspec.Struct, frozen=True, kw_only=True):
    """Decode has set memory aside. `rpc_ms` is how long the answer took."""

    at_ns: int
    answer: Reserved
    rpc_ms: float


class RunAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill or mixed worker took the run over."""

    at_ns: int
    rpc_ms: float


class PullAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """Decode took the pull over."""

    at_ns: int
    rpc_ms: float


class CommitAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """Decode took the commit over."""

    at_ns: int
    rpc_ms: float


class AskRefused(msgspec.Struct, frozen=True, kw_only=True):
    """A worker refused what it was asked, or never answered: then it may have done it."""

    at_ns: int
    ask: Ask
    error: ErrorInfo


class PartsReported(msgspec.Struct, frozen=True, kw_only=True):
    """A source rank tells what it has pushed so far, or decode what it has pulled from one."""

    at_ns: int
    report: PartsReport


class PartsUnanswered(msgspec.Struct, frozen=True, kw_only=True):
    """A worker did not say what it has reported: it does not know the handoff, or could not be reached."""

    at_ns: int
    role: WorkerRole
    error: ErrorInfo


class PartsOverdue(msgspec.Struct, frozen=True, kw_only=True):
    """The time that `CheckParts` named has passed."""

    at_ns: int


class PrefillEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill worker has computed the prompt, or failed to."""

    at_ns: int
    message: PrefillFinished


class PullOver(msgspec.Struct, frozen=True, kw_only=True):
    """Decode reads nothing of the source any more: it has everything, or has failed to get it."""

    at_ns: int
    message: PullEnded


class DecodeTookOver(msgspec.Struct, frozen=True, kw_only=True):
    """The decode worker has enqueued its first step."""

    at_ns: int
    message: TakenOver


class WorkerEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The decode or mixed worker sends no more tokens and has freed its own memory."""

    at_ns: int
    message: RequestEnded


class CancelRequested(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody waits for the request any more: with a `finish_reason` because the router has all of it, with an `error` because it failed."""

    at_ns: int
    reason: str
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None


class DeadlinePassed(msgspec.Struct, frozen=True, kw_only=True):
    """The request's time is over."""

    at_ns: int


class WorkerGone(msgspec.Struct, frozen=True, kw_only=True):
    """This start of a worker has lost its lease, or was replaced by another start."""

    at_ns: int
    worker: WorkerRef


class RouterGone(msgspec.Struct, frozen=True, kw_only=True):
    """This start of a router has lost its lease, or was replaced by another start: nobody waits for its requests."""

    at_ns: int
    router_id: str
    incarnation: str


class ReleaseSettled(msgspec.Struct, frozen=True, kw_only=True):
    """A worker acknowledged its release after `rpc_ms`; or it is not there to do so, and the shell gave up.

    `response_rpc_ms` is what a prefill worker says of its own report, `prompt` what a mixed worker says of the prompt, `guesses`
    what came of them where some were made. `quarantined`: its memory is not free yet.
    """

    at_ns: int
    role: WorkerRole
    acknowledged: bool
    rpc_ms: float | None = None
    response_rpc_ms: float | None = None
    prompt: PromptTimes | None = None
    guesses: Guesses | None = None
    quarantined: bool = False


Event: TypeAlias = (
    PlanFound
    | RecordStored
    | RecordConflict
    | RecordUnwritten
    | DecodeReserved
    | RunAccepted
    | PullAccepted
    | CommitAccepted
    | AskRefused
    | PartsReported
    | PartsUnanswered
    | PartsOverdue
    | PrefillEnded
    | PullOver
    | DecodeTookOver
    | WorkerEnded
    | CancelRequested
    | DeadlinePassed
    | WorkerGone
    | RouterGone
    | ReleaseSettled
)
