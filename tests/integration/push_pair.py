"""A prefill engine linked to a decode engine, and the way of prompts from one to the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from common.engine.port import EngineInfo
from common.engine.ranks.group import RankGroup
from common.engine.ranks.launch import Launcher, ProcessLauncher
from common.layout.planner import plan
from common.layout.ranges import RangeSet
from contracts.handoff import Grant
from contracts.manifest import PlannedPart, Role
from contracts.rank import PartPushed, PushOutcome, PushTarget, StepItem, StepPlan
from contracts.requests import WorkerRef
from contracts.workers import WorkerDescription
from tests.integration.engine_world import binding, engine, starts, thread_launcher

PAGED = (Role.KEY, Role.VALUE)
DECODER = WorkerRef(worker_id="d", incarnation="j1")


@dataclass
class Pair:
    """A prefill engine linked to a decode engine, and every report of the former."""

    prefill: RankGroup
    decode: RankGroup
    prefill_info: EngineInfo
    decode_info: EngineInfo
    reports: list[PartPushed] = field(default_factory=list)

    @classmethod
    async def make(
        cls,
        stack: AsyncExitStack,
        folder: Path,
        directory: Path,
        tps: tuple[int, int],
        *,
        failpoints: str = "",
        real: bool = False,
    ) -> Self:
        """Start both, with `tps` ranks, and link them."""

        def launcher(tp: int) -> Launcher:
            return ProcessLauncher() if real else thread_launcher(tp)

        prefill, prefill_info = await stack.enter_async_context(
            engine(starts(folder, directory, tps[0], worker_id="p", failpoints=failpoints), launcher(tps[0]))
        )
        decode, decode_info = await stack.enter_async_context(
            engine(starts(folder, directory, tps[1], worker_id="d", incarnation="j1"), launcher(tps[1]))
        )
        pair = cls(prefill, decode, prefill_info, decode_info)
        await prefill.link(DECODER, pair.descriptions())
        return pair

    def descriptions(self) -> tuple[WorkerDescription, ...]:
        """The decode worker as its peers see it."""
        return tuple(
            WorkerDescription(
                worker_id="d",
                incarnation="j1",
                num_ranks=len(self.decode_info.ranks),
                manifest=rank.manifest,
                region=rank.region,
            )
            for rank in self.decode_info.ranks
        )

    @property
    def parts(self) -> tuple[PlannedPart, ...]:
        """What every handoff owes."""
        return plan(
            [rank.manifest for rank in self.prefill_info.ranks], [rank.manifest for rank in self.decode_info.ranks]
        ).parts

    async def bind(self, seq: int, length: int) -> None:
        """Reserve on the decode side in other blocks and another slot, then bind the source with that grant."""
        there = tuple(range(100 - seq * 25, 125 - seq * 25))
        await self.decode.bind(binding(seq, length, block_ids=there, slot=5 - seq, generation=40 + seq))
        grant = Grant(worker_id="d", incarnation="j1", generation=40 + seq, block_ids=there, slot=5 - seq)
        await self.prefill.bind(binding(seq, length, push=PushTarget(grant=grant, num_cached_tokens=0)))

    async def compute(self, prompts: Sequence[tuple[int, ...]], chunk: int = 60) -> dict[int, int]:
        """Prefill all prompts side by side in chunks; the first token of each."""
        first: dict[int, int] = {}
        for start in range(0, max(map(len, prompts)), chunk):
            items = []
            for seq, prompt in enumerate(prompts):
                piece = prompt[start : start + chunk]
                if piece:
                    last = start + len(piece) == len(prompt)
                    items.append(
                        StepItem(
                            seq=seq, start=start, num_tokens=len(piece), token_ids=piece, sample=last, last_chunk=last
                        )
                    )
            result = await self.prefill.step(StepPlan(step=start, items=tuple(items)))
            first |= {token.seq: token.token_id for token in result.tokens}
        return first

    async def collect(self, lengths: Sequence[int], missing: int = 0) -> None:
        """Take reports until every part of every sequence is there, but for `missing` parts each."""
        parts = self.parts
        async with asyncio.timeout(30):
            while any(self.num_done(seq, length, parts) < len(parts) - missing for seq, length in enumerate(lengths)):
                self.reports.append(await self.prefill.next_push())

    def num_done(self, seq: int, length: int, parts: Sequence[PlannedPart]) -> int:
        """How many parts of a sequence are complete."""
        return sum(self.ranges(seq, part).covers(0, length if part.role in PAGED else 1) for part in parts)

    def of(self, seq: int, part: PlannedPart) -> list[PartPushed]:
        """The good reports of one part."""
        return [
            report
            for report in self.reports
            if report.outcome is PushOutcome.DONE
            and (report.seq, report.rank, report.destination_rank, report.role, report.layer)
            == (seq, part.src_rank, part.dst_rank, part.role, part.layer)
        ]

    def ranges(self, seq: int, part: PlannedPart) -> RangeSet:
        """What is there of one part."""
        return RangeSet.of((report.start, report.end) for report in self.of(seq, part))

    async def continue_on_decode(
        self, prompts: Sequence[tuple[int, ...]], first: dict[int, int], count: int
    ) -> list[tuple[int, ...]]:
        """Generate `count` tokens of each sequence, the first of which prefill has chosen."""
        outputs = [[first[seq]] for seq in range(len(prompts))]
        for step in range(count - 1):
            items = tuple(
                StepItem(
                    seq=seq,
                    start=len(prompt) + step,
                    num_tokens=1,
                    token_ids=(first[seq],) if step == 0 else (),
                    sample=True,
                )
                for seq, prompt in enumerate(prompts)
            )
            for token in (await self.decode.step(StepPlan(step=step, items=items))).tokens:
                outputs[token.seq].append(token.token_id)
        return [tuple(output) for output in outputs]


async def hand_over(pair: Pair, prompts: Sequence[tuple[int, ...]], count: int = 64) -> list[tuple[int, ...]]:
    """The whole path of some prompts."""
    lengths = [len(prompt) for prompt in prompts]
    for seq, length in enumerate(lengths):
        await pair.bind(seq, length)
    first = await pair.compute(prompts)
    await pair.collect(lengths)
    return await pair.continue_on_decode(prompts, first, count)
