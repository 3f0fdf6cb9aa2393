"""A client that leaves, in each phase of its request: every worker gives everything back, and the mesh goes on."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.e2e.mesh_probe import Event, Probe

pytestmark = pytest.mark.asyncio(loop_scope="session")

PHASES = (
    "request_submitted",
    "decode_reserved",
    "prefill_accepted",
    "prefill_started",
    "prefill_finished",
    "ledger_closed",
    "taken_over",
)


@pytest.mark.parametrize("phase", PHASES)
async def test_leaving_in_any_phase_gives_all_memory_back(slow_pair: Probe, phase: str) -> None:
    """The connection is cut as soon as the phase shows in the events; afterwards every table is empty."""
    await slow_pair.complete([5, 6, 7], 2)
    baseline = await slow_pair.holdings()
    seen = len(slow_pair.events)
    prompt = [60 + number % 900 for number in range(600)]
    body = {"model": await slow_pair.model(), "prompt": prompt, "max_tokens": 1500, "stream": True, "ignore_eos": True}

    async def ask() -> None:
        async with slow_pair.http.post(f"{slow_pair.url}/v1/completions", json=body) as response:
            await response.read()

    def is_phase(event: Event) -> bool:
        return bool(event["event"] == phase and event in slow_pair.events[seen:])

    asking = asyncio.get_running_loop().create_task(ask())
    event = await slow_pair.event(is_phase)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    request_id = event["request_id"]
    ends = {"request_cancelled", "request_failed", "request_finished"}
    end = await slow_pair.event(lambda each: each["request_id"] == request_id and each["event"] in ends)
    assert end["event"] == "request_cancelled"
    await slow_pair.assert_settles(baseline)
    choice = await slow_pair.complete([5, 6, 7], 2)
    assert len(choice["token_ids"]) == 2


async def test_a_client_that_leaves_in_the_middle_of_its_stream(pair: Probe) -> None:
    """After some tokens the connection is cut: decode stops, and everything is back."""
    await pair.complete([5, 6, 7], 2)
    baseline = await pair.holdings()
    body = {"model": await pair.model(), "prompt": [7] * 50, "max_tokens": 1800, "stream": True, "ignore_eos": True}
    async with pair.http.post(f"{pair.url}/v1/completions", json=body) as response:
        chunks = 0
        async for line in response.content:
            if line.startswith(b"data:"):
                chunks += 1
                request_id = str(json.loads(line.removeprefix(b"data:"))["id"]).partition("-")[2]
            if chunks == 3:
                break
        response.close()
    await pair.event(lambda each: each["request_id"] == request_id and each["event"] == "request_cancelled")
    await pair.assert_settles(baseline)
