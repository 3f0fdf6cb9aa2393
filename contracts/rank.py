"""What a worker's asyncio process and its rank processes say to each other, in msgpack.

Every command is answered by every rank, in the order in which commands were sent; `PartPushed`, `PeerLinked`, `RankProgress`,
`RefusedTransfers` and what is said of a pull come on their own. Versions are not mixed here: both ends are the same build.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from contracts.dataplane import Asked, RefusalReason, RegionDescriptor
from contracts.errors import ErrorInfo
from contracts.handoff import Grant, GrantSecret
from contracts.manifest import Namespace, RankManifest, Role
from contracts.rank_pull import PullReport, PullShards
from contracts.requests import SamplingParams, WorkerRef

MAX_BOUND_BLOCKS: Final = 1 << 20
"""Blocks of one sequence that fit into a `BindSequence`, beside those of a grant."""
MAX_CONNECTING: Final = 8
"""Links that the ranks of an engine make at the same time, each in a thread of its own."""


class CollectivesKind(StrEnum):
    """How the rank processes of a worker add up their partial results."""

    SHARED_MEMORY = "shared_memory"
    GLOO = "gloo"


class DrafterKind(StrEnum):
    """Who guesses tokens for the model to verify: nobody, the checkpoint's own draft head, or a look-up in the sequence itself."""

    NONE = "none"
    MTP = "mtp"
    NGRAM = "ngram"


class StartRank(msgspec.Struct, frozen=True, kw_only=True, tag="start_rank"):
    """The first message to a rank: load your shard, allocate your region. Answered by `RankStarted`.

    It is tensor-parallel rank `rank` of `tp`, in replica `dp_rank` of the `dp` that its worker has. Each `dcp` ranks in succession
    share the blocks of a sequence: `num_blocks` counts those of one rank. `drafter` guesses up to `num_speculative_tokens` tokens, for
    which states have rows. A prefill worker's rank guesses none, and keeps the cache of the draft head all the same if that is
    the drafter; with `mtp_draft_body_tp1` each rank computes all of the head's layer. Behind its caches it keeps
    `num_staging_rows` rows, each for what one sequence's states are made of while they are being pulled.
    """

    worker_id: str
    incarnation: str
    dp_rank: int = 0
    dp: int = 1
    rank: int
    tp: int
    dcp: int = 1
    model_dir: str
    block_size: int
    num_blocks: int
    num_slots: int
    num_staging_rows: int = 0
    max_step_tokens: int
    max_step_sequences: int
    dtype: str = "float32"
    device: str = "cpu"
    drafter: DrafterKind = DrafterKind.NONE
    num_speculative_tokens: int = 0
    mtp_draft_body_tp1: bool = False
    collectives: CollectivesKind = CollectivesKind.SHARED_MEMORY
    collective_timeout_ms: int = 30_000
    transport: str = "shm"
    transport_dir: str = ""
    transport_host: str = "127.0.0.1"
    transport_advertise_host: str = ""
    failpoints: str = ""


class RankProgress(msgspec.Struct, frozen=True, kw_only=True, tag="rank_progress"):
    """How far the start has come, for people."""

    rank: int
    phase: str
    done: int
    total: int


class RankStarted(msgspec.Struct, frozen=True, kw_only=True, tag="rank_started"):
    """The rank serves. `manifest` says what lies where in its `region` (None where no peer may reach it)."""

    rank: int
    pid: int
    manifest: RankManifest
    region: RegionDescriptor | None
    num_weight_bytes: int
    num_region_bytes: int
    load_ms: float


class PeerSide(StrEnum):
    """Which side of a link a manifest describes."""

    SOURCE = "source"
    DESTINATION = "destination"


class AddPeerRank(msgspec.Struct, frozen=True, kw_only=True, tag="add_peer_rank"):
    """One rank's layout for a link to come. Sent one rank at a time: manifests are large. Answered by `Done`."""

    peer: WorkerRef
    side: PeerSide
    manifest: RankManifest
    region: RegionDescriptor | None = None


class LinkPeer(msgspec.Struct, frozen=True, kw_only=True, tag="link_peer"):
    """Begin to compile the plan against a peer whose ranks have been added, and to connect to the regions of all its replicas.

    `side` is the peer's: this rank pushes to a destination, and pulls from a source. A peer is linked one way at a time.
    Answered by `Done` at once. `PeerLinked` follows with the same `attempt`, unless the peer is unlinked or linked anew before.
    """

    peer: WorkerRef
    attempt: int
    side: PeerSide = PeerSide.DESTINATION


