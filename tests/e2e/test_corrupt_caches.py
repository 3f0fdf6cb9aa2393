"""Real processes whose decode worker verifies caches: what has arrived wrong on one rank is answered by nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.runtime.clock import SystemClock
from loadtest.mesh import Mesh, MeshSpec
from tests.e2e.mesh_probe import Probe
from tests.integration.stored_reference import load_reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
NUM_TOKENS = 12
BLOCK_SIZE = 16
FAULT = "zero:role=key,block=3,destination=1"
"""Prompts of more than three blocks arrive wrong on one of two ranks that share them; shorter ones have no such block."""


async def test_one_wrong_block_on_one_rank_fails_its_request_alone(tmp_path: Path) -> None:
    """P2/D4, with dcp=2: an explicit error that names the cache, not retried, memory back; a request without the block has its tokens."""
    prompts = load_reference("tiny").prompts
    short = next(prompt for prompt in prompts if len(prompt.token_ids) <= 3 * BLOCK_SIZE)
    long = next(prompt for prompt in prompts if len(prompt.token_ids) > 3 * BLOCK_SIZE)
    workers = (("prefill", "tp=2"), ("decode", "tp=4,dcp=2,verify_cache=1"))
    spec = MeshSpec(
        mode="P2/D4 dcp2 verified", model=MODEL, workers=workers, overrides=(f"prefill.failpoints={FAULT}",)
    )
    mesh = await Mesh.start(spec, tmp_path, SystemClock(), print)
    try:
        async with Probe(mesh) as probe:
            choice = await probe.complete(list(short.token_ids), NUM_TOKENS, ignore_eos=True)
            assert tuple(choice["token_ids"]) == short.output_ids[:NUM_TOKENS]
            body = {"model": "tiny", "prompt": list(long.token_ids), "max_tokens": NUM_TOKENS, "temperature": 0}
            async with probe.http.post(f"{probe.url}/v1/completions", json=body) as response:
                assert (
                    response.status == 500
                )  # and the rank that plants the fault has the memory that it takes for that
            baseline = await probe.holdings()
            async with probe.http.post(f"{probe.url}/v1/completions", json=body) as response:
                assert response.status == 500
                error = (await response.json())["error"]
            assert error["code"] == "cache_corrupt"
            assert "target key of layer" in error["message"]
            assert "on rank 1 is" in error["message"]
            assert not any(f"on rank {rank}" in error["message"] for rank in (0, 2, 3))
            choice = await probe.complete(list(short.token_ids), NUM_TOKENS, ignore_eos=True)
            assert tuple(choice["token_ids"]) == short.output_ids[:NUM_TOKENS]
            await probe.assert_settles(baseline)
    finally:
        await mesh.stop()
