"""Speculative decoding on engines: the same tokens in fewer steps, whatever the depth and the cut."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.rank_group import RankGroup
from contracts.rank import DrafterKind, StepItem, StepPlan
from contracts.requests import SamplingParams
from tests.integration.engine_world import binding, engine, starts, thread_launcher

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
NUM_TOKENS = 48
DEPTHS = {0.0: (1, 8), 0.8: (3,)}


def prompts() -> list[tuple[int, ...]]:
    """Texts of different lengths around the size of a block."""
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(3, 2000, (size,), generator=generator).tolist()) for size in (5, 16, 47, 130)]


class Run:
    """What an engine generated, and in how many steps of decoding."""

    def __init__(self) -> None:
        self.outputs: list[list[int]] = []
        self.num_steps = 0
        self.lengths: Counter[int] = Counter()


async def generate(
    group: RankGroup, texts: Sequence[tuple[int, ...]], depth: int, sampling: SamplingParams, chunk: int = 60
) -> Run:
    """Prefill in chunks beside running decodes; each asks for `depth` guesses."""
    run = Run()
    run.outputs = [[] for _ in texts]
    for seq, text in enumerate(texts):
        await group.bind(binding(seq, len(text), sampling=sampling))
    done = [0] * len(texts)
    while any(len(output) < NUM_TOKENS for output in run.outputs):
        items = []
        for seq, text in enumerate(texts):
            if len(run.outputs[seq]) >= NUM_TOKENS:
                continue
            if done[seq] < len(text):
                piece = text[done[seq] : done[seq] + chunk]
                last = done[seq] + len(piece) == len(text)
                items.append(
                    StepItem(
                        seq=seq, start=done[seq], num_tokens=len(piece), token_ids=piece, sample=last, last_chunk=last
                    )
                )
                done[seq] += len(piece)
            else:
                start = len(text) + len(run.outputs[seq]) - 1
                items.append(StepItem(seq=seq, start=start, num_tokens=1 + depth, sample=True))
        result = await group.step(StepPlan(step=run.num_steps, items=tuple(items)))
        run.num_steps += 1
        run.lengths.update(Counter(token.seq for token in result.tokens).values())
        for token in result.tokens:
            assert token.position == len(texts[token.seq]) + len(run.outputs[token.seq])
            run.outputs[token.seq].append(token.token_id)
    run.outputs = [output[:NUM_TOKENS] for output in run.outputs]
    return run


async def decode(tmp_path: Path, depth: int, *, tp: int = 1, temperature: float = 0.0, **changes: Any) -> Run:
    """A run of an engine of its own."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=11, temperature=temperature)
    drafter = DrafterKind.MTP if depth else DrafterKind.NONE
    messages = starts(
        FOLDER, tmp_path, tp, drafter=drafter, num_speculative_tokens=depth, worker_id=f"w{depth}-{tp}", **changes
    )
    async with asyncio.timeout(300), engine(messages, thread_launcher(tp)) as (group, _):
        return await generate(group, prompts(), depth, sampling)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_guesses_change_nothing_but_the_number_of_steps(tmp_path: Path, temperature: float) -> None:
    """Greedy and sampled: the tokens of depth 0, several of them a step."""
    plain = await decode(tmp_path, 0, temperature=temperature)
    for depth in DEPTHS[temperature]:
        run = await decode(tmp_path, depth, temperature=temperature)
        assert run.outputs == plain.outputs
        assert run.num_steps < plain.num_steps
        assert max(run.lengths) > 1


@pytest.mark.parametrize(
    ("tp", "changes"),
    [(2, {}), (2, {"mtp_draft_body_tp1": True}), (4, {"dcp": 2, "num_blocks": 128})],
    ids=["tp2", "tp2 whole draft", "tp4 dcp2"],
)
async def test_any_cut_guesses_alike(tmp_path: Path, tp: int, changes: dict[str, Any]) -> None:
    """Ranks that share the heads, the blocks, or not even the draft: the same tokens, and the same guesses are right."""
    one = await decode(tmp_path, 3)
    many = await decode(tmp_path, 3, tp=tp, **changes)
    assert (many.outputs, many.lengths) == (one.outputs, one.lengths)
