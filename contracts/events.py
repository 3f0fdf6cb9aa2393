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
    REQUEST_LOCKED = "request_locked"
    SHARD_PULL_STARTED = "shard_pull_started"
    SHARD_PULLED = "shard_pulled"
    SHARDS_MERGED = "shards_merged"
    REQUEST_UNLOCKED = "request_unlocked"
    LEDGER_CLOSED = "ledger_closed"
    HANDOFF_COMMITTED = "handoff_committed"
    TAKEN_OVER = "taken_over"
    PREFILL_RELEASED = "prefill_released"
    DECODE_RELEASED = "decode_released"
    HANDOFF_ADOPTED = "handoff_adopted"
    PREEMPTED = "preempted"
    REQUEST_FINISHED = "request_finished"
    REQUEST_CANCELLED = "request_cancelled"
    REQUEST_FAILED = "request_failed"


class HandoffEvent(Versioned, frozen=True, kw_only=True, tag="handoff_event", omit_defaults=True):
    """One transition of one handoff.

    `at` is the wall clock (RFC 3339, UTC), for people; `at_ns` is the host's monotonic clock, for differences between
    events of one host. `started_ns` is when the thing that `duration_ms` measures began. Fields that do not apply are absent.
    `missing_parts` names the first of the `num_missing_parts` that were owed when a handoff failed. `num_chunks` counts the
    steps that `duration_ms` sums up; `started_ns` is then the start of the last one. Of a part that was pushed in several copies,
    `started_ns` is when the first of them began, `last_started_ns` when the last did, and `duration_ms` their sum.
    A part is of `role` at `layer` of the model, or with a `namespace` of what is named there: the draft head.
    `trace_id` and `span_id` are those of the request's W3C trace and of the hop that tells.
    `lock` is the number of the request's lock and `lock_holder` who has it; a pull waited `wait_ms` for its shards, each of which has
    all roles, so that the events of single roles repeat it, and merged `role` of them in `merge_ms`, or all together where none is
    named; `shard_state` is how the pull of one shard ended.
    A worker that guessed tokens took `num_steps` steps for those that it generated; it verified `num_drafted` guesses, of which
    `num_accepted` were right: `accepted_at[i]` times the one in place `i + 1` of a step. In these steps, which it may have shared with
    others, guessing took `draft_ms` and the pass that verified `verify_ms`.
    `quarantined`: what a worker gave back was not free yet, because a writer could still touch it.
    Ranks are tensor-parallel ranks inside a replica; the replicas are named by `*_dp_rank`, which is absent for the first one.
    """

    event: EventName
    service: str
    instance: str
    handoff_id: str
    request_id: str
    at: str
    at_ns: int
    trace_id: str = ""
    span_id: str = ""
    parent_span_id: str = ""
    phase: str = ""
    duration_ms: float | None = None
    started_ns: int | None = None
    last_started_ns: int | None = None
    prepare_ms: float | None = None
    rpc_ms: float | None = None
    enqueue_ms: float | None = None
    total_ms: float | None = None
    response_prepare_ms: float | None = None
    response_rpc_ms: float | None = None
    first_token_prepare_ms: float | None = None
    first_token_rpc_ms: float | None = None
    num_bytes: int | None = None
    num_parts: int | None = None
    lock: int | None = None
    lock_holder: str | None = None
    parallel: bool | None = None
    wait_ms: float | None = None
    merge_ms: float | None = None
    shard_state: str | None = None
    num_chunks: int | None = None
    num_tokens: int | None = None
    num_steps: int | None = None
    num_drafted: int | None = None
    num_accepted: int | None = None
    accepted_at: tuple[int, ...] = ()
    draft_ms: float | None = None
    verify_ms: float | None = None
    layer: int | None = None
    namespace: str | None = None
    role: str | None = None
    source_rank: int | None = None
    destination_rank: int | None = None
    source_dp_rank: int = 0
    destination_dp_rank: int = 0
    prefill_worker: str | None = None
    decode_worker: str | None = None
    mixed_worker: str | None = None
    quarantined: bool | None = None
    finish_reason: str | None = None
    error: ErrorInfo | None = None
    missing_parts: tuple[str, ...] = ()
    num_missing_parts: int | None = None
