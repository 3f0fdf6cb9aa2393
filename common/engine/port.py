"""The engine as a worker's asyncio process sees it: commands to a group of ranks. No torch here.

Adapters: `common.engine.rank_group` (ranks in processes, or in threads for tests) and `common.engine.fake` (no model).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from contracts.errors import ErrorCode, PdmeshError
from contracts.rank import (
    BindSequence,
    PartPushed,
    RankProgress,
    RankScan,
    RankStarted,
    SampledToken,
    StepPlan,
)
from contracts.requests import WorkerRef
from contracts.workers import WorkerDescription


class EngineError(PdmeshError):
    """A command failed on some rank, and therefore on all. The engine itself goes on."""

    code = ErrorCode.WORKER_FAILED


class EngineDeadError(PdmeshError):
    """A rank is gone or stopped answering: the engine cannot go on, its worker needs a new incarnation."""

    code = ErrorCode.WORKER_LOST


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine is. `ranks` are in the order of their tensor-parallel rank."""

    model_fingerprint: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_position: int
    num_layers: int
    block_size: int
    num_blocks: int
    num_slots: int
    ranks: tuple[RankStarted, ...]


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave: the tokens of the sampling rank, and when each rank computed (host monotonic ns)."""

    step: int
    tokens: tuple[SampledToken, ...]
    started_ns: int
    ended_ns: int
    layer_started_ns: tuple[tuple[int, ...], ...]


class Engine(Protocol):
    """A group of ranks that share one model: one replica of a worker.

    Commands are sequential: one caller at a time, in the order in which all ranks see them. Only `link` may go on beside other
    commands. Each raises `EngineError` when the command failed alike on all ranks, `EngineDeadError` when the engine is lost.
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

    async def unlink(self, peer: WorkerRef) -> None:
        """Forget a peer, or give up linking with it."""
        ...

    async def bind(self, binding: BindSequence) -> None:
        """Give a sequence its memory on every rank; on return every header cell holds its generation."""
        ...

    async def release(self, seqs: tuple[int, ...], generation: int, timeout_ms: int) -> frozenset[int]:
        """Take memory back on every rank; returns the sequences whose memory some writer may still touch."""
        ...

    async def step(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        ...

    async def scan(self) -> tuple[RankScan, ...]:
        """What each rank really holds."""
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
