"""A streamed completion as its client measures it, against a small server that can misbehave."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from common.runtime.clock import SystemClock
from contracts.errors import PdmeshError
from loadtest.client import CompletionClient, Prompt, Sample, token_ids_of

_PROMPT = Prompt(token_ids=(1, 2, 3), num_output_tokens=3, seed=5)
_GOOD = ([10], [11, 12])


def _chunk(token_ids: list[int]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "", "token_ids": token_ids}]}).encode() + b"\n\n"


@asynccontextmanager
async def _server(answer: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _ask(url: str) -> Sample:
    async with CompletionClient(url, SystemClock(), timeout_s=20.0) as client:
        return await client.complete(_PROMPT, model="m", mode="P/D", round_number=2, place=7)


def _streaming(*pieces: bytes, bodies: list[Any] | None = None) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.StreamResponse:
        if bodies is not None:
            bodies.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return answer


async def test_a_stream_is_measured_token_by_token() -> None:
    """Ids, order of times and the request's own marks are in the sample; usage chunks without choices are passed over."""
    bodies: list[Any] = []
    pieces = (*map(_chunk, _GOOD), b'data: {"choices": [], "usage": {}}\n\n', b"data: [DONE]\n\n")
    async with _server(_streaming(*pieces, bodies=bodies)) as url:
        sample = await _ask(url)
    assert (sample.error, sample.token_ids, sample.mode, sample.round, sample.place) == ("", (10, 11, 12), "P/D", 2, 7)
    assert sample.sent_ns <= sample.token_ns[0] <= sample.token_ns[1] == sample.token_ns[2] <= sample.done_ns
    assert 0 <= sample.ttft_ms <= sample.total_ms
    (body,) = bodies
    wanted = {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0.0, "ignore_eos": True, "stream": True, "seed": 5}
    assert {key: body[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ((_chunk([10]),), "the stream ended without [DONE]"),
        ((_chunk([10]), b"data: [DONE]\n\n"), "1 tokens came; 3 were asked for"),
        ((b'data: {"error": {"message": "worker lost"}}\n\n',), "worker lost"),
        ((b"data: {\n\n",), "Expecting property name"),
        ((b"data: 3\n\n",), "a chunk is int"),
    ],
)
async def test_a_stream_that_breaks_off_is_an_error_in_the_sample(pieces: tuple[bytes, ...], error: str) -> None:
    """A missing end, missing tokens, an error event and what is no JSON are all told, and raise nothing."""
    async with _server(_streaming(*pieces)) as url:
        assert error in (await _ask(url)).error


async def test_a_refusal_is_told_in_the_servers_words() -> None:
    """An answer that is not 200 becomes the sample's error, with its message."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "prompt: too long"}}, status=413)

    async with _server(answer) as url:
        sample = await _ask(url)
    assert sample.error == "the server answered 413: prompt: too long"


async def test_a_server_that_is_not_there_is_an_error_in_the_sample() -> None:
    """A refused connection is told like any other failure."""
    async with _server(_streaming()) as url:
        pass
    assert "127.0.0.1" in (await _ask(url)).error


def test_a_single_token_has_no_time_between_tokens() -> None:
    """The mean gap needs two tokens."""
    sample = Sample(
        mode="m",
        round=0,
        place=0,
        num_prompt_tokens=1,
        sent_ns=0,
        done_ns=3_000_000,
        token_ids=(1,),
        token_ns=(1_000_000,),
    )
    assert (sample.ttft_ms, sample.total_ms, sample.inter_token_ms) == (1.0, 3.0, None)


def test_token_ids_of_an_error_raise() -> None:
    """An error inside a stream ends it."""
    with pytest.raises(PdmeshError, match="broke off"):
        token_ids_of({"error": {"message": "x"}})
    assert token_ids_of({"choices": [{"token_ids": [1]}, {"text": "no ids"}]}) == [1]
