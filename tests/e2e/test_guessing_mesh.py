"""`pdmesh up --preset p2d1-mtp3`, for real: the same tokens in fewer steps, told as they come, and counted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from contracts import subjects
from tests.e2e.mesh_probe import Event, Probe
from tests.integration.stored_reference import load_reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 40
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 99, "ignore_eos": True}
PROMPT = list(range(50, 90))


async def _released(probe: Probe, completion_id: str) -> Event:
    """What the mesh tells of a request when decode has given its memory back."""
    request_id = completion_id.removeprefix("cmpl-")
    return await probe.event(lambda event: event["request_id"] == request_id and event["event"] == "decode_released")


async def test_greedy_tokens_are_the_references(guessing_pair: Probe) -> None:
    """Every second stored prompt, of 1 to 600 tokens, eight at a time; more than half of the tokens cost no step of their own."""
    reference = load_reference("tiny").prompts[::2]
    gate = asyncio.Semaphore(8)

    async def ask(prompt: tuple[int, ...]) -> dict[str, Any]:
        async with gate:
            return await guessing_pair.complete(list(prompt), NUM_TOKENS, ignore_eos=True)

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(prompt.token_ids)) for prompt in reference]
    answers = [task.result() for task in asked]
    assert [tuple(answer["token_ids"]) for answer in answers] == [
        prompt.output_ids[:NUM_TOKENS] for prompt in reference
    ]
    told = [await _released(guessing_pair, answer["id"]) for answer in answers]
    # The first token is prefill's; each step of decode gave one more, and those that were guessed.
    assert [event["num_steps"] + event["num_accepted"] for event in told] == [NUM_TOKENS - 1] * len(told)
    assert sum(event["num_accepted"] for event in told) > len(told) * NUM_TOKENS / 3
    assert all(event["draft_ms"] > 0 < event["verify_ms"] for event in told)
    assert all(sum(event["accepted_at"]) == event["num_accepted"] <= event["num_drafted"] for event in told)


async def test_a_sample_is_the_one_of_a_mesh_that_guesses_nothing(guessing_pair: Probe, pair: Probe) -> None:
    """The seed decides, not the guesses: token by token, with guesses that were right among them."""
    sampled = await guessing_pair.complete(PROMPT, NUM_TOKENS, **SAMPLED)
    assert sampled["token_ids"] == (await pair.complete(PROMPT, NUM_TOKENS, **SAMPLED))["token_ids"]
    assert (await _released(guessing_pair, sampled["id"]))["num_accepted"] > 0


@pytest.mark.parametrize("length", [1, 2, 16, 17])
async def test_short_answers_to_short_prompts_have_exactly_their_tokens(guessing_pair: Probe, length: int) -> None:
    """One token is prefill's alone, two need no guess, three could do with one; a prompt of one token has no pair, of 17 a second block."""
    prompt = PROMPT[:length]
    whole = await guessing_pair.complete(prompt, 6, ignore_eos=True)
    for max_tokens in (1, 2, 3):
        short = await guessing_pair.complete(prompt, max_tokens, ignore_eos=True)
        assert short["token_ids"] == whole["token_ids"][:max_tokens]
        assert short["finish_reason"] == "length"


async def test_the_draft_is_handed_over_and_prefill_guesses_nothing(guessing_pair: Probe) -> None:
    """The link says so, and each handoff moves more than the model's parts, told apart: key, value and hidden state of the draft head."""
    choice = await guessing_pair.complete(PROMPT, 8, ignore_eos=True)
    request_id = choice["id"].removeprefix("cmpl-")
    await _released(guessing_pair, choice["id"])
    place = f"$KV.{subjects.LINKS_BUCKET}.{subjects.link_key('prefill-0', 'decode-0')}"
    found = await guessing_pair.nats.request(f"$JS.API.DIRECT.GET.KV_{subjects.LINKS_BUCKET}.{place}", b"")
    linked = json.loads(found.data)
    assert linked["has_drafts"] is True
    owed = [event for event in guessing_pair.of_request(request_id) if event["event"] == "ledger_closed"]
    assert [event["num_parts"] for event in owed] == [linked["num_parts"]]

    def pushed() -> list[Event]:
        return [event for event in guessing_pair.of_request(request_id) if event["event"] == "part_pushed"]

    await guessing_pair.event(lambda _: len(pushed()) == linked["num_parts"])
    drafts = {event["role"] for event in pushed() if event.get("namespace") == "draft"}
    assert drafts == {"key", "value", "bootstrap"}
    assert {event.get("namespace") for event in pushed()} == {"draft", None}


async def test_a_stream_tells_the_tokens_of_a_step_together(guessing_pair: Probe) -> None:
    """Chunks say how many tokens they carry where these are several; usage goes along; a client that leaves leaves nothing."""
    body = {
        "model": await guessing_pair.model(),
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    baseline = await guessing_pair.holdings()
    async with guessing_pair.http.post(f"{guessing_pair.url}/v1/completions", json=body) as response:
        chunks = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
    ids = [chunk["choices"][0]["token_ids"] for chunk in chunks]
    for chunk, carried in zip(chunks, ids, strict=True):
        assert chunk["choices"][0].get("num_tokens", 1) == max(1, len(carried))
    assert max(map(len, ids)) > 1
    assert sum(map(len, ids)) == NUM_TOKENS
    totals = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert totals == [sum(map(len, ids[: at + 1])) for at in range(len(ids))]
    async with guessing_pair.http.post(
        f"{guessing_pair.url}/v1/completions", json=body | {"max_tokens": 2000}
    ) as response:
        await response.content.readline()
    await guessing_pair.assert_settles(baseline)
