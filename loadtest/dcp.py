"""`dcp`: what it costs and gains when ranks share the blocks of a KV head, beside ranks that each hold them all, in one run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

from common.engine.collectives.group_memory import GroupMemory
from common.engine.collectives.passed_fd import PassedFd
from common.runtime.clock import Clock
from common.worker.core.blocks import BlockPool, MemoryNeed
from loadtest.dcp_figures import CacheBytes, StepFigures, report_memory, report_steps, step_figures
from loadtest.dcp_meshes import run_dcp_meshes
from loadtest.dcp_settings import DcpSettings
from loadtest.dcp_shape import BLOCK_TOKENS, blocks_for
from loadtest.dcp_times import RankPlace, ReadTime, StepTime
from loadtest.handoff import Say
from loadtest.remote_process import Closable, Process, Remote
from loadtest.report import Report
from loadtest.rounds import orders

_NUM_MEETINGS: Final = 200
_TOLERANCE: Final = 3e-4
"""Between logits whose largest is about 4, as the engine's own tests allow."""


async def run_dcp(settings: DcpSettings, report: Report, clock: Clock, say: Say) -> None:
    """Measure steps, count memory, hand over requests, and fill the report. Raises PdmeshError when a rank or a mesh fails."""
    figures = await asyncio.to_thread(measure_steps, settings, report, say)
    report_steps(report, figures)
    await asyncio.to_thread(_report_memory, settings, report)
    if settings.num_requests:
        await run_dcp_meshes(settings, report, clock, say)


def measure_steps(settings: DcpSettings, report: Report, say: Say, num_cores: int | None = None) -> list[StepFigures]:
    """For each number of ranks: all sizes of groups and contexts, in rounds in which they take turns. Blocks.

    With fewer cores than ranks (`num_cores`, by default those of this process) one rank works and the others are simulated: their
    meetings take as long as those of two ranks. Logits of real ranks are held against those without groups.
    """
    cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
    found: list[StepFigures] = []
    meeting_ns = _meeting_ns()
    say(f"two ranks meet in {meeting_ns / 1e3:.0f} µs")
    for tp in settings.ranks:
        simulated = tp > cores
        say(f"{tp} ranks{f', of which one is real: there are {cores} cores' if simulated else ''}")
        with ExitStack() as stack:
            sizes = group_sizes(tp)
            meeting = meeting_ns if simulated else None
            bench = Bench(_start(stack, tp, sizes, max(settings.contexts), meeting), tp, sizes, is_simulated=simulated)
            for num_tokens in settings.contexts:
                if not simulated:
                    bench.check(num_tokens, report)
                found += bench.measure(num_tokens, settings)
                say(f"{tp} ranks, {num_tokens} tokens: measured")
    return found


class Bench:
    """Ranks that are there, each with one model for each size of groups."""

    def __init__(self, ranks: Sequence[Process], tp: int, sizes: Sequence[int], *, is_simulated: bool) -> None:
        """`ranks` are all of `tp`, or the one that stands for them, with `StepRank`s in them. Returns when all have started."""
        self._ranks = ranks
        self._tp = tp
        self._sizes = tuple(sizes)
        self._is_simulated = is_simulated
        ask_all(ranks, "meeting_ns", 1)

    def check(self, num_tokens: int, report: Report) -> None:
        """Whether a step gives the same with and without groups; what differs is a failure."""
        expected = ask_all(self._ranks, "logits", 1, num_tokens)[0]
        for dcp in self._sizes[1:]:
            actual = ask_all(self._ranks, "logits", dcp, num_tokens)[0]
            furthest = max(abs(one - other) for one, other in zip(expected, actual, strict=True))
            if not furthest <= _TOLERANCE * max(1.0, *map(abs, expected)):
                report.fail(f"{self._tp} ranks, dcp {dcp}, {num_tokens} tokens: logits are off by {furthest:.2g}")

    def measure(self, num_tokens: int, settings: DcpSettings) -> list[StepFigures]:
        """All sizes of groups behind one context."""
        steps: dict[int, list[list[StepTime]]] = {dcp: [[] for _ in self._ranks] for dcp in self._sizes}
        reads: dict[int, list[list[ReadTime]]] = {dcp: [[] for _ in self._ranks] for dcp in self._sizes}
        for order in orders([str(dcp) for dcp in self._sizes], settings.num_rounds):
            for dcp in map(int, order):
                for held, found in ((steps, "steps"), (reads, "reads")):
                    told = ask_all(self._ranks, found, dcp, num_tokens, settings.num_steps)
                    for place, new in enumerate(told):
                        held[dcp][place].extend(new)
        return [
            step_figures(self._tp, dcp, num_tokens, steps[dcp], reads[dcp], is_simulated=self._is_simulated)
            for dcp in self._sizes
        ]


