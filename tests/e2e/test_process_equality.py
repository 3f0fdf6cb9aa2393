"""Real processes, HTTP to HTTP: the shipped checkpoint gives the reference's greedy tokens through a handoff."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.e2e.mesh_probe import Probe
from tests.integration.stored_reference import StoredPrompt, StoredReference, load_reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

AT_ONCE = 8


@pytest.fixture(scope="module")
def shipped() -> StoredReference:
    """32 prompts of 1 to 600 tokens and what `transformers` makes of them in fp32, every step's margin at least 1e-3."""
    return load_reference("tiny")


async def _all_equal(probe: Probe, prompts: Sequence[StoredPrompt]) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(prompt: StoredPrompt) -> tuple[int, ...]:
        async with gate:
            choice = await probe.complete(list(prompt.token_ids), len(prompt.output_ids), ignore_eos=True)
        assert choice["usage"]["prompt_tokens"] == len(prompt.token_ids)
        return tuple(choice["token_ids"])

    async with asyncio.TaskGroup() as group:
        asked = [(prompt, group.create_task(ask(prompt))) for prompt in prompts]
    wrong = [len(prompt.token_ids) for prompt, answer in asked if answer.result() != prompt.output_ids]
    assert wrong == []


async def test_prefill_on_two_ranks_decode_on_one(pair: Probe, shipped: StoredReference) -> None:
    """P2/D1: 32 prompts, 64 tokens each, eight at a time, all equal."""
    await _all_equal(pair, shipped.prompts)


async def test_prefill_on_four_ranks_decode_in_two_replicas_of_two(wide_pair: Probe, shipped: StoredReference) -> None:
    """P4/D2x2: each KV head is on two prefill ranks, requests go to both decode replicas; every second prompt, all equal."""
    await _all_equal(wide_pair, shipped.prompts[1::2])