class PeerLinked(msgspec.Struct, frozen=True, kw_only=True, tag="peer_linked"):
    """What came of a `LinkPeer`: bytes may move, in place of an earlier link. With an `error` an earlier link stays."""

    rank: int
    peer: WorkerRef
    attempt: int
    error: ErrorInfo | None = None


class UnlinkPeer(msgspec.Struct, frozen=True, kw_only=True, tag="unlink_peer"):
    """Forget a peer and close its regions; give up connecting to it. Unknown peers are no error. Answered by `Done`."""

    peer: WorkerRef


class PushTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prefilled sequence's cache goes: into `grant`, in the replica of a linked worker that the grant names.

    Tokens below `num_cached_tokens` are there already. Roles in `pulled` are not pushed: the peer reads them.
    """

    grant: Grant
    num_cached_tokens: int
    pulled: tuple[Role, ...] = ()


class BindSequence(msgspec.Struct, frozen=True, kw_only=True, tag="bind_sequence"):
    """Give a sequence its memory, write `generation` into the header cells of its blocks and slot, zero its states.

    On a decode worker this is the reservation: after it the cells say who may write, and peers of other hosts show `secret`.
    Without a secret nobody but this worker writes there. `staging_row` belongs to the sequence until it is released; one that is to
    pull states needs it. Answered by `Done`.
    """

    seq: int
    handoff_id: str
    generation: int
    block_ids: tuple[int, ...]
    slot: int
    num_prompt_tokens: int
    sampling: SamplingParams
    push: PushTarget | None = None
    secret: GrantSecret = ""
    staging_row: int | None = None


class Extension(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Blocks that a bound sequence gets behind those that it has."""

    seq: int
    block_ids: tuple[int, ...]


class ExtendSequences(msgspec.Struct, frozen=True, kw_only=True, tag="extend_sequences"):
    """Give bound sequences more blocks, and write `generation`, a new one, into the blocks' header cells.

    Grants keep their generation, and so name the older blocks alone: no peer may write into these. Answered by `Done`; with an
    `error` no sequence of the command has got any.
    """

    generation: int
    extensions: tuple[Extension, ...]


class ReleaseSequences(msgspec.Struct, frozen=True, kw_only=True, tag="release_sequences"):
    """Take the memory of sequences back: raise their cells to `generation`, wait up to `timeout_ms` for writers under way.

    Pushes and shards of the sequence that have not begun are dropped, those under way are waited for. Unknown sequences are no
    error. Answered by `Done`; sequences whose writers did not stop, or into whose memory something is still being read, are listed
    in `indeterminate`: their blocks, slot and staging row stay in quarantine until a later release says otherwise.
    """

    seqs: tuple[int, ...]
    generation: int
    timeout_ms: int


class StepItem(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One sequence's share of a step: the tokens at positions `[start, start + num_tokens)`.

    `token_ids` empty means the token sampled for this sequence by the step before, and behind it what was guessed since, at most
    `num_tokens` in all. With `sample` tokens are drawn: one behind the last of them, or, where some were guessed, one behind each as far
    as the guesses were right; `last_chunk` says that the prompt ends here, so that states are final.

    With `bootstrap` the sequence goes on here from another worker's draft cache and hidden state: the one token given is followed by
    what this step guesses before it verifies, at most `num_tokens` in all.
    """

    seq: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    sample: bool = False
    last_chunk: bool = False
    bootstrap: bool = False


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, tag="step_plan"):
    """One pass over the model for a batch of sequences. Answered by `StepDone`."""

    step: int
    items: tuple[StepItem, ...]


class SampledToken(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A token drawn for a sequence; `position` is where it stands in the sequence. A step may give a sequence several, in order."""

    seq: int
    position: int
    token_id: int


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="step_done"):
    """A rank's answer to a `StepPlan`. Tokens come from rank 0, times (monotonic ns) from each.

    `layer_started_ns` has one entry a layer when the step held a sequence with a push target, else none. Of `draft_ns` of the step
    the draft's tokens were guessed; `num_drafts` says for each item of the plan how many guesses the step verified, and is empty where
    there were none. `failed` are sequences whose logits were not finite: they have no token, and are not to be computed any further.
    An `error` fails every sequence of the step: all ranks answer with one, whichever of them failed.
    """

    rank: int
    step: int
    tokens: tuple[SampledToken, ...]
    started_ns: int
    ended_ns: int
    layer_started_ns: tuple[int, ...] = ()
    draft_ns: int = 0
    num_drafts: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    error: ErrorInfo | None = None