def group_sizes(tp: int) -> tuple[int, ...]:
    """Powers of two up to all ranks; all of them hold the one KV head."""
    return tuple(1 << power for power in range(tp.bit_length()) if tp % (1 << power) == 0)


def step_rank(*arguments: Any) -> Closable:
    """A rank, made in its own process: torch stays out of this one."""
    from loadtest.dcp_rank import StepRank

    return StepRank(*arguments)


def _start(stack: ExitStack, tp: int, sizes: Sequence[int], num_tokens: int, meeting_ns: int | None) -> list[Process]:
    """The processes end with `stack`."""
    if meeting_ns is not None:
        place = RankPlace(rank=0, tp=tp, meeting_ns=meeting_ns)
        return [stack.enter_context(Remote("rank 0", step_rank, place, None, tuple(sizes), num_tokens))]
    memory = GroupMemory.create(tp, num_splits=len(sizes))
    stack.callback(memory.close)
    passed = PassedFd(memory.fileno())
    return [
        stack.enter_context(
            Remote(f"rank {rank}", step_rank, RankPlace(rank=rank, tp=tp), passed, tuple(sizes), num_tokens)
        )
        for rank in range(tp)
    ]


def _meeting_ns() -> int:
    """How long two ranks take to meet here and now."""
    with ExitStack() as stack:
        ranks = _start(stack, 2, (1,), 1, None)
        return max(map(int, ask_all(ranks, "meeting_ns", _NUM_MEETINGS)))


def ask_all(ranks: Sequence[Process], what: str, *arguments: Any) -> list[Any]:
    """Ask all at once: they wait for each other."""
    for rank in ranks:
        rank.tell(what, *arguments)
    return [rank.hear() for rank in ranks]


def _report_memory(settings: DcpSettings, report: Report) -> None:
    """The cache tensors of a rank that holds the same requests alone, and with others: a share each, but for a block a sequence."""
    found: dict[int, CacheBytes] = {}
    with Remote("rank", step_rank, RankPlace(rank=0, tp=1, meeting_ns=0), None, (1,), 1) as rank:
        for dcp in group_sizes(max(settings.ranks)):
            num_blocks = _blocks_granted(settings.contexts, dcp)
            paged, states = rank.ask("cache_bytes", dcp, num_blocks, len(settings.contexts))
            found[dcp] = CacheBytes(num_blocks=num_blocks, key_value_bytes=paged, state_bytes=states)
    report_memory(report, settings.contexts, found)


def _blocks_granted(lengths: Sequence[int], dcp: int) -> int:
    """What a worker sets aside on each rank for a request of each of `lengths`."""
    pool = BlockPool(
        num_blocks=sum(blocks_for(length, 1) for length in lengths),
        num_slots=len(lengths),
        block_size=BLOCK_TOKENS,
        dcp=dcp,
    )
    held = [pool.reserve(MemoryNeed(num_tokens=length, limit_tokens=length)) for length in lengths]
    return sum(len(each.block_ids) for each in held if each is not None)
