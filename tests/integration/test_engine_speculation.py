"""Speculative decoding on engines: the same tokens in fewer steps, whatever the depth and the cut."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from contracts.rank import DrafterKind
from contracts.requests import SamplingParams
from tests.integration.engine_world import engine, starts, thread_launcher
from tests.integration.speculation_session import FOLDER, NUM_TOKENS, Run, generate, prompts

DEPTHS = {0.0: (1, 8), 0.8: (3,)}


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
