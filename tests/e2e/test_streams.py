"""Many requests at once on real processes: each as if it were alone, and nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.mesh_probe import Probe

pytestmark = pytest.mark.asyncio(loop_scope="session")

LENGTHS = (1, 2, 7, 15, 16, 17, 40, 63, 64, 100, 129, 200, 257, 300, 400, 530)


def _prompt(length: int) -> list[int]:
    return [50 + (number * 37 + length) % 1500 for number in range(length)]


async def _all_at_once(probe: Probe, **parameters: Any) -> list[dict[str, Any]]:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(probe.complete(_prompt(length), 24 + length % 17, ignore_eos=True, **parameters))
            for length in LENGTHS
        ]
    return [task.result() for task in tasks]


async def test_sixteen_streams_equal_their_single_runs_and_leave_nothing(pair: Probe) -> None:
    """16 mixed lengths at once, greedy: token by token what each gives alone.

    Decode prefilled nothing, and every block table, descriptor, piece of memory, child process and consumer is back.
    """
    alone = [
        await pair.complete(_prompt(length), 24 + length % 17, ignore_eos=True, stream=False) for length in LENGTHS
    ]
    baseline = await pair.holdings()
    assert all(handoffs == () and blocks == () for _, handoffs, blocks, _, _ in baseline.tables)
    together = await _all_at_once(pair)
    assert [choice["token_ids"] for choice in together] == [choice["token_ids"] for choice in alone]
    assert [choice["usage"]["completion_tokens"] for choice in together] == [24 + length % 17 for length in LENGTHS]
    assert all(choice["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 for choice in together)
    await pair.assert_settles(baseline)
    assert (await pair.scan("decode", "decode-0")).num_prefilled_tokens == 0
    assert (await pair.scan("prefill", "prefill-0")).num_prefilled_tokens >= 2 * sum(LENGTHS)


async def test_a_seeded_sample_does_not_depend_on_its_company(pair: Probe) -> None:
    """With a temperature and a seed, a request gives the same tokens alone and among fifteen others."""
    sampled = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 1234}
    alone = [
        await pair.complete(_prompt(length), 24 + length % 17, ignore_eos=True, **sampled) for length in LENGTHS[:3]
    ]
    together = await _all_at_once(pair, **sampled)
    assert [choice["token_ids"] for choice in together[:3]] == [choice["token_ids"] for choice in alone]


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_very_short_outputs_have_exactly_their_tokens(pair: Probe, max_tokens: int) -> None:
    """One token is prefill's alone, two cross the handoff: neither is dropped or doubled."""
    long = await pair.complete(_prompt(100), 5, ignore_eos=True)
    short = await pair.complete(_prompt(100), max_tokens, ignore_eos=True)
    assert short["token_ids"] == long["token_ids"][:max_tokens]
    assert short["finish_reason"] == "length"
