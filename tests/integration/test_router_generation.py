"""Completions and chat over HTTP, streamed and not, against a scripted mesh."""

import hashlib
from array import array
from pathlib import Path

import pytest

from contracts.requests import DisaggregatedRoute, FinishReason, MixedRoute, SubmitRequest
from tests.integration.router_world import (
    ANSWER,
    MAX_POSITION,
    Mesh,
    encode_text,
    linked_pair,
    record,
    router_world,
    tokenizer,
)


async def test_a_completion_carries_text_usage_and_reason(tmp_path: Path) -> None:
    """The official client reads a whole answer; cached tokens are those that prefill counted."""
    async with router_world(tmp_path) as world, world.client() as client:
        world.mesh.num_cached_tokens = 16
        answer = await client.completions.create(model="tiny", prompt="hello world", temperature=0)
        assert answer.choices[0].text == ANSWER
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(encode_text("hello world"))
        assert answer.usage.completion_tokens == len(world.mesh.answer)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 16
        assert answer.id == f"cmpl-{world.mesh.submits[0].request_id}"


async def test_a_streamed_completion_gives_the_same_text(tmp_path: Path) -> None:
    """Usage comes in a last chunk without choices when it was asked for."""
    async with router_world(tmp_path) as world, world.client() as client:
        stream = await client.completions.create(
            model="tiny", prompt="hello", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == ANSWER
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, "stop"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(world.mesh.answer)


async def test_chat_applies_the_template(tmp_path: Path) -> None:
    """The worker gets the ids of the rendered conversation."""
    async with router_world(tmp_path) as world, world.client() as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_completion_tokens=3
        )
        expected = encode_text("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
        assert world.mesh.prompt_of(world.mesh.submits[0].handoff_id) == expected
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        assert answer.choices[0].message.content == tokenizer().decode(list(world.mesh.answer[:3]))


async def test_streamed_chat_begins_with_the_role(tmp_path: Path) -> None:
    """The role stands in the first chunk only, beside its text."""
    async with router_world(tmp_path) as world, world.client() as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


async def test_a_stream_ends_with_done_and_says_no_more_than_was_asked(tmp_path: Path) -> None:
    """Without stream_options no chunk mentions usage, and every chunk has a choice."""
    async with router_world(tmp_path) as world:
        *chunks, last = await world.events("/v1/completions", {"model": "tiny", "prompt": "hello"})
        assert last == "[DONE]"
        assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


async def test_continuous_usage_stands_on_every_chunk(tmp_path: Path) -> None:
    """Each chunk tells the tokens up to it, and how many are its own where these are more than one."""
    async with router_world(tmp_path) as world:
        *chunks, _ = await world.events(
            "/v1/completions",
            {"model": "tiny", "prompt": "hello", "stream_options": {"continuous_usage_stats": True}},
        )
        total = len(world.mesh.answer)
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, total]
        assert [chunk["choices"][0].get("num_tokens") for chunk in chunks] == [None, total - 1]
        assert all(chunk["choices"] for chunk in chunks)


async def test_token_ids_come_when_asked_for(tmp_path: Path) -> None:
    """Each choice then carries the ids that its text was made of."""
    async with router_world(tmp_path) as world:
        body = {"model": "tiny", "prompt": "hello", "return_token_ids": True}
        _, answer, _ = await world.post("/v1/completions", body)
        assert answer["choices"][0]["token_ids"] == list(world.mesh.answer)
        *chunks, _ = await world.events("/v1/completions", body)
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [
            list(world.mesh.answer[:1]),
            list(world.mesh.answer[1:]),
        ]