class PushOutcome(StrEnum):
    """What is known of a push: it is there; it is not, and nothing moves any more; nobody can tell yet.

    Two more of which nothing moves: STALE, whose grant the destination has taken back, and NOT_TRIED, because what was to be pushed
    before it had failed.
    """

    DONE = "done"
    FAILED_QUIESCED = "failed_quiesced"
    INDETERMINATE = "indeterminate"
    STALE = "stale"
    NOT_TRIED = "not_tried"


class PartPushed(msgspec.Struct, frozen=True, kw_only=True, tag="part_pushed"):
    """Some of a part has been written, or failed to be: tokens `[start, end)` of KEY or VALUE, `[0, 1)` of a state.

    Tokens are counted by those of the sequence that the destination rank keeps: all of them, or with dcp those of its own blocks.
    `queued_ns` is when the cache content existed, `started_ns` and `done_ns` frame the copy, all host monotonic.
    """

    rank: int
    seq: int
    handoff_id: str
    namespace: Namespace
    role: Role
    layer: int
    destination_rank: int
    start: int
    end: int
    num_bytes: int
    queued_ns: int
    started_ns: int
    done_ns: int
    outcome: PushOutcome
    reason: str = ""


class DigestSequence(msgspec.Struct, frozen=True, kw_only=True, tag="digest_sequence"):
    """Digest the cache of a bound sequence, tokens `[start, end)` and the states. Answered by `SequenceDigests`.

    With `side` SOURCE what this rank owes to each destination rank of the sequence's push target, with DESTINATION all that this
    rank holds. No step runs meanwhile.
    """

    seq: int
    side: PeerSide
    start: int
    end: int


class CacheDigest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The sum over some units of one cache, modulo 2**64: see `common.layout.digest`."""

    namespace: Namespace
    role: Role
    layer: int
    destination_rank: int
    value: int


class SequenceDigests(msgspec.Struct, frozen=True, kw_only=True, tag="sequence_digests"):
    """A rank's answer to a `DigestSequence`."""

    rank: int
    digests: tuple[CacheDigest, ...]


class ScanRank(msgspec.Struct, frozen=True, kw_only=True, tag="scan_rank"):
    """Ask a rank what it holds, by walking its tables. Answered by `RankScan`."""


class RankScan(msgspec.Struct, frozen=True, kw_only=True, tag="rank_scan"):
    """What a rank holds right now: among others pulls that have not ended, and the staging rows that bound sequences own."""

    rank: int
    seqs: tuple[int, ...]
    num_queued_pushes: int
    num_open_fds: int
    num_memfds: int
    num_pulls: int = 0
    staging_rows: tuple[int, ...] = ()


class RefusedCount(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How often peers asked this of a rank's memory and were turned away for this reason."""

    asked: Asked
    reason: RefusalReason
    count: int


class RefusedTransfers(msgspec.Struct, frozen=True, kw_only=True, tag="refused_transfers"):
    """All that a rank has refused its peers since its start. Told soon after a refusal; many come together."""

    rank: int
    counts: tuple[RefusedCount, ...]


class StopRank(msgspec.Struct, frozen=True, kw_only=True, tag="stop_rank"):
    """Leave. Answered by `Done`, then the rank's process ends with status 0."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """A rank's answer to a command that returns nothing. An `error` leaves the rank as it was before the command."""

    rank: int
    error: ErrorInfo | None = None
    indeterminate: tuple[int, ...] = ()


RankCommand: TypeAlias = (
    StartRank
    | AddPeerRank
    | LinkPeer
    | UnlinkPeer
    | BindSequence
    | ExtendSequences
    | ReleaseSequences
    | PullShards
    | DigestSequence
    | StepPlan
    | ScanRank
    | StopRank
)
RankAnswer: TypeAlias = RankStarted | StepDone | SequenceDigests | RankScan | Done
RankMessage: TypeAlias = RankAnswer | RankProgress | PartPushed | PeerLinked | RefusedTransfers | PullReport
