"""Handoffs between engines alone: every pair of tensor-parallel sizes, without services, against reference tokens."""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.dataplane.port import DataPlane
from common.engine.collectives.threads import ThreadGroup
from common.engine.port import EngineInfo
from common.engine.ranks.group import RankGroup
from common.engine.ranks.launch import Launcher, ThreadLauncher
from common.engine.ranks.process import RankEnvironment, serve
from common.engine.transfer.transports import open_data_plane
from common.layout.planner import ReshardPlan, plan
from common.layout.ranges import RangeSet
from common.runtime.clock import Clock, SystemClock
from contracts.handoff import GRANT_SECRET_BYTES, Grant
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.rank import BindSequence, DrafterKind, PushOutcome, PushTarget, StartRank, StepItem, StepPlan
from contracts.requests import SamplingParams, WorkerRef
from contracts.workers import WorkerDescription
from tests.integration.cache_bytes import Memories

BLOCK_SIZE = 16
NUM_BLOCKS = 1024
NUM_SLOTS = 16
CHUNK = 128
BUDGET = 256
DEADLINE_S = 120

PartKey = tuple[Namespace, Role, int, int, int]


@dataclass(kw_only=True)
class Worker:
    """One engine with thread ranks, and the counters that its worker process would keep."""

    name: str
    group: RankGroup
    info: EngineInfo
    generation: int = 0
    step: int = 0
    plans: dict[str, ReshardPlan] = field(default_factory=dict)

    @property
    def ref(self) -> WorkerRef:
        """How a peer names it."""
        return WorkerRef(worker_id=self.name, incarnation=f"i-{self.name}")

    @property
    def block_tokens(self) -> int:
        """Tokens of a sequence behind one block id: a block on each of the ranks that share them."""
        return BLOCK_SIZE * self.info.ranks[0].manifest.coordinates.dcp_size

    def describe(self) -> tuple[WorkerDescription, ...]:
        """What it says of its ranks to a peer."""
        return tuple(
            WorkerDescription(
                worker_id=self.name,
                incarnation=self.ref.incarnation,
                num_ranks=len(self.info.ranks),
                manifest=rank.manifest,
                region=rank.region,
            )
            for rank in self.info.ranks
        )

    def next_generation(self) -> int:
        """A number that no reservation had before."""
        self.generation += 1
        return self.generation

    async def run(self, items: Sequence[StepItem]) -> dict[int, int]:
        """One step; the tokens that it sampled by sequence."""
        self.step += 1
        result = await self.group.step(StepPlan(step=self.step, items=tuple(items)))
        return {token.seq: token.token_id for token in result.tokens}


async def start_worker(
    name: str,
    folder: Path,
    sockets: Path,
    tp: int,
    *,
    dcp: int = 1,
    memories: Memories | None = None,
    transport: str = "shm",
    dtype: str = "float32",
    num_staging_rows: int = 0,
    failpoints: str = "",
    drafter: DrafterKind = DrafterKind.NONE,
    num_speculative_tokens: int = 0,
    mtp_draft_body_tp1: bool = False,
    open_plane: Callable[[StartRank, Clock], DataPlane] = open_data_plane,
    launcher: Launcher | None = None,
) -> Worker:
    """Start an engine of `tp` ranks, each `dcp` of which share the blocks of a sequence.

    They are threads, whose regions `memories` remembers and whose data planes come from `open_plane`, unless there is a `launcher`.
    """
    threads = ThreadGroup(tp, timeout_s=60)
    clock = SystemClock()

    def open_watched(start: StartRank) -> DataPlane:
        plane = open_plane(start, clock)
        return plane if memories is None else memories.watch(start, plane)

    def serve_rank(connection: socket.socket, rank: int, size: int) -> None:
        del rank
        serve(
            connection,
            RankEnvironment(
                clock=clock,
                join=lambda start: threads.join(start.rank) if size > 1 else None,
                open_data_plane=open_watched,
            ),
        )

    starts = [
        StartRank(
            worker_id=name,
            incarnation=f"i-{name}",
            rank=rank,
            tp=tp,
            dcp=dcp,
            model_dir=str(folder),
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            num_slots=NUM_SLOTS,
            num_staging_rows=num_staging_rows,
            failpoints=failpoints,
            drafter=drafter,
            num_speculative_tokens=num_speculative_tokens,
            mtp_draft_body_tp1=mtp_draft_body_tp1,
            max_step_tokens=BUDGET,
            max_step_sequences=NUM_SLOTS,
            dtype=dtype,
            transport=transport,
            transport_dir=str(sockets),
        )
        for rank in range(tp)
    ]
    group = RankGroup(starts, launcher or ThreadLauncher(serve_rank))
    return Worker(name=name, group=group, info=await group.start())


async def link(source: Worker, destination: Worker) -> None:
    """Let `source` push to `destination`."""
    own = [rank.manifest for rank in source.info.ranks]
    source.plans[destination.name] = plan(own, [rank.manifest for rank in destination.info.ranks])
    await source.group.link(destination.ref, destination.describe())


