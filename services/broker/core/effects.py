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
    QueryParts,
    ReleaseHandoff,
    ReserveDecode,
    RunMixed,
    RunPrefill,
)
from contracts.requests import CancelWork, TokenFrame, WorkerRef
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


class AskReserve(msgspec.Struct, frozen=True, kw_only=True):
    """Ask decode for memory. Answered by `DecodeReserved` or `AskRefused`."""

    worker: WorkerRef
    message: ReserveDecode


class AskRun(msgspec.Struct, frozen=True, kw_only=True):
    """Ask a prefill or mixed worker to compute. Answered by `RunAccepted` or `AskRefused`."""

    role: WorkerRole
    worker: WorkerRef
    message: RunPrefill | RunMixed


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
    """Ask prefill for all of its reports again. Answered by a `PartsReported` for each, or by nothing."""

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
    | AskReserve
    | AskRun
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
