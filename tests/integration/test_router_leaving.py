"""What becomes of requests when their clients leave or do not read, and when the router is told to stop."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from contracts.requests import FinishReason, SubmitRequest
from tests.integration.router_world import (
    LONG_TEXT,
    PATIENCE_S,
    Mesh,
    World,
    encode_text,
    one_token,
    router_world,
    silence,
    whole_answer,
)

PLAIN = {"model": "tiny", "prompt": "hello"}


@contextlib.asynccontextmanager
async def leaving_client(world: World, body: dict[str, Any]) -> Any:
    """Post in a task of its own, and drop the connection at the end of the context."""
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:

        async def post() -> None:
            async with session.post(f"{world.url}/v1/completions", json=body) as response:
                await response.read()

        task = group.create_task(post())
        yield
        task.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_is_noticed(tmp_path: Path, stream: bool) -> None:
    """Broker and workers hear of it."""
    async with router_world(tmp_path) as world:
        world.mesh.scripts = [silence]
        async with leaving_client(world, PLAIN | {"stream": stream}):
            await world.mesh.until(lambda: world.mesh.submits)
        await world.mesh.until(lambda: world.mesh.cancels and len(world.mesh.hints) >= 2)
        assert world.mesh.cancels[0].handoff_id == world.mesh.submits[0].handoff_id


async def test_a_client_that_leaves_inside_a_stream_is_noticed(tmp_path: Path) -> None:
    """Each choice of its request is called off."""
    async with router_world(tmp_path) as world:
        world.mesh.scripts = [one_token]
        async with world.session.post(f"{world.url}/v1/completions", json=PLAIN | {"stream": True, "n": 2}) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await world.mesh.until(lambda: len(world.mesh.cancels) == 2)
        assert {each.handoff_id for each in world.mesh.cancels} == {each.handoff_id for each in world.mesh.submits}


async def test_a_client_that_leaves_while_the_prompt_is_sent_is_noticed(tmp_path: Path) -> None:
    """The broker knows nothing yet; the worker that holds the prompt gets a hint."""
    async with router_world(tmp_path) as world:
        world.mesh.hold_prompts = asyncio.Event()
        async with leaving_client(world, PLAIN):
            await world.mesh.until(lambda: world.mesh.frames)
        await world.mesh.until(lambda: world.mesh.hints)
        world.mesh.hold_prompts.set()
        assert world.mesh.submits == []


async def test_over_the_limit_requests_are_turned_away(tmp_path: Path) -> None:
    """429 at once, and room again after the others have gone."""
    async with router_world(tmp_path, max_concurrent_requests=1, max_choices=1) as world:
        world.mesh.scripts = [silence, whole_answer]
        async with leaving_client(world, PLAIN):
            await world.mesh.until(lambda: world.mesh.submits)
            status, answer, headers = await world.post("/v1/completions", PLAIN)
            assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "overloaded", "1")
        await world.mesh.until(lambda: world.mesh.cancels)
        assert (await world.post("/v1/completions", PLAIN))[0] == 200


async def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path) -> None:
    """Memory for it is bounded: its stream ends, and the mesh hears of it."""
    async with router_world(tmp_path, max_waiting_frames=8) as world:

        async def flood(mesh: Mesh, submit: SubmitRequest) -> None:
            tokens = encode_text(LONG_TEXT) * 16
            index = 0
            while not mesh.cancels:
                await mesh.send(submit, index, tokens)
                index += len(tokens)
                await asyncio.sleep(0)

        world.mesh.scripts = [flood]
        body = json.dumps(PLAIN | {"stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            address = world.url.removeprefix("http://").split(":")
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (address[0], int(address[1])))
            await loop.sock_sendall(client, head + body)
            await world.mesh.until(lambda: world.mesh.cancels)
            assert "does not read" in world.mesh.cancels[0].reason


async def test_draining_lets_streams_finish(tmp_path: Path) -> None:
    """New connections are refused, the running stream ends well, and the process exits with 0."""
    async with router_world(tmp_path) as world:
        go_on = asyncio.Event()

        async def in_two_parts(mesh: Mesh, submit: SubmitRequest) -> None:
            tokens = mesh.answer
            await mesh.send(submit, 0, tokens[:1])
            await go_on.wait()
            reason = FinishReason.STOP
            await mesh.send(submit, 1, tokens[1:], final=True, num_tokens=len(tokens), finish_reason=reason)

        world.mesh.scripts = [in_two_parts]
        async with world.session.post(f"{world.url}/v1/completions", json=PLAIN | {"stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            world.lifecycle.request_drain("test")
            await _until_refused(world)
            go_on.set()
            rest = await response.text()
        assert rest.endswith("data: [DONE]\n\n")
        assert "error" not in rest


async def test_draining_ends_what_takes_too_long(tmp_path: Path) -> None:
    """Such a stream gets an explicit error, the mesh a cancel, and the process exits with 0."""
    async with router_world(tmp_path, drain_timeout_s=1.0) as world:
        world.mesh.scripts = [one_token]
        async with world.session.post(f"{world.url}/v1/completions", json=PLAIN | {"stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            world.lifecycle.request_drain("test")
            rest = await response.text()
        assert '"code":"draining"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        await world.mesh.until(lambda: world.mesh.cancels)


async def _until_refused(world: World) -> None:
    """Wait until the router takes no new connection."""
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{world.url}/health") as response:
                    await response.read()
            except aiohttp.ClientConnectionError:
                return
