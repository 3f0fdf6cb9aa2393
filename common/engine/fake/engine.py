"""An engine without a model: the same commands, made-up tokens, parts that say they were pushed. For simulation and load tests.

The token at position p of a sequence depends on the request's seed and p alone, so that whoever continues a sequence
continues it alike: what a mesh of fake engines streams can be compared with `fake_token`. So do the guesses that are right, as far as
a step has any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from common.engine.fake.model import fake_shape
from common.engine.fake.pull import STATES, FakePull, FakeReads
from common.engine.fake.pushes import pushed_part, unsent
from common.engine.fake.tokens import VOCAB_SIZE, drawn_tokens, fake_token
from common.engine.port import EngineError, EngineInfo, PullResult, Refused, StepResult
from common.engine.ranks.digests import part_digests
from common.engine.transfer.pull_reports import Pulls
from common.layout.context_parallel import dcp_rank as dcp_rank_of
from common.layout.context_parallel import held_range
from common.layout.planner import ReshardPlan, plan
from common.layout.refusal import PlanRefusedError
from common.layout.region import lay_out
from common.layout.replicas import split_replicas
from common.runtime.clock import Clock
from contracts.errors import ErrorCode
from contracts.handoff import Grant, PartDigest
from contracts.manifest import Coordinates
from contracts.rank import (
    BindSequence,
    DrafterKind,
    ExtendSequences,
    PartPushed,
    PeerSide,
    RankProgress,
    RankScan,
    RankStarted,
    SampledToken,
    StepItem,
    StepPlan,
)
from contracts.rank_pull import PullReport, PullShards
from contracts.requests import WorkerRef
from contracts.workers import WorkerDescription

EOS_TOKEN_ID: Final = 0
MAX_POSITION: Final = 1 << 20
MODEL: Final = "fake"

_MAX_PUSHES: Final = 1 << 16


class _Link(msgspec.Struct, frozen=True, kw_only=True):
    """The plan to one worker, or from it, and how many replicas it has. `side` is the worker's."""

    plan: ReshardPlan
    dp: int
    side: PeerSide


