"""Ranks that share the blocks of a sequence, as processes: the reference's tokens, behind others too, and what a death among them does."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.port import EngineDeadError
from common.engine.ranks.launch import ProcessLauncher
from common.runtime.clock import SystemClock
from contracts.rank import CollectivesKind, StepItem, StepPlan
from tests.e2e.proc import state_of
from tests.integration.context_parallel_world import BY_LENGTH, WIDE, Cut
from tests.integration.engine_world import TIMEOUT_S, binding, engine, starts
from tests.integration.handoff_pairs import Worker, hand_over, link, start_worker
from tests.integration.make_reference import hash_weights
from tests.integration.reference_prompts import NUM_OUTPUT_TOKENS, wide_model

PROMPT = BY_LENGTH[65]
NUM_FEW = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wide checkpoint, of which the stored outputs are."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    model = wide_model()
    assert hash_weights(model) == WIDE.weights_sha256
    model.save_pretrained(folder)
    return folder


async def _first_tokens(folder: Path, sockets: Path, cut: Cut, **changes: Any) -> list[int]:
    tp, dcp = cut
    chosen: list[int] = []
    async with engine(starts(folder, sockets, tp, dcp=dcp, **changes), ProcessLauncher()) as (group, _):
        await group.bind(binding(0, len(PROMPT.token_ids)))
        start, tokens = 0, PROMPT.token_ids
        for step in range(NUM_FEW):
            item = StepItem(seq=0, start=start, num_tokens=max(1, len(tokens)), token_ids=tokens, sample=True)
            result = await group.step(StepPlan(step=step, items=(item,)))
            chosen.append(result.tokens[0].token_id)
            start, tokens = start + max(1, len(tokens)), ()
    return chosen


@pytest.mark.long
async def test_four_processes_share_blocks_over_gloo(folder: Path, tmp_path: Path) -> None:
    """Two groups, with the collectives of another adapter: the reference's tokens."""
    chosen = await _first_tokens(folder, tmp_path, (4, 2), collectives=CollectivesKind.GLOO)
    assert chosen == list(PROMPT.output_ids[:NUM_FEW])


@pytest.mark.long
async def test_eight_processes_in_groups_of_four_go_on_behind_two(folder: Path, tmp_path: Path) -> None:
    """Prompts from less than a block to two chunks, pushed by two processes: 64 tokens of each, all those of the reference."""
    prompts = [BY_LENGTH[length] for length in (1, 33, 65, 200)]
    workers: list[Worker] = []
    try:
        for name, tp, dcp in (("p", 2, 1), ("d", 8, 4)):
            workers.append(await start_worker(name, folder, tmp_path, tp, dcp=dcp, launcher=ProcessLauncher()))
        source, destination = workers
        await link(source, destination)
        outputs = await hand_over(source, destination, [prompt.token_ids for prompt in prompts], NUM_OUTPUT_TOKENS)
    finally:
        for worker in workers:
            await worker.group.stop()
    assert outputs == [prompt.output_ids for prompt in prompts]


async def test_a_process_that_dies_ends_the_step_of_its_group_and_of_the_others(folder: Path, tmp_path: Path) -> None:
    """Three ranks wait in a collective for the fourth, which is killed: the step fails with its name, all four are gone.

    A new engine in the same place has the reference's tokens.
    """
    async with engine(starts(folder, tmp_path, 4, dcp=2), ProcessLauncher()) as (group, _):
        pids = [rank.pid for rank in group._manifests]
        await group.bind(binding(0, len(PROMPT.token_ids)))
        os.kill(pids[2], signal.SIGSTOP)
        others = [pid for pid in pids if pid != pids[2]]
        waits = {pid: _num_waits(pid) for pid in others}
        item = StepItem(seq=0, start=0, num_tokens=len(PROMPT.token_ids), token_ids=PROMPT.token_ids, sample=True)
        stepping = asyncio.get_running_loop().create_task(group.step(StepPlan(step=0, items=(item,))))
        async with asyncio.timeout(TIMEOUT_S):
            while any(_num_waits(pid) <= waits[pid] for pid in others):  # each has begun, and waits again
                await SystemClock().sleep(0.01)
        assert not stepping.done()
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"rank 2 \(pid {pids[2]}\) was killed by signal 9"):
            await stepping
        with pytest.raises(EngineDeadError, match="rank 2"):
            await group.scan()
    assert [state_of(pid) for pid in pids] == [""] * 4
    assert await _first_tokens(folder, tmp_path, (4, 2)) == list(PROMPT.output_ids[:NUM_FEW])


def _num_waits(pid: int) -> int:
    """How often a process has given up the processor to wait for something."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (line,) = [line for line in lines if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])
