"""The messages of a handoff: reserve, run, parts, commit, takeover, release, and the record that the broker keeps of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec

from contracts.codec import Versioned
from contracts.errors import ErrorInfo
from contracts.guesses import Guesses
from contracts.ids import Token
from contracts.manifest import Namespace, Role
from contracts.numbers import Milliseconds, Whole
from contracts.pull import PullEnded, RequestLock, ShardPull, Transfer
from contracts.requests import FinishReason, Refused, Route, SamplingParams, WorkerRef

GRANT_SECRET_BYTES: Final = 16
"""Length of a grant's secret."""
GrantSecret = Annotated[str, msgspec.Meta(pattern=f"^([0-9a-f]{{{2 * GRANT_SECRET_BYTES}}})?$")]
"""A grant's secret in hexadecimal digits, or "" for none."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The right to touch one request's cache in one replica of a worker, the same on each of the replica's ranks.

    Decode grants writing, before prefill runs; prefill grants reading, once the cache is complete.

    `dp_rank` says which replica. `block_ids` in the order of the sequence; `slot` is the row of its recurrent states. A
    write or read is legal only while every touched cell of the region's header holds `generation`. A request that pulls states owns the
    row `staging_row` of decode's staging memory under the same generation. `secret`, drawn at random for each
    reservation, proves to a receiver on another host that the writer was given the grant; it travels in messages alone,
    never in events, logs or the record of a handoff.
    """

    worker_id: Token
    incarnation: Token
    dp_rank: Whole = 0
    generation: Whole
    block_ids: tuple[Whole, ...]
    slot: Whole
    staging_row: Whole | None = None
    secret: GrantSecret = ""

    def __repr__(self) -> str:
        """Everything but the secret: a grant may stand in an error or a log."""
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "secret")
        return f"Grant({', '.join(shown)})"


_MAX_GRANTED_ID_BYTES: Final = 112 * 1024
"""Of a message, for the block ids of one grant: the record of a handoff holds two grants, and more than that."""


def max_granted_blocks(num_blocks: int) -> int:
    """How many blocks of a cache of `num_blocks` a grant can name, and still fit into messages and records."""
    return _MAX_GRANTED_ID_BYTES // (len(str(num_blocks - 1)) + 1)


class ReserveDecode(Versioned, frozen=True, kw_only=True, tag="reserve_decode"):
    """Broker to decode: set memory aside for prompt + max_tokens, before prefill runs. See `SubmitRequest` for delivered tokens."""

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
    num_delivered_tokens: Whole = 0


class Reserved(Versioned, frozen=True, kw_only=True, tag="reserved"):
    """Decode to broker: the memory is there; the leading `num_cached_tokens` need not be sent.

    Decode will read the caches of the roles in `pulled` itself: prefill is not to push them. With `verify` it wants prefill's
    digests, to hold them against what has arrived.
    """

    handoff_id: Token
    grant: Grant
    num_cached_tokens: Whole
    prepare_ms: float
    pulled: tuple[Role, ...] = ()
    verify: bool = False


ReserveAnswer: TypeAlias = Reserved | Refused


class RunPrefill(Versioned, frozen=True, kw_only=True, tag="run_prefill"):
    """Broker to prefill: compute the prompt, push its cache into the grant, but for the roles in `pulled`: decode reads those."""

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
    num_delivered_tokens: Whole = 0
    pulled: tuple[Role, ...] = ()
    verify: bool = False


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
    num_delivered_tokens: Whole = 0