class FakeEngine:
    """See `common.engine.port.Engine`. A step takes `step_s` seconds of the clock, a pull what `reads` says.

    Of a step that verifies guesses a quarter went into guessing.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        worker_id: str,
        incarnation: str,
        dp_rank: int = 0,
        dp: int = 1,
        tp: int = 1,
        dcp: int = 1,
        block_size: int = 16,
        num_blocks: int = 256,
        num_slots: int = 32,
        num_staging_rows: int = 0,
        drafter: DrafterKind = DrafterKind.NONE,
        num_speculative_tokens: int = 0,
        mtp_draft_body_tp1: bool = False,
        step_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._step_s = step_s
        self._depth = num_speculative_tokens
        self.reads: Final = FakeReads()
        self._pulls = Pulls(tp)
        self._reading: dict[int, FakePull] = {}
        self._sequences: dict[int, BindSequence] = {}
        self.corrupted: set[str] = set()
        """Handoffs whose cache is not what was computed, to plant."""
        self._links: dict[WorkerRef, _Link] = {}
        self._pushes: asyncio.Queue[PartPushed] = asyncio.Queue(_MAX_PUSHES)
        shape = fake_shape(
            block_size=block_size,
            num_blocks=num_blocks,
            num_slots=num_slots,
            num_speculative_tokens=num_speculative_tokens,
            keeps_draft=drafter is DrafterKind.MTP,
            draft_whole=mtp_draft_body_tp1,
        )
        places = [
            Coordinates(
                dp_rank=dp_rank,
                dp_size=dp,
                tp_rank=rank,
                tp_size=tp,
                dcp_rank=dcp_rank_of(rank, dcp),
                dcp_size=dcp,
            )
            for rank in range(tp)
        ]
        maps = [lay_out(shape, place) for place in places]
        self._info = EngineInfo(
            model_fingerprint=MODEL,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS_TOKEN_ID}),
            max_position=MAX_POSITION,
            num_layers=len(shape.layer_types),
            block_size=block_size,
            num_blocks=num_blocks,
            num_slots=num_slots,
            num_staging_rows=num_staging_rows,
            ranks=tuple(
                RankStarted(
                    rank=rank,
                    pid=0,
                    manifest=region.manifest(
                        worker_id=worker_id,
                        incarnation=incarnation,
                        model=MODEL,
                        draft=MODEL if drafter is DrafterKind.MTP else "",
                    ),
                    region=None,
                    num_weight_bytes=0,
                    num_region_bytes=region.nbytes,
                    load_ms=0.0,
                )
                for rank, region in enumerate(maps)
            ),
        )

    async def start(self) -> EngineInfo:
        """Nothing to load."""
        return self._info

    async def link(self, peer: WorkerRef, ranks: tuple[WorkerDescription, ...]) -> None:
        """Compile the plan; there is nothing to connect to."""
        self._link(peer, PeerSide.DESTINATION, ranks)

    async def link_source(self, peer: WorkerRef, ranks: tuple[WorkerDescription, ...]) -> None:
        """The same for the other direction."""
        self._link(peer, PeerSide.SOURCE, ranks)

    def _link(self, peer: WorkerRef, side: PeerSide, ranks: tuple[WorkerDescription, ...]) -> None:
        own = [rank.manifest for rank in self._info.ranks]
        try:
            replicas = split_replicas(side.value, [rank.manifest for rank in ranks])
            found = plan(replicas[0], own) if side is PeerSide.SOURCE else plan(own, replicas[0])
            self._links[peer] = _Link(plan=found, dp=len(replicas), side=side)
        except PlanRefusedError as error:
            self._links.pop(peer, None)
            raise EngineError(error.message, code=error.code) from error

    async def unlink(self, peer: WorkerRef) -> None:
        """Forget the plan."""
        self._links.pop(peer, None)

    async def bind(self, binding: BindSequence) -> None:
        """Remember the sequence. Like a rank, it refuses a push to a replica that it is not linked with, and a staging row in use."""
        if binding.push is not None:
            self._link_of(binding.push.grant, PeerSide.DESTINATION)
        row = binding.staging_row
        if row is not None and not 0 <= row < self._info.num_staging_rows:
            raise EngineError(f"staging_row: {row} is not allowed; the rule is: below {self._info.num_staging_rows}")
        for other in self._sequences.values():
            if row is not None and other.staging_row == row:
                raise EngineError(f"staging_row: {row} is held by sequence {other.seq}")
        self._sequences[binding.seq] = binding

    async def pull(self, command: PullShards, observe: Callable[[PullReport], None]) -> PullResult:
        """See `Engine.pull`. Cancelling it ends it, for all who wait for it."""
        link = self._link_of(command.source, PeerSide.SOURCE)
        binding = self._sequences.get(command.seq)
        if binding is None:
            raise EngineError(f"seq: {command.seq} is not bound")
        if binding.staging_row is None and STATES.intersection(command.roles):
            raise EngineError(f"staging_row: sequence {command.seq} has none; the rule is: one, to pull states")
        pulling, is_new = self._pulls.begin(command, observe)
        if is_new:
            reading = self._reading[command.seq] = FakePull(
                pulling,
                binding=binding,
                plan=link.plan,
                num_ranks=len(self._info.ranks),
                reads=self.reads,
                clock=self._clock,
                put=self._pulls.put,
            )
            await reading.run()
        return await asyncio.shield(pulling.ended)

    async def extend(self, command: ExtendSequences) -> None:
        """Remember the blocks. Like a rank, it refuses all of them when a sequence is unknown or a block is somebody's."""
        held = {block for binding in self._sequences.values() for block in binding.block_ids}
        for extension in command.extensions:
            if extension.seq not in self._sequences:
                raise EngineError(f"seq: {extension.seq} is not bound")
            if held.intersection(extension.block_ids):
                raise EngineError(f"block_ids: {extension.block_ids} are not all free")
            held.update(extension.block_ids)
        for extension in command.extensions:
            binding = self._sequences[extension.seq]
            self._sequences[extension.seq] = msgspec.structs.replace(
                binding, block_ids=(*binding.block_ids, *extension.block_ids)
            )

    async def release(self, seqs: tuple[int, ...], generation: int, timeout_ms: int) -> frozenset[int]:
        """Forget the sequences. No writer is ever under way, but a pull may be."""
        del generation
        indeterminate = [seq for seq in seqs if not await self._is_idle(seq, timeout_ms / 1000)]
        free = [seq for seq in seqs if seq not in indeterminate]
        for seq in free:
            self._sequences.pop(seq, None)
        self._pulls.forget(free)
        return frozenset(indeterminate)

    async def _is_idle(self, seq: int, timeout_s: float) -> bool:
        """Whether nothing is being pulled into a sequence any more, waiting for shards under way."""
        reading = self._reading.get(seq)
        if reading is None:
            return True
        reading.give_up()
        try:
            async with asyncio.timeout(timeout_s):
                await reading.idle.wait()
        except TimeoutError:
            return False
        del self._reading[seq]
        return True

    async def step(self, plan: StepPlan) -> StepResult:
        """Draw what was asked for, and report the parts of sequences with a push target as pushed."""
        started_ns = self._clock.monotonic_ns()
        if self._step_s:
            await self._clock.sleep(self._step_s)
        ended_ns = self._clock.monotonic_ns()
        tokens: list[SampledToken] = []
        num_drafts: list[int] = []
        pushed = False
        for item in plan.items:
            binding = self._sequences.get(item.seq)
            if binding is None:
                raise EngineError(f"seq: {item.seq} is not bound")
            num_drafts.append(self._num_drafts(item))
            if item.sample:
                tokens += drawn_tokens(item, binding.sampling.seed, num_drafts[-1])
            for push in self._pushes_of(item, binding, started_ns, ended_ns):
                pushed = True
                await self._pushes.put(push)
        layers = (started_ns,) * self._info.num_layers
        return StepResult(
            step=plan.step,
            tokens=tuple(tokens),
            started_ns=started_ns,
            ended_ns=ended_ns,
            layer_started_ns=(layers,) * len(self._info.ranks) if pushed else (),
            draft_ns=(ended_ns - started_ns) // 4 if any(num_drafts) else 0,
            num_drafts=tuple(num_drafts) if any(num_drafts) else (),
        )

    def _num_drafts(self, item: StepItem) -> int:
        """Guesses that an item verifies: as many as it has room for. Like a rank, it refuses more than it has rows of states for."""
        if item.token_ids and not item.bootstrap:
            return 0
        if not 1 <= item.num_tokens <= self._depth + 1:
            raise EngineError(f"num_tokens: {item.num_tokens} is not allowed; the rule is: 1 to {self._depth + 1}")
        return item.num_tokens - 1

    async def digest(self, seq: int, side: PeerSide, start: int, end: int) -> tuple[PartDigest, ...]:
        """Made up from the request's seed: equal on both sides, unless the handoff's id is in `corrupted`."""
        binding = self._sequences.get(seq)
        if binding is None:
            raise EngineError(f"seq: {seq} is not bound")
        if side is PeerSide.SOURCE and binding.push is not None:
            parts = self._link_of(binding.push.grant, PeerSide.DESTINATION).plan.parts
            found = {((part.namespace, part.role, part.layer), part.dst_rank) for part in parts}
        else:
            keys = {rank.rank: {span.key for span in rank.manifest.spans} for rank in self._info.ranks}
            found = {((key.namespace, key.role, key.layer), rank) for rank, held in keys.items() for key in held}
        value = fake_token(binding.sampling.seed, start + end) + (binding.handoff_id in self.corrupted)
        return part_digests(dict.fromkeys(found, value))

    async def scan(self) -> tuple[RankScan, ...]:
        """The bound sequences, the same on each rank."""
        seqs = tuple(sorted(self._sequences))
        held = (binding.staging_row for binding in self._sequences.values())
        rows = tuple(sorted(row for row in held if row is not None))
        return tuple(
            RankScan(
                rank=rank.rank,
                seqs=seqs,
                num_queued_pushes=0,
                num_open_fds=0,
                num_memfds=0,
                num_pulls=sum(not reading.idle.is_set() for reading in self._reading.values()),
                staging_rows=rows,
            )
            for rank in self._info.ranks
        )

    def watch_refused(self, told: Callable[[Refused], None]) -> None:
        """See `Engine.watch_refused`. No peer ever comes: there is no memory."""

    async def next_push(self) -> PartPushed:
        """See `Engine.next_push`."""
        return await self._pushes.get()

    async def next_progress(self) -> RankProgress:
        """There is none: waits until it is cancelled."""
        await asyncio.Event().wait()
        raise AssertionError("an event that nobody sets was set")

    async def stop(self) -> None:
        """Forget everything."""
        self._sequences.clear()
        self._links.clear()
        self._pulls.die("the engine was stopped")

    def _pushes_of(self, item: StepItem, binding: BindSequence, started_ns: int, ended_ns: int) -> Iterator[PartPushed]:
        target = binding.push
        if target is None:
            return
        start, end = max(item.start, target.num_cached_tokens), item.start + item.num_tokens
        if WorkerRef(worker_id=target.grant.worker_id, incarnation=target.grant.incarnation) not in self._links:
            yield unsent(binding, start, end, started_ns, ended_ns)  # like a rank, whose connections are closed then
            return
        for part in self._link_of(target.grant, PeerSide.DESTINATION).plan.parts:
            if part.role in target.pulled:
                continue
            if not part.role.is_paged:
                if item.last_chunk:
                    yield pushed_part(part, binding, 0, 1, started_ns, ended_ns)
            else:
                begin = max(start, part.namespace.first_token)
                for first, last in held_range(begin, end, self._info.block_size, part.modulus, part.residue):
                    yield pushed_part(part, binding, first, last, started_ns, ended_ns)

    def _link_of(self, grant: Grant, side: PeerSide) -> _Link:
        link = self._links.get(WorkerRef(worker_id=grant.worker_id, incarnation=grant.incarnation))
        if link is None or link.side is not side:
            text = f"grant.worker_id: {grant.worker_id} is not linked as a {side}"
            raise EngineError(text, code=ErrorCode.TRANSFER_FAILED)
        if grant.dp_rank >= link.dp:
            raise EngineError(f"grant.dp_rank: {grant.dp_rank} is not allowed; the rule is: below {link.dp}")
        return link