async def test_prompts_and_n_expand_into_requests_of_their_own(tmp_path: Path) -> None:
    """Choices are ordered by prompt, then by n; answers to one prompt draw with different seeds; a prompt counts once."""
    async with router_world(tmp_path) as world:
        status, answer, _ = await world.post(
            "/v1/completions", {"model": "tiny", "prompt": [[1, 2, 3], [4]], "n": 2, "seed": 7, "best_of": 2}
        )
        assert status == 200
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["prompt_tokens"] == 4
        assert answer["usage"]["completion_tokens"] == 4 * len(world.mesh.answer)
        submits = world.mesh.submits
        assert len({submit.request_id for submit in submits}) == 4
        assert sorted((submit.num_prompt_tokens, submit.sampling.seed) for submit in submits) == [
            (1, 7),
            (1, 8),
            (3, 7),
            (3, 8),
        ]


async def test_a_missing_seed_is_drawn(tmp_path: Path) -> None:
    """Two requests without a seed differ."""
    async with router_world(tmp_path) as world:
        for _ in range(2):
            await world.post("/v1/completions", {"model": "tiny", "prompt": "hello"})
        first, second = (submit.sampling.seed for submit in world.mesh.submits)
        assert first != second


async def test_a_long_prompt_travels_in_frames(tmp_path: Path) -> None:
    """Frames are bounded, and put together they are the prompt that the hash names; text is encoded in a thread."""
    async with router_world(tmp_path) as world:
        text = "hello there " * 15_000
        ids = encode_text(text)
        assert 24_576 < len(ids) < MAX_POSITION
        status, _, _ = await world.post("/v1/completions", {"model": "tiny", "prompt": text})
        assert status == 200
        submit = world.mesh.submits[0]
        frames = world.mesh.frames[submit.handoff_id]
        assert len(frames) > 1
        assert max(len(frame.ids_b64) for frame in frames.values()) <= 128 * 1024
        assert world.mesh.prompt_of(submit.handoff_id) == ids
        assert submit.prompt_hash == hashlib.sha256(array("I", ids).tobytes()).hexdigest()
        assert submit.num_prompt_tokens == len(ids)


async def test_the_route_is_a_linked_pair_or_a_mixed_worker(tmp_path: Path) -> None:
    """The prompt goes to the worker that will compute it."""
    async with router_world(tmp_path / "pair") as world:
        await world.post("/v1/completions", {"model": "tiny", "prompt": "hello"})
        assert isinstance(world.mesh.submits[0].route, DisaggregatedRoute)
        assert world.mesh.prompt_subjects == ["pd.v1.rpc.prefill.prefill-0.prompt"]
    async with router_world(tmp_path / "mixed", records=[record("mixed-0")]) as world:
        await world.post("/v1/completions", {"model": "tiny", "prompt": "hello"})
        assert isinstance(world.mesh.submits[0].route, MixedRoute)
        assert world.mesh.prompt_subjects == ["pd.v1.rpc.mixed.mixed-0.prompt"]


async def token_by_token(mesh: Mesh, submit: SubmitRequest) -> None:
    """One frame a token, and no end of its own."""
    for index, token in enumerate(mesh.answer):
        await mesh.send(submit, index, [token])


async def test_a_stop_string_cuts_the_text_and_cancels_the_rest(tmp_path: Path) -> None:
    """It may lie across frames; the broker and the workers hear that the rest is not wanted."""
    async with router_world(tmp_path) as world:
        world.mesh.scripts = [token_by_token]
        *chunks, last = await world.events("/v1/completions", {"model": "tiny", "prompt": "hello", "stop": ["rld! It"]})
        assert last == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, wö"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        handoff_id = world.mesh.submits[0].handoff_id
        await world.mesh.until(lambda: world.mesh.cancels and len(world.mesh.hints) >= 2)
        assert world.mesh.cancels[0].handoff_id == handoff_id
        assert {subject for subject, _ in world.mesh.hints} == {
            f"pd.v1.cancel.{worker}.{world.mesh.submits[0].request_id}" for worker in ("prefill-0", "decode-0")
        }


