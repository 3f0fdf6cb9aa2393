"""Switches that `dcp_validated` lists, each on ranks that share blocks: what they give is what ranks that share none give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.handoff_pairs import Worker, hand_over, link, start_worker
from tests.integration.stored_reference import load_reference

TINY = Path(__file__).parents[2] / "models" / "tiny"
NUM_TOKENS = 6
FAR_AHEAD = 0.4
"""Logits this far apart keep their order in bfloat16, in whatever order its sums are made."""
PROMPTS = [prompt for prompt in load_reference("tiny").prompts if len(prompt.token_ids) in {15, 33, 129}]


@pytest.mark.parametrize(
    ("dtype", "transport"), [("bfloat16", "shm"), ("float32", "tcp")], ids=["bfloat16 caches", "over tcp"]
)
async def test_sharing_blocks_changes_no_token(dtype: str, transport: str, tmp_path: Path) -> None:
    """The same prompts, handed over from one rank to four, of which each two share blocks or none do."""
    torch.set_num_threads(1)
    workers: list[Worker] = []
    try:
        for name, tp, dcp in (("p", 1, 1), ("alone", 4, 1), ("shared", 4, 2)):
            workers.append(await start_worker(name, TINY, tmp_path, tp, dcp=dcp, dtype=dtype, transport=transport))
        source, *destinations = workers
        outputs = []
        for destination in destinations:
            await link(source, destination)
            prompts = [prompt.token_ids for prompt in PROMPTS]
            outputs.append(await hand_over(source, destination, prompts, NUM_TOKENS))
        for prompt, *found in zip(PROMPTS, *outputs, strict=True):
            num_sure = NUM_TOKENS
            if dtype == "bfloat16":
                unsure = (at for at, margin in enumerate(prompt.margins[:NUM_TOKENS]) if margin < FAR_AHEAD)
                num_sure = next(unsure, NUM_TOKENS)
            assert num_sure > 0
            for tokens in found:
                assert tokens[:num_sure] == prompt.output_ids[:num_sure]
    finally:
        for worker in workers:
            await worker.group.stop()
