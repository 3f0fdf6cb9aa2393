"""Events for people: one JSON object a transition, on `PD_EVENTS`. A finished request's timeline is these alone."""

from __future__ import annotations

from enum import StrEnum

from contracts.codec import Versioned
from contracts.errors import ErrorInfo


class EventName(StrEnum):
    """What happened to a handoff, in the past tense; the last token of its subject."""

    REQUEST_SUBMITTED = "request_submitted"
    DECODE_RESERVED = "decode_reserved"
    RESERVE_REFUSED = "reserve_refused"
    PREFILL_ACCEPTED = "prefill_accepted"
    PREFILL_STARTED = "prefill_started"
    LAYER_COMPUTED = "layer_computed"
    PART_PUSHED = "part_pushed"
    RANK_PUSHED = "rank_pushed"
    PREFILL_FINISHED = "prefill_finished"
    LEDGER_CLOSED = "ledger_closed"
    HANDOFF_COMMITTED = "handoff_committed"
    TAKEN_OVER = "taken_over"
    PREFILL_RELEASED = "prefill_released"
    DECODE_RELEASED = "decode_released"
    REQUEST_FINISHED = "request_finished"
    REQUEST_CANCELLED = "request_cancelled"
    REQUEST_FAILED = "request_failed"


class HandoffEvent(Versioned, frozen=True, kw_only=True, tag="handoff_event", omit_defaults=True):
    """One transition of one handoff.

    `at` is the wall clock (RFC 3339, UTC), for people; `at_ns` is the host's monotonic clock, for differences between
    events of one host. `started_ns` is when the thing that `duration_ms` measures began. Fields that do not apply are absent.
    """

    event: EventName
    service: str
    instance: str
    handoff_id: str
    request_id: str
    at: str
    at_ns: int
    phase: str = ""
    duration_ms: float | None = None
    started_ns: int | None = None
    prepare_ms: float | None = None
    rpc_ms: float | None = None
    enqueue_ms: float | None = None
    total_ms: float | None = None
    num_bytes: int | None = None
    num_parts: int | None = None
    num_tokens: int | None = None
    layer: int | None = None
    role: str | None = None
    source_rank: int | None = None
    destination_rank: int | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    mixed_worker: str | None = None
    finish_reason: str | None = None
    error: ErrorInfo | None = None