async def all_in_one_frame(mesh: Mesh, submit: SubmitRequest) -> None:
    """The whole answer with its end, for a reason of the worker's own."""
    tokens = mesh.answer
    await mesh.send(submit, 0, tokens, final=True, num_tokens=len(tokens), finish_reason=FinishReason.LENGTH)


@pytest.mark.parametrize("stop", ["rld! It", ANSWER[-3:]], ids=["inside", "at the very end"])
async def test_a_stop_string_in_the_last_frame_is_the_reason(tmp_path: Path, stop: str) -> None:
    """The worker ended for its length, but the text that is shown ends at the stop string; the worker is owed no cancel."""
    ask = {"model": "tiny", "prompt": "hello", "stop": [stop]}
    async with router_world(tmp_path) as world:
        world.mesh.scripts = [all_in_one_frame, all_in_one_frame]
        _, whole, _ = await world.post("/v1/completions", ask)
        *chunks, _ = await world.events("/v1/completions", ask)
        for choice in (whole["choices"][0], chunks[-1]["choices"][0]):
            assert (choice["text"], choice["finish_reason"]) == (ANSWER[: ANSWER.index(stop)], "stop")
        assert not world.mesh.cancels


async def out_of_order(mesh: Mesh, submit: SubmitRequest) -> None:
    """Frames late, twice, overlapping, and of an attempt that is over."""
    tokens = list(mesh.answer)
    await mesh.send(submit, 4, tokens[4:], final=True, num_tokens=len(tokens), finish_reason=FinishReason.STOP)
    await mesh.send(submit, 0, [9, 9, 9], attempt=7)
    await mesh.send(submit, 0, tokens[:2])
    await mesh.send(submit, 0, tokens[:3])
    await mesh.send(submit, 1, tokens[1:5])


async def test_late_and_repeated_frames_change_nothing(tmp_path: Path) -> None:
    """The client reads every token once and in order."""
    async with router_world(tmp_path) as world:
        world.mesh.scripts = [out_of_order]
        _, answer, _ = await world.post("/v1/completions", {"model": "tiny", "prompt": "hello"})
        assert answer["choices"][0]["text"] == ANSWER
        assert answer["usage"]["completion_tokens"] == len(world.mesh.answer)


async def test_one_token_may_be_the_whole_answer(tmp_path: Path) -> None:
    """max_tokens 1 gives one token, in one chunk with the reason."""
    async with router_world(tmp_path) as world:

        async def one(mesh: Mesh, submit: SubmitRequest) -> None:
            await mesh.send(submit, 0, mesh.answer[:1], final=True, num_tokens=1, finish_reason=FinishReason.LENGTH)

        world.mesh.scripts = [one]
        *chunks, _ = await world.events("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 1})
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["length"]


async def test_the_default_length_is_applied_by_the_router(tmp_path: Path) -> None:
    """The engine always gets a max_tokens; the sampling parameters arrive as asked."""
    async with router_world(tmp_path, default_max_tokens=5) as world:
        body = {"model": "tiny", "prompt": "hello", "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_tokens": 2}
        await world.post("/v1/completions", body | {"ignore_eos": True, "seed": 3})
        sampling = world.mesh.submits[0].sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.9, 4)
        assert (sampling.min_tokens, sampling.ignore_eos, sampling.seed) == (2, True, 3)


@pytest.mark.parametrize("attempts", [1, 3])
async def test_loads_return_to_zero(tmp_path: Path, attempts: int) -> None:
    """After any number of requests nothing is counted as running."""
    async with router_world(tmp_path, records=linked_pair()) as world:
        for _ in range(attempts):
            await world.post("/v1/completions", {"model": "tiny", "prompt": "hello"})
        async with world.session.get(f"{world.url}/metrics") as response:
            text = await response.text()
        assert "pdmesh_router_running_requests 0.0" in text
        assert f"pdmesh_router_attempts_total {attempts}.0" in text
        assert f'pdmesh_router_requests_total{{endpoint="completions",status="200"}} {attempts}.0' in text
