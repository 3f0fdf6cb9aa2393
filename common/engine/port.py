"""The engine as a worker's asyncio process sees it: commands to a group of ranks. No torch here.

Adapters: `common.engine.ranks.group` (ranks in processes, or in threads for tests) and `common.engine.fake.engine` (no model).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import msgspec

from contracts.dataplane import Asked, RefusalReason
from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.handoff import PartDigest
from contracts.pull import RoleMerge, ShardPull
from contracts.rank import (
    BindSequence,
    ExtendSequences,
    PartPushed,
    PeerSide,
    RankProgress,
    RankScan,
    RankStarted,
    SampledToken,
    StepPlan,
)
from contracts.rank_pull import PullReport, PullShards
from contracts.requests import WorkerRef
from contracts.workers import WorkerDescription

Refused: TypeAlias = Mapping[tuple[Asked, RefusalReason], int]
"""How often what was asked of an engine's memory was refused, and why, since its start."""


class EngineError(PdmeshError):
    """A command failed on some rank, and therefore on all. The engine itself goes on."""

    code = ErrorCode.WORKER_FAILED


class EngineDeadError(PdmeshError):
    """A rank is gone or stopped answering: the engine cannot go on, its worker needs a new incarnation."""

    code = ErrorCode.WORKER_LOST


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine is. `ranks` are in the order of their tensor-parallel rank.

    `num_staging_rows` sequences can pull states at the same time: each needs a row of its own, 0 to `num_staging_rows - 1`.
    """

    model_fingerprint: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_position: int
    num_layers: int
    block_size: int
    num_blocks: int
    num_slots: int
    num_staging_rows: int = 0
    ranks: tuple[RankStarted, ...]

    @property
    def dcp(self) -> int:
        """Ranks in succession that share the blocks of a sequence."""
        return self.ranks[0].manifest.coordinates.dcp_size

    @property
    def block_tokens(self) -> int:
        """Tokens of a sequence that one block id stands for: a block on each of the ranks that share it."""
        return self.block_size * self.dcp


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave: the tokens of the sampling rank, and when each rank computed (host monotonic ns).

    `draft_ns` of the time went into guesses, on the slowest rank. `num_drafts` says for each item of the plan how many guesses the
    step verified; it is empty where there were none. `failed` are sequences of the plan that were given no token, because their
    logits are not finite: they are not to be computed any further, and nobody else of the step is touched by it.
    """

    step: int
    tokens: tuple[SampledToken, ...]
    started_ns: int
    ended_ns: int
    layer_started_ns: tuple[tuple[int, ...], ...]
    draft_ns: int = 0
    num_drafts: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()

    @property
    def verify_ns(self) -> int:
        """The rest of the step: the model's pass over tokens and guesses."""
        return max(0, self.ended_ns - self.started_ns - self.draft_ns)


class PullResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a pull, on all ranks alike.

    Without an `error` everything that was asked for is in its final place. With one, no rank that missed a shard has merged
    anything: its states are what they were before. But another rank may have, and what there is of KEY and VALUE is undefined: the
    sequence is to be released, or pulled anew, which puts everything into its place once more. `shards` has the last state of each, by source,
    then destination rank. `wait_ms` is the time from the beginning of the first read to the end of the last, `merges` how long each
    role took on the slowest rank, `total_ms` all of it.
    """

    shards: tuple[ShardPull, ...]
    merges: tuple[RoleMerge, ...]
    num_bytes: int
    wait_ms: float
    total_ms: float
    parallel: bool
    error: ErrorInfo | None = None


class Engine(Protocol):
    """A group of ranks that share one model: one replica of a worker.

    Commands are sequential: one caller at a time, in the order in which all ranks see them. Only `link`, `link_source` and `pull`
    may go on beside other commands, and several of each beside each other. Each raises `EngineError` when the command failed alike on all ranks, `EngineDeadError` when the engine is lost.
    Every wait inside has a deadline.
    """

    async def start(self) -> EngineInfo:
        """Start the ranks and load the model. Cancelling it leaves nothing behind."""
        ...

    async def link(self, peer: WorkerRef, ranks: tuple[WorkerDescription, ...]) -> None:
        """Compile the reshard plan to `peer` and connect to its regions, in place of an earlier link.

        `ranks` are the ranks of all replicas of the peer, in any order; a push goes to the replica that its grant names.
        It waits for the peer, and holds off other commands for a moment only: steps and pushes to others go on. Raises
        `EngineError` with the rule that forbids it, or when the peer is unlinked or linked anew meanwhile; but for a newer
        link the peer is then not linked at all. Whoever cancels it unlinks the peer.
        """
        ...

    async def link_source(self, peer: WorkerRef, ranks: tuple[WorkerDescription, ...]) -> None:
        """The same for a peer that this engine is to pull from: the plan goes from the peer to this engine's ranks.

        `ranks` are the ranks of all replicas of the peer, in any order; a pull reads from the replica that its grant names. Like
        `link` in all else: it holds nothing up, takes the place of an earlier link with the peer, of either kind, and is undone by
        `unlink`. It connects to every source rank that holds something for this rank: `link_source` proves that they can be reached.
        """
        ...

    async def unlink(self, peer: WorkerRef) -> None:
        """Forget a peer, linked either way, or give up linking with it. What is being pulled from it fails soon."""
        ...

    async def bind(self, binding: BindSequence) -> None:
        """Give a sequence its memory on every rank; on return every header cell holds its generation.

        A sequence that is to pull CONV or SSM names its `staging_row`; one that another bound sequence holds is refused. A source
        whose cache is to be read names a `secret`: over tcp nobody reads without it.
        """
        ...

    async def pull(self, command: PullShards, observe: Callable[[PullReport], None]) -> PullResult:
        """Read what `command` names from a linked source into a bound sequence, and wait until it is over on every rank.

        Steps, bindings, releases and other pulls go on meanwhile: do not hold any lock of the engine over it. `observe` is called on
        the event loop with each report of each rank, in each rank's order: `ShardPulled` when a read begins and when it is over,
        with the parts of KEY and VALUE that are in their places; `RoleMerged` with the parts of CONV or SSM; `PullStopped`. It must
        not raise. Every shard that has begun is waited for, even when one fails; then the rank begins with no other, merges nothing,
        and the result has its first error. A source that takes its memory back meanwhile makes the pull fail: what was read does not
        count. Reads end by `command.timeout_ms`.

        Idempotent by `command.lock` until the sequence is released: the same number again waits for, or gives, the same result,
        and `observe` is told again what was reported before. Raises `EngineError` when no pull was begun because of it: for a lower
        number than the last, a higher one while the last is under way, a sequence that is not bound, a peer that is not linked as a
        source, roles without a staging row; and when a rank says nothing in time. Then release the sequence, or try a higher number.
        Cancelling it lets the ranks go on: `release` ends a pull.
        """
        ...

    async def extend(self, command: ExtendSequences) -> None:
        """Give bound sequences more blocks on every rank; on return the blocks' header cells hold the command's generation.

        After an error release every sequence of the command: some rank may have given the blocks.
        """
        ...

    async def release(self, seqs: tuple[int, ...], generation: int, timeout_ms: int) -> frozenset[int]:
        """Take memory back on every rank; returns the sequences whose memory some writer may still touch.

        A pull of the sequence is given up: shards that have not begun never do, those under way are waited for up to the timeout.
        A sequence that is returned keeps its blocks, its slot and its staging row; releasing it again later says whether they are free.
        """
        ...

    async def step(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        ...

    async def digest(self, seq: int, side: PeerSide, start: int, end: int) -> tuple[PartDigest, ...]:
        """Digest the cache of a bound sequence, tokens `[start, end)` and the states, for each cache and destination rank.

        As a SOURCE what is owed to each rank of the sequence's push target, as a DESTINATION what the ranks hold: with nothing lost
        or changed on the way, both are equal. It reads all of these bytes, and steps wait for it.
        """
        ...

    async def scan(self) -> tuple[RankScan, ...]:
        """What each rank really holds."""
        ...

    def watch_refused(self, told: Callable[[Refused], None]) -> None:
        """Call `told` on the event loop whenever peers were refused at this engine's memory, with all of it; at once for what was before.

        It must not raise. There is one such watcher at a time. Where peers map the memory and refuse themselves, it is never called.
        """
        ...

    async def next_push(self) -> PartPushed:
        """The next report of a pushed part, from any rank, in each rank's order. Waits for ever: cancel it, or `stop`."""
        ...

    async def next_progress(self) -> RankProgress:
        """The next report of a start's progress. Later there is none: it waits for the end of the engine, however idle that is.

        Raises `EngineDeadError` as soon as the engine is lost.
        """
        ...

    async def stop(self) -> None:
        """End all ranks. Idempotent, bounded in time; safe after a failed start."""
        ...
