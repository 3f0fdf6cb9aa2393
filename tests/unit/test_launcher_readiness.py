"""Waiting for services, and asking them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from common.runtime.clock import SystemClock
from contracts.errors import PdmeshError
from services.launcher.chat import ChatClient
from services.launcher.ports import free_ports
from services.launcher.readiness import NotReady, lacks, wait_ready

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[str, Handler], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves one handler at one path, and returns the server's URL."""
    runners: list[web.AppRunner] = []

    async def start(path: str, handler: Handler) -> str:
        application = web.Application()
        application.router.add_route("*", path, handler)
        runner = web.AppRunner(application, access_log=None)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_it_waits_and_says_what_is_missing_once(serve: Serve) -> None:
    """People hear of a change, not of every question."""
    answers = iter([(503, '{"missing": ["decode-0"]}')] * 3 + [(503, '{"missing": ["x"]}'), (200, "")])

    async def handler(_request: web.Request) -> web.Response:
        status, text = next(answers)
        return web.Response(status=status, text=text)

    said: list[str] = []
    url = await serve("/ready", handler)
    await wait_ready(
        f"{url}/ready", who="the router", timeout_s=30.0, clock=SystemClock(), say=said.append, detail=lambda: "loading"
    )
    assert said == ["waiting: decode-0; loading", "waiting: x; loading"]


async def test_it_gives_up_and_says_why(serve: Serve) -> None:
    """The last thing missing is the reason."""

    async def handler(_request: web.Request) -> web.Response:
        return web.Response(status=503, text='{"missing": ["prefill-0 is not linked to decode-0"]}')

    url = await serve("/ready", handler)
    with pytest.raises(NotReady, match="not ready after 0 s: prefill-0 is not linked to decode-0"):
        await wait_ready(f"{url}/ready", who="the router", timeout_s=0.0, clock=SystemClock(), say=lambda _text: None)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"missing": ["a", "b"]}', "a, b"),
        ('{"state": "starting", "failing": ["bus"]}', "bus"),
        ('{"state": "starting", "failing": []}', "starting"),
        ("plain\ntext", "plain text"),
        ("", "nothing said"),
    ],
)
def test_bodies_of_every_readiness_path_are_read(body: str, text: str) -> None:
    """The router says what is missing, the admin port what is failing."""
    assert lacks(body) == text


def _sse(*events: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["stream"] is True
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {event}\n\n".encode())
        return response

    return handler


async def _complete(url: str, **body: Any) -> list[str]:
    async with aiohttp.ClientSession() as session:
        return [piece async for piece in ChatClient(session, url).stream_completion(**body)]


async def test_text_arrives_in_pieces(serve: Serve) -> None:
    """Each chunk's text is handed on; chunks without choices carry none."""
    url = await serve("/v1/completions", _sse('{"choices": [{"text": "a"}]}', '{"choices": []}', "[DONE]"))
    assert await _complete(url, prompt="x") == ["a"]


async def test_chat_text_is_in_the_delta(serve: Serve) -> None:
    """The first chunk may have a role and no content."""
    events = ('{"choices": [{"delta": {"role": "assistant"}}]}', '{"choices": [{"delta": {"content": "b"}}]}', "[DONE]")
    url = await serve("/v1/chat/completions", _sse(*events))
    async with aiohttp.ClientSession() as session:
        assert "".join([piece async for piece in ChatClient(session, url).stream_chat(messages=[])]) == "b"


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (('{"error": {"message": "decode-0 is gone"}}',), "decode-0 is gone"),
        (('{"choices": []}',), "without .DONE."),
        (("{",), "JSONDecodeError"),
    ],
)
async def test_a_broken_stream_is_an_error(serve: Serve, events: tuple[str, ...], words: str) -> None:
    """An error event, a stream that just stops, and nonsense are told apart from an end."""
    url = await serve("/v1/completions", _sse(*events))
    with pytest.raises(PdmeshError, match=words):
        await _complete(url, prompt="x")


async def test_a_refusal_keeps_the_servers_words(serve: Serve) -> None:
    """What the server says is what people read."""

    async def handler(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no route"}}, status=503)

    url = await serve("/v1/completions", handler)
    with pytest.raises(PdmeshError, match="answered 503: no route"):
        await _complete(url, prompt="x")


async def test_who_does_not_answer_is_named() -> None:
    """Nobody knows which of the mesh's processes "it" would be."""
    (port,) = free_ports(1)
    with pytest.raises(NotReady, match="not ready after 0 s: the router does not answer yet"):
        await wait_ready(
            f"http://127.0.0.1:{port}/ready",
            who="the router",
            timeout_s=0.0,
            clock=SystemClock(),
            say=lambda _text: None,
        )