class PartDone(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One part's done ranges `[start, end)`: tokens for KEY and VALUE, `[0, 1)` for what has a slot.

    Tokens are counted by those of the sequence that the destination rank keeps: all of them, or with dcp those of its own blocks.
    `destination_rank` is a tensor-parallel rank of the replica that the grant names.
    """

    namespace: Namespace
    role: Role
    layer: Whole
    destination_rank: Whole
    ranges: tuple[tuple[Whole, Whole], ...]


class PartsReport(Versioned, frozen=True, kw_only=True, tag="parts_report"):
    """A worker to the broker: everything of one source rank that has arrived so far. Cumulative: the latest `revision` says it all.

    `source_rank` is a tensor-parallel rank of the replica `source_dp_rank`, the one that computes the prompt. Prefill reports
    what its rank has pushed; decode, with `transfer` pull, what its ranks have read from that rank and merged, and how far the
    `shards` of that rank are. `incarnation` is the reporting worker's, `push_ms` the time that the copies took.
    """

    handoff_id: Token
    incarnation: Token
    source_dp_rank: Whole = 0
    source_rank: Whole
    revision: Whole
    parts: tuple[PartDone, ...]
    num_bytes: Whole
    push_ms: float
    transfer: Transfer = Transfer.PUSH
    shards: tuple[ShardPull, ...] = ()


class QueryParts(Versioned, frozen=True, kw_only=True, tag="query_parts"):
    """Broker to either worker: report all parts again (verb `parts`); a report may have been lost."""

    handoff_id: Token


class PartsAnswer(Versioned, frozen=True, kw_only=True, tag="parts_answer"):
    """One report for each source rank that has any. `finished` is prefill's end, `pull_ended` decode's, once there is one."""

    handoff_id: Token
    reports: tuple[PartsReport, ...]
    finished: PrefillFinished | None = None
    pull_ended: PullEnded | None = None


class PartDigest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The digest of all that one destination rank gets of one cache, from whichever source ranks: 16 hexadecimal digits.

    How it is made is in `common.layout.digest`.
    """

    namespace: Namespace
    role: Role
    layer: Whole
    destination_rank: Whole
    digest: str


class PrefillFinished(Versioned, frozen=True, kw_only=True, tag="prefill_finished"):
    """Prefill to broker: the prompt is computed.

    With a `finish_reason` the first token ended the request, with an `error` the prefill failed: then there is no commit.
    `source` is the right to read its cache, where decode pulls; `digests` are those of every part, where decode verifies.
    `response_prepare_ms` is what it took from the first token to this message.
    """

    handoff_id: Token
    incarnation: Token
    first_token: Whole | None = None
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: Whole = 0
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    response_prepare_ms: float = 0.0
    source: Grant | None = None
    digests: tuple[PartDigest, ...] = ()


class PullHandoff(Versioned, frozen=True, kw_only=True, tag="pull_handoff"):
    """Broker to decode: read the roles that you wanted to pull, under the request's lock number `lock` (verb `pull`).

    Idempotent by handoff id and `lock`: one pull of a request at a time, and a lower number than the last is refused.
    """

    handoff_id: Token
    incarnation: Token
    fence: Whole
    lock: Whole
    source: Grant
    timeout_ms: Milliseconds


class CommitHandoff(Versioned, frozen=True, kw_only=True, tag="commit_handoff"):
    """Broker to decode: the ledger is closed and the request is yours. Idempotent by handoff id. `digests` are to be verified before.

    With `drafts` the draft's cache and the hidden state that it goes on from were part of the plan, and have come too.
    """

    handoff_id: Token
    incarnation: Token
    fence: Whole
    first_token: Whole
    num_cached_tokens: Whole
    timeout_ms: Milliseconds
    digests: tuple[PartDigest, ...] = ()
    drafts: bool = False


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

    `quarantined`: the memory belongs to nobody, but cannot be given to anybody yet, because a writer may still touch it.
    `response_rpc_ms` is how long the broker took to answer the prefill worker's report of the first token. A mixed worker that is
    released after the first token, but before the request's end, says with `prompt` what that took. With `guesses` one that has
    guessed tokens for the request says what came of it.
    """

    handoff_id: Token
    response_rpc_ms: float | None = None
    prompt: PromptTimes | None = None
    guesses: Guesses | None = None
    quarantined: bool = False


class RequestEnded(Versioned, frozen=True, kw_only=True, tag="request_ended"):
    """Decode or mixed to broker: no more tokens will come.

    `prompt` comes from a mixed worker that has computed it, `guesses` from one that has guessed tokens; `quarantined` is as in
    `Released`.
    """

    handoff_id: Token
    incarnation: Token
    num_tokens: Whole
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    prompt: PromptTimes | None = None
    guesses: Guesses | None = None
    quarantined: bool = False


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
        return self in _TERMINAL


_TERMINAL: Final = frozenset({HandoffState.FINISHED, HandoffState.CANCELLED, HandoffState.FAILED})


class SourceProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what one source rank owes by one way has arrived: `num_done` of `num_parts` parts in full."""

    transfer: Transfer
    source_rank: Whole
    num_parts: Whole
    num_done: Whole
    num_bytes: Whole


class HandoffRecord(Versioned, frozen=True, kw_only=True, tag="handoff_record", omit_defaults=True):
    """The durable truth about one handoff: the value of its key in `PD_HANDOFFS`. Messages are hints, this decides.

    It holds what another broker needs to send any message of the handoff again. `num_cached_tokens` were at decode before
    (they came with the grant), `num_prefill_cached_tokens` at prefill (they come with its end). `traceparent` is the W3C trace of
    the broker's hop. `submitted_at` and `deadline_at` are wall times in RFC 3339 by the clock of the broker that began it; the first
    is "" where that was not written down. `drafts` is for the commit: the plan brings the draft's cache too.

    Who owns what: `grant` names the blocks, the slot and the staging row at decode and their generation, `source` those at prefill
    that decode may read; `lock` is held while decode pulls, `shards` say how far each pull is, `progress` how much has arrived.
    These are written with the transitions, not with every part.
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
    submitted_at: str = ""
    traceparent: str = ""
    router_incarnation: Token | None = None
    num_delivered_tokens: Whole = 0
    grant: Grant | None = None
    num_cached_tokens: Whole = 0
    pulled: tuple[Role, ...] = ()
    verify: bool = False
    drafts: bool = False
    source: Grant | None = None
    lock: RequestLock | None = None
    shards: tuple[ShardPull, ...] = ()
    progress: tuple[SourceProgress, ...] = ()
    first_token: Whole | None = None
    num_prefill_cached_tokens: Whole = 0
    num_tokens: Whole = 0
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None


class ListHandoffs(Versioned, frozen=True, kw_only=True, tag="list_handoffs"):
    """A new broker leader to a worker: which handoffs do you hold anything of (verb `handoffs`)? It names its `fence`."""

    fence: Whole


class HandoffList(Versioned, frozen=True, kw_only=True, tag="handoff_list"):
    """A worker's answer."""

    incarnation: Token
    handoff_ids: tuple[Token, ...]
