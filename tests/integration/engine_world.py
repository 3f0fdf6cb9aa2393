"""Engines for tests: ranks in threads or processes behind the engine port, and loops that generate with them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from common.dataplane.port import DataPlane
from common.engine.collectives.threads import ThreadGroup
from common.engine.port import EngineInfo
from common.engine.ranks.group import RankGroup, RankGroupTimeouts
from common.engine.ranks.launch import Launcher, ThreadLauncher
from common.engine.ranks.process import RankEnvironment, serve
from common.engine.transfer.transports import open_data_plane
from common.runtime.clock import SystemClock
from contracts.rank import BindSequence, StartRank, StepItem, StepPlan
from contracts.requests import SamplingParams

TIMEOUT_S = 60
NUM_TOKENS = 64


def thread_launcher(
    size: int, timeout_s: float = 20.0, watch: Callable[[StartRank, DataPlane], DataPlane] = lambda _, plane: plane
) -> ThreadLauncher:
    """Ranks in threads of this process, whose data planes `watch` may look at or replace."""
    group = ThreadGroup(size, timeout_s=timeout_s)
    clock = SystemClock()

    def serve_rank(connection: socket.socket, rank: int, size: int) -> None:
        environment = RankEnvironment(
            clock=clock,
            join=lambda start: group.join(start.rank) if size > 1 else None,
            open_data_plane=lambda start: watch(start, open_data_plane(start, clock)),
        )
        serve(connection, environment)

    return ThreadLauncher(serve_rank)


def starts(folder: Path, directory: Path, tp: int, **changes: Any) -> list[StartRank]:
    """Start messages of all ranks of one worker."""
    values: dict[str, Any] = {
        "worker_id": "w1",
        "incarnation": "i1",
        "tp": tp,
        "model_dir": str(folder),
        "block_size": 16,
        "num_blocks": 128,
        "num_slots": 6,
        "max_step_tokens": 256,
        "max_step_sequences": 8,
        "transport_dir": str(directory),
    } | changes
    return [StartRank(rank=rank, **values) for rank in range(tp)]


@asynccontextmanager
async def engine(messages: Sequence[StartRank], launcher: Launcher) -> AsyncIterator[tuple[RankGroup, EngineInfo]]:
    """A started engine, stopped at the end."""
    group = RankGroup(messages, launcher, RankGroupTimeouts(start_s=TIMEOUT_S, command_s=30, step_s=30, stop_s=5))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            info = await group.start()
        yield group, info
    finally:
        async with asyncio.timeout(TIMEOUT_S):
            await group.stop()


def binding(seq: int, num_prompt_tokens: int, **changes: Any) -> BindSequence:
    """A binding of 28 blocks and one slot that no other sequence number has."""
    values: dict[str, Any] = {
        "seq": seq,
        "handoff_id": f"h{seq}",
        "generation": seq + 1,
        "block_ids": tuple(range(seq * 28, seq * 28 + 28)),
        "slot": seq,
        "num_prompt_tokens": num_prompt_tokens,
        "sampling": SamplingParams(max_tokens=NUM_TOKENS, seed=3, temperature=0.0),
    } | changes
    return BindSequence(**values)


async def generate(group: RankGroup, prompts: Sequence[tuple[int, ...]], chunk: int = 60) -> list[tuple[int, ...]]:
    """Prefill in chunks beside running decodes, which name their token as the one sampled before."""
    for seq, prompt in enumerate(prompts):
        await group.bind(binding(seq, len(prompt)))
    done = [0] * len(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    step = 0
    while any(len(output) < NUM_TOKENS for output in outputs):
        items = []
        for seq, prompt in enumerate(prompts):
            if len(outputs[seq]) >= NUM_TOKENS:
                continue
            if done[seq] < len(prompt):
                piece = prompt[done[seq] : done[seq] + chunk]
                last = done[seq] + len(piece) == len(prompt)
                items.append(
                    StepItem(
                        seq=seq,
                        start=done[seq],
                        num_tokens=len(piece),
                        token_ids=piece,
                        sample=last,
                        last_chunk=last,
                    )
                )
                done[seq] += len(piece)
            else:
                items.append(StepItem(seq=seq, start=done[seq], num_tokens=1, sample=True))
                done[seq] += 1
        result = await group.step(StepPlan(step=step, items=tuple(items)))
        step += 1
        for token in result.tokens:
            assert token.position == done[token.seq]
            outputs[token.seq].append(token.token_id)
    return [tuple(output) for output in outputs]
