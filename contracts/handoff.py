"""The messages of a handoff: reserve, run, parts, commit, takeover, release, and the record that the broker keeps of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec

from contracts.codec import Versioned
from contracts.errors import ErrorInfo
from contracts.ids import Token
from contracts.manifest import Namespace, Role
from contracts.numbers import Milliseconds, Whole
from contracts.requests import FinishReason, Refused, Route, SamplingParams, WorkerRef

GRANT_SECRET_BYTES: Final = 16
"""Length of a grant's secret."""
GrantSecret = Annotated[str, msgspec.Meta(pattern=f"^([0-9a-f]{{{2 * GRANT_SECRET_BYTES}}})?$")]
"""A grant's secret in hexadecimal digits, or "" for none."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The right to write one request's cache into one replica of a decode worker, the same on each of the replica's ranks.

    `dp_rank` says which replica. `block_ids` in the order of the sequence; `slot` is the row of its recurrent states. A
    write is legal only while every touched cell of the region's header holds `generation`. `secret`, drawn at random for each
    reservation, proves to a receiver on another host that the writer was given the grant; it travels in messages alone,
    never in events, logs or the record of a handoff.
    """

    worker_id: Token
    incarnation: Token
    dp_rank: Whole = 0
    generation: Whole
    block_ids: tuple[Whole, ...]
    slot: Whole
    secret: GrantSecret = ""

    def __repr__(self) -> str:
        """Everything but the secret: a grant may stand in an error or a log."""
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "secret")
        return f"Grant({', '.join(shown)})"


class ReserveDecode(Versioned, frozen=True, kw_only=True, tag="reserve_decode"):
    """Broker to decode: set memory aside for prompt + max_tokens, before prefill runs."""

    handoff_id: Token
    request_id: Token
    attempt: Whole
    router_id: Token
    incarnation: Token
    source: WorkerRef
    fence: Whole
    num_prompt_tokens: Whole
    sampling: SamplingParams
    timeout_ms: Milliseconds


class Reserved(Versioned, frozen=True, kw_only=True, tag="reserved"):
    """Decode to broker: the memory is there; the leading `num_cached_tokens` need not be sent."""

    handoff_id: Token
    grant: Grant
    num_cached_tokens: Whole
    prepare_ms: float


ReserveAnswer: TypeAlias = Reserved | Refused


class RunPrefill(Versioned, frozen=True, kw_only=True, tag="run_prefill"):
    """Broker to prefill: compute the prompt, push its cache into the grant."""

    handoff_id: Token
    request_id: Token
    attempt: Whole
    router_id: Token
    incarnation: Token
    fence: Whole
    num_prompt_tokens: Whole
    prompt_hash: str
    sampling: SamplingParams
    timeout_ms: Milliseconds
    grant: Grant
    num_cached_tokens: Whole


class RunMixed(Versioned, frozen=True, kw_only=True, tag="run_mixed"):
    """Broker to a mixed worker: compute the prompt and go on decoding."""

    handoff_id: Token
    request_id: Token
    attempt: Whole
    router_id: Token
    incarnation: Token
    fence: Whole
    num_prompt_tokens: Whole
    prompt_hash: str
    sampling: SamplingParams
    timeout_ms: Milliseconds


