"""Generating on engines that guess, and what it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from common.engine.port import StepResult
from common.engine.ranks.group import RankGroup
from contracts.rank import StepItem, StepPlan
from contracts.requests import SamplingParams
from tests.integration.engine_world import binding

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
NUM_TOKENS = 48


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
        counts = Counter(token.seq for token in result.tokens)
        run.lengths.update(counts.values())
        _check_counts(items, result, counts)
        for token in result.tokens:
            assert token.position == len(texts[token.seq]) + len(run.outputs[token.seq])
            run.outputs[token.seq].append(token.token_id)
    run.outputs = [output[:NUM_TOKENS] for output in run.outputs]
    return run


def _check_counts(items: Sequence[StepItem], result: StepResult, counts: Counter[int]) -> None:
    """What a step says of its guesses fits with its tokens: as many were verified as there was room for, at most, and as were right, at least."""
    for item, num_drafts in zip(items, result.num_drafts or (0,) * len(items), strict=True):
        if item.token_ids:
            assert num_drafts == 0
        else:
            assert counts[item.seq] - 1 <= num_drafts <= item.num_tokens - 1
    assert 0 <= result.draft_ns < result.ended_ns - result.started_ns
    assert result.draft_ns > 0 or not result.num_drafts
