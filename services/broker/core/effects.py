"""What a handoff wants done. The shell performs effects in order and tells the outcome as an event."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from contracts.errors import ErrorInfo
from contracts.events import EventName
from contracts.handoff import (
    CommitHandoff,
    HandoffRecord,
    PromptTimes,
    PullHandoff,
    QueryParts,
    ReleaseHandoff,
    ReserveDecode,
    RunMixed,
    RunPrefill,
)
from contracts.requests import CancelWork, Route, TokenFrame, WorkerRef
from contracts.workers import WorkerRole


class StoreRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Write the record if the key's revision is still `last`; with None, if there is no key.

    Answered by one of `RecordStored`, `RecordConflict`, `RecordUnwritten`. At most one is under way for a handoff.
    """

    write: int
    record: HandoffRecord
    last: int | None


class AnswerSubmit(msgspec.Struct, frozen=True, kw_only=True):
    """Answer everybody who waits for this handoff's submit: accepted, or refused with `error`."""

    error: ErrorInfo | None


class AskPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Find out what prefill owes decode on this route, for a handoff that another broker began.

    Answered by `PlanFound` or `AskRefused`.
    """

    route: Route


class AskReserve(msgspec.Struct, frozen=True, kw_only=True):
    """Ask decode for memory. Answered by `DecodeReserved` or `AskRefused`."""

    worker: WorkerRef
    message: ReserveDecode


class AskRun(msgspec.Struct, frozen=True, kw_only=True):
    """Ask a prefill or mixed worker to compute. Answered by `RunAccepted` or `AskRefused`."""

    role: WorkerRole
    worker: WorkerRef
    message: RunPrefill | RunMixed


class AskPull(msgspec.Struct, frozen=True, kw_only=True):
    """Ask decode to read what it wanted to pull. Answered by `PullAccepted` or `AskRefused`, at its end by `PullOver`."""

    worker: WorkerRef
    message: PullHandoff


class AskCommit(msgspec.Struct, frozen=True, kw_only=True):
    """Ask decode to take over. Answered by `CommitAccepted` or `AskRefused`."""

    worker: WorkerRef
    message: CommitHandoff


class AskRelease(msgspec.Struct, frozen=True, kw_only=True):
    """Tell a worker to give the memory back. Answered by `ReleaseSettled`."""

    role: WorkerRole
    worker: WorkerRef
    message: ReleaseHandoff


class AskParts(msgspec.Struct, frozen=True, kw_only=True):
    """Ask a worker for all of its reports again, and for its end of the prefill or of the pull, if there is one.

    Answered by a `PartsReported` for each, then by `PrefillEnded` or `PullOver`; or by `PartsUnanswered`.
    """

    role: WorkerRole
    worker: WorkerRef
    message: QueryParts


class CheckParts(msgspec.Struct, frozen=True, kw_only=True):
    """Tell `PartsOverdue` after this time."""

    after_ms: int


class HintCancel(msgspec.Struct, frozen=True, kw_only=True):
    """Let a worker stop computing early. It may get lost."""

    worker: WorkerRef
    request_id: str
    message: CancelWork


class AnswerRouter(msgspec.Struct, frozen=True, kw_only=True):
    """Tell the router how the request ended, when no worker will."""

    router_id: str
    frame: TokenFrame


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """Publish an event for people. `fields` are those of `HandoffEvent` that apply."""

    name: EventName
    at_ns: int
    fields: dict[str, Any]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Count what a worker has measured and told people itself. Once for a handoff."""

    prompt: PromptTimes


class Forget(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing will follow. The shell keeps the handoff a while, for those who ask again, then drops it."""


Effect: TypeAlias = (
    StoreRecord
    | AnswerSubmit
    | AskPlan
    | AskReserve
    | AskRun
    | AskPull
    | AskCommit
    | AskRelease
    | AskParts
    | CheckParts
    | HintCancel
    | AnswerRouter
    | Publish
    | Measured
    | Forget
)