async def hand_over(
    source: Worker, destination: Worker, prompts: Sequence[tuple[int, ...]], num_tokens: int, *, spread: int = 3
) -> list[tuple[int, ...]]:
    """Prefill all prompts at the source, push, and decode `num_tokens` tokens of each at the destination, as one batch."""
    sampling = SamplingParams(max_tokens=num_tokens, seed=1, temperature=0.0, ignore_eos=True)
    seqs = range(1, len(prompts) + 1)
    first = await prefill_over(source, destination, prompts, sampling, num_tokens, spread=spread)
    outputs = [[first[seq]] for seq in seqs]
    for position in range(num_tokens - 1):
        given = {seq: (first[seq],) if position == 0 else () for seq in seqs}
        items = [
            StepItem(seq=seq, start=len(prompts[seq - 1]) + position, num_tokens=1, token_ids=given[seq], sample=True)
            for seq in seqs
        ]
        tokens = await destination.run(items)
        for seq in seqs:
            outputs[seq - 1].append(tokens[seq])
    for worker in (source, destination):
        assert await worker.group.release(tuple(seqs), worker.next_generation(), 5000) == frozenset()
    return [tuple(output) for output in outputs]


async def prefill_over(
    source: Worker,
    destination: Worker,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    room: int,
    *,
    spread: int = 3,
) -> dict[int, int]:
    """Prefill all prompts at the source and push them to where there is `room` behind each; the first token of each, by its number from 1."""
    there = await bind_all(destination, prompts, sampling, room, spread=spread)
    await bind_all(source, prompts, sampling, 0, push_to=there)
    first = await prefill_all(source, prompts)
    await ledger_closed(source, destination, prompts)
    return first


async def bind_all(
    worker: Worker,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    room: int,
    *,
    spread: int = 1,
    push_to: Sequence[Grant] = (),
) -> list[Grant]:
    """Give each prompt memory, and what comes behind it `room`; they are numbered from 1. With `push_to` they are pushed there."""
    grants = memory_for(prompts, worker, room, spread=spread)
    for seq, (prompt, grant) in enumerate(zip(prompts, grants, strict=True), 1):
        await worker.group.bind(
            BindSequence(
                seq=seq,
                handoff_id=f"h{seq}",
                generation=grant.generation,
                block_ids=grant.block_ids,
                slot=grant.slot,
                num_prompt_tokens=len(prompt),
                sampling=sampling,
                secret="" if push_to else grant.secret,
                push=PushTarget(grant=push_to[seq - 1], num_cached_tokens=0) if push_to else None,
            )
        )
    return grants


async def prefill_all(worker: Worker, prompts: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Compute prompts that are bound, in steps that they share; the first token of each."""
    first: dict[int, int] = {}
    for items in prefill_steps(prompts):
        first |= await worker.run(items)
    return first


def owed_by(part: PlannedPart, start: int, end: int) -> RangeSet:
    """What is to be reported of a part: its slot, or a sequence's tokens `[start, end)`, counted by those that its destination keeps.

    A draft's cache has no token 0.
    """
    if part.role not in {Role.KEY, Role.VALUE}:
        return RangeSet.of([(0, 1)])
    if part.namespace is Namespace.DRAFT:
        start = max(start, 1)
    kept = [token for token in range(end) if token // BLOCK_SIZE % part.modulus == part.residue]
    return RangeSet.of((place, place + 1) for place, token in enumerate(kept) if token >= start)


def memory_for(prompts: Sequence[tuple[int, ...]], worker: Worker, extra: int, *, spread: int) -> list[Grant]:
    """Memory for each prompt.

    With `spread` above 1 the blocks of a sequence are not adjacent, so that copies cannot merge by luck; with 0 they lie anywhere.
    """
    if spread:
        free = [block for offset in range(spread) for block in range(offset, NUM_BLOCKS, spread)]
    else:
        free = random.Random(worker.name).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    grants = []
    for number, prompt in enumerate(prompts):
        count = -(-(len(prompt) + extra) // worker.block_tokens)
        grants.append(
            Grant(
                worker_id=worker.name,
                incarnation=worker.ref.incarnation,
                generation=worker.next_generation(),
                block_ids=tuple(free[:count]),
                slot=NUM_SLOTS - 1 - number,
                secret=secrets.token_hex(GRANT_SECRET_BYTES),
            )
        )
        free = free[count:]
    return grants


def prefill_steps(prompts: Sequence[tuple[int, ...]]) -> Iterator[list[StepItem]]:
    """Steps of at most `BUDGET` tokens, at most `CHUNK` of one prompt: two prompts or more share most steps."""
    done = [0] * len(prompts)
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        items: list[StepItem] = []
        budget = BUDGET
        for number, prompt in enumerate(prompts):
            size = min(CHUNK, len(prompt) - done[number], budget)
            if size < 1:
                continue
            start = done[number]
            last = start + size == len(prompt)
            items.append(
                StepItem(
                    seq=number + 1,
                    start=start,
                    num_tokens=size,
                    token_ids=tuple(prompt[start : start + size]),
                    sample=last,
                    last_chunk=last,
                )
            )
            done[number] += size
            budget -= size
        yield items


async def ledger_closed(source: Worker, destination: Worker, prompts: Sequence[tuple[int, ...]]) -> None:
    """Read reports of pushes until every planned part of every prompt tiles exactly what it owes."""
    planned = source.plans[destination.name].parts
    owed: dict[tuple[str, PartKey], RangeSet] = {}
    for number, prompt in enumerate(prompts):
        for part in planned:
            key = (part.namespace, part.role, part.layer, part.src_rank, part.dst_rank)
            owed[f"h{number + 1}", key] = owed_by(part, 0, len(prompt))
    done = dict.fromkeys(owed, RangeSet())
    async with asyncio.timeout(DEADLINE_S):
        while done != owed:
            push = await source.group.next_push()
            assert push.outcome is PushOutcome.DONE, push.reason
            part_key = (push.namespace, push.role, push.layer, push.rank, push.destination_rank)
            held = done[push.handoff_id, part_key]
            assert not held.overlaps(push.start, push.end)
            done[push.handoff_id, part_key] = held.add(push.start, push.end)