class PartDone(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One part's done ranges `[start, end)`: token positions for KEY and VALUE, `[0, 1)` for a state.

    `destination_rank` is a tensor-parallel rank of the replica that the grant names.
    """

    namespace: Namespace
    role: Role
    layer: Whole
    destination_rank: Whole
    ranges: tuple[tuple[Whole, Whole], ...]


class PartsReport(Versioned, frozen=True, kw_only=True, tag="parts_report"):
    """Prefill to broker: everything that one source rank has finished so far. Cumulative: the latest `revision` says it all.

    `source_rank` is a tensor-parallel rank of the replica `source_dp_rank`, the one that computes the prompt.
    """

    handoff_id: Token
    incarnation: Token
    source_dp_rank: Whole = 0
    source_rank: Whole
    revision: Whole
    parts: tuple[PartDone, ...]
    num_bytes: Whole
    push_ms: float


class QueryParts(Versioned, frozen=True, kw_only=True, tag="query_parts"):
    """Broker to prefill: report all parts again (verb `parts`); a report may have been lost."""

    handoff_id: Token


class PartsAnswer(Versioned, frozen=True, kw_only=True, tag="parts_answer"):
    """One report for each source rank that has any."""

    handoff_id: Token
    reports: tuple[PartsReport, ...]


class PrefillFinished(Versioned, frozen=True, kw_only=True, tag="prefill_finished"):
    """Prefill to broker: the prompt is computed.

    With a `finish_reason` the first token ended the request, with an `error` the prefill failed: then there is no commit.
    """

    handoff_id: Token
    incarnation: Token
    first_token: Whole | None = None
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: Whole = 0
    queue_ms: float = 0.0
    compute_ms: float = 0.0


class CommitHandoff(Versioned, frozen=True, kw_only=True, tag="commit_handoff"):
    """Broker to decode: the ledger is closed and the request is yours. Idempotent by handoff id."""

    handoff_id: Token
    incarnation: Token
    fence: Whole
    first_token: Whole
    num_cached_tokens: Whole
    timeout_ms: Milliseconds


class TakenOver(Versioned, frozen=True, kw_only=True, tag="taken_over"):
    """Decode to broker: the first decode step has been enqueued. Durations are decode's own.

    `first_step_ns` is the host's monotonic clock when the first decode step began. `first_token_prepare_ms` runs from the
    commit's arrival until the first token was ready to be sent, `first_token_rpc_ms` from then until the bus had taken it.
    """

    handoff_id: Token
    incarnation: Token
    prepare_ms: float
    enqueue_ms: float
    total_ms: float
    first_step_ns: Whole
    first_token_prepare_ms: float = 0.0
    first_token_rpc_ms: float = 0.0


class ReleaseHandoff(Versioned, frozen=True, kw_only=True, tag="release_handoff"):
    """Broker to either worker: the request's memory may go back. Idempotent; also a tombstone for a run not yet seen."""

    handoff_id: Token
    reason: str
    tombstone_ms: Milliseconds


class PromptTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt took at a mixed worker: it waited for memory for `queue_ms`, and had its first token `compute_ms` later."""

    queue_ms: float
    compute_ms: float


class Released(Versioned, frozen=True, kw_only=True, tag="released", omit_defaults=True):
    """A worker's answer to a release: it holds nothing of the handoff any more.

    `response_rpc_ms` is how long the broker took to answer the prefill worker's report of the first token. A mixed worker that is
    released after the first token, but before the request's end, says with `prompt` what that took.
    """

    handoff_id: Token
    response_rpc_ms: float | None = None
    prompt: PromptTimes | None = None


class RequestEnded(Versioned, frozen=True, kw_only=True, tag="request_ended"):
    """Decode or mixed to broker: no more tokens will come. `prompt` comes from a mixed worker that has computed it."""

    handoff_id: Token
    incarnation: Token
    num_tokens: Whole
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    prompt: PromptTimes | None = None


class HandoffState(StrEnum):
    """Where a handoff is. The last three are terminal."""

    RESERVING = "reserving"
    PREFILLING = "prefilling"
    COMMITTED = "committed"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        """Whether nothing can follow."""
        return self in {HandoffState.FINISHED, HandoffState.CANCELLED, HandoffState.FAILED}


class HandoffRecord(Versioned, frozen=True, kw_only=True, tag="handoff_record", omit_defaults=True):
    """The durable truth about one handoff: the value of its key in `PD_HANDOFFS`. Messages are hints, this decides.

    It holds what another broker needs to send any message of the handoff again. `num_cached_tokens` were at decode before
    (they came with the grant), `num_prefill_cached_tokens` at prefill (they come with its end). `traceparent` is the W3C trace of
    the broker's hop.
    """

    handoff_id: Token
    request_id: Token
    attempt: Whole
    router_id: Token
    route: Route
    state: HandoffState
    fence: Whole
    num_prompt_tokens: Whole
    prompt_hash: str
    sampling: SamplingParams
    deadline_at: str
    traceparent: str = ""
    grant: Grant | None = None
    num_cached_tokens: Whole = 0
    first_token: Whole | None = None
    num_prefill_cached_tokens: Whole = 0
    num_tokens: Whole = 0
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
