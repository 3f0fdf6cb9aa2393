"""Pulls of an engine without a model: nothing is read, but every shard takes its time of the clock, and fails when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from common.engine.transfer.pull_reports import Pulling
from common.layout.context_parallel import held_range
from common.layout.planner import ReshardPlan
from common.layout.templates import PagedTemplate
from common.runtime.clock import Clock
from contracts.errors import ErrorCode, ErrorInfo
from contracts.manifest import PlannedPart, Role
from contracts.pull import ShardPull, ShardState
from contracts.rank import BindSequence
from contracts.rank_pull import PulledPart, PullReport, PullStopped, RoleMerged, ShardPulled

STATES: Final = frozenset({Role.CONV, Role.SSM})


class FakeReads:
    """What reading from each source rank is like, for all pulls of an engine; both may be changed at any time."""

    def __init__(self) -> None:
        self.read_s: Final[dict[int, float]] = {}
        """By source rank: seconds that a shard takes; 0 for one that is not there."""
        self.merge_s = 0.0
        """Seconds that a rank takes to merge a role."""
        self.failures: Final[dict[int, str]] = {}
        """By source rank: why its shards fail, after they have taken their time."""


class FakePull:
    """One pull at all ranks. `run` once; `give_up` ends it early; `idle` is set when nothing of it is under way any more."""

    def __init__(
        self,
        pulling: Pulling,
        *,
        binding: BindSequence,
        plan: ReshardPlan,
        num_ranks: int,
        reads: FakeReads,
        clock: Clock,
        put: Callable[[PullReport], None],
    ) -> None:
        self._command = pulling.command
        self._binding = binding
        self._num_ranks = num_ranks
        self._reads = reads
        self._clock = clock
        self._put = put
        self._given_up = False
        self._templates = [each for each in plan.templates if each.part.role in pulling.command.roles]
        self._block_size = plan.destination.fingerprint.block_size
        self.idle: Final = asyncio.Event()

    def give_up(self) -> None:
        """Begin with no further shard, and merge nothing."""
        self._given_up = True

    async def run(self) -> None:
        """Report everything, to the end."""
        try:
            async with asyncio.TaskGroup() as group:
                for rank in range(self._num_ranks):
                    group.create_task(self._run_rank(rank), name=f"fake-pull-{self._command.seq}-{rank}")
        finally:
            self.idle.set()

    async def _run_rank(self, rank: int) -> None:
        started_ns = self._clock.monotonic_ns()
        problems: list[ErrorInfo] = []
        try:
            sources = sorted({each.part.src_rank for each in self._templates if each.part.dst_rank == rank})
            for source in sources:
                self._report(rank, ShardPull(source_rank=source, destination_rank=rank, state=ShardState.WAITING))
            if self._command.parallel:
                async with asyncio.TaskGroup() as group:
                    for source in sources:
                        work = self._read(rank, source, problems)
                        group.create_task(work, name=f"fake-shard-{self._command.seq}-{source}-{rank}")
            else:
                for source in sources:
                    await self._read(rank, source, problems)
            for role in self._command.roles:
                if role in STATES and not problems and not self._given_up:
                    await self._merge(rank, role)
            if self._given_up:
                problems.append(_released(self._command.seq))
        except asyncio.CancelledError:
            problems.append(ErrorInfo(code=ErrorCode.CANCELLED, message="the pull was cancelled"))
            raise
        finally:
            self._put(
                PullStopped(
                    rank=rank,
                    seq=self._command.seq,
                    lock=self._command.lock,
                    started_ns=started_ns,
                    ended_ns=self._clock.monotonic_ns(),
                    error=problems[0] if problems else None,
                )
            )

    async def _read(self, rank: int, source: int, problems: list[ErrorInfo]) -> None:
        if problems or self._given_up:
            reason = problems[0].message if problems else _released(self._command.seq).message
            self._report(
                rank, ShardPull(source_rank=source, destination_rank=rank, state=ShardState.FAILED, reason=reason)
            )
            return
        started_ns = self._clock.monotonic_ns()
        shard = ShardPull(source_rank=source, destination_rank=rank, state=ShardState.PULLING, started_ns=started_ns)
        self._report(rank, shard)
        seconds = self._reads.read_s.get(source, 0.0)
        if seconds:
            await self._clock.sleep(seconds)
        reason = self._reads.failures.get(source, "")
        if reason:
            problems.append(
                ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message=f"shard of source rank {source}: {reason}")
            )
        ended = ShardPull(
            source_rank=source,
            destination_rank=rank,
            state=ShardState.FAILED if reason else ShardState.DONE,
            num_bytes=0 if reason else self._num_bytes(rank, source),
            started_ns=started_ns,
            duration_ms=(self._clock.monotonic_ns() - started_ns) / 1e6,
            reason=reason,
        )
        self._report(rank, ended, () if reason else self._parts(rank, source, frozenset(Role) - STATES))

    async def _merge(self, rank: int, role: Role) -> None:
        began_ns = self._clock.monotonic_ns()
        if self._reads.merge_s:
            await self._clock.sleep(self._reads.merge_s)
        self._put(
            RoleMerged(
                rank=rank,
                seq=self._command.seq,
                lock=self._command.lock,
                role=role,
                merge_ms=(self._clock.monotonic_ns() - began_ns) / 1e6,
                parts=self._parts(rank, None, frozenset({role})),
            )
        )

    def _report(self, rank: int, shard: ShardPull, parts: tuple[PulledPart, ...] = ()) -> None:
        self._put(ShardPulled(rank=rank, seq=self._command.seq, lock=self._command.lock, shard=shard, parts=parts))

    def _parts(self, rank: int, source: int | None, roles: frozenset[Role]) -> tuple[PulledPart, ...]:
        found = dict.fromkeys(
            each.part
            for each in self._templates
            if each.part.dst_rank == rank and source in {None, each.part.src_rank} and each.part.role in roles
        )
        return tuple(
            PulledPart(
                namespace=part.namespace,
                role=part.role,
                layer=part.layer,
                source_rank=part.src_rank,
                ranges=self._ranges(part),
            )
            for part in found
        )

    def _ranges(self, part: PlannedPart) -> tuple[tuple[int, int], ...]:
        if not part.role.is_paged:
            return ((0, 1),)
        start, end = self._command.num_cached_tokens, self._binding.num_prompt_tokens
        start = max(start, part.namespace.first_token)
        return held_range(start, end, self._block_size, part.modulus, part.residue)

    def _num_bytes(self, rank: int, source: int) -> int:
        return sum(
            each.piece.length * each.token_bytes * sum(end - start for start, end in self._ranges(each.part))
            if isinstance(each, PagedTemplate)
            else each.nbytes
            for each in self._templates
            if (each.part.dst_rank, each.part.src_rank) == (rank, source)
        )


def _released(seq: int) -> ErrorInfo:
    return ErrorInfo(code=ErrorCode.CANCELLED, message=f"sequence {seq} was released")
