"""SIGTERM to each service in turn, with a request under way: the answer is whole, the exit clean, nothing is left, it can come back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.planted_mesh import PlantedMesh
from tests.e2e.proc import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG, SHORT = 200, 20
"""Tokens of the stream that is under way when the service is told to end, and of the one that the next life serves."""


def _entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


async def _stream(session: aiohttp.ClientSession, url: str, num_tokens: int, began: asyncio.Event) -> int:
    """Read one stream to its end; the number of its tokens."""
    prompt = [60 + number % 900 for number in range(500)]
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    body |= {"return_token_ids": True}
    tokens, last = 0, b""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                tokens += len(json.loads(line[6:])["choices"][0]["token_ids"])
                began.set()
            last = line.strip() or last
    assert last == b"data: [DONE]"
    return tokens


@pytest.mark.parametrize("name", ["decode", "prefill", "router", "broker"])
async def test_a_terminated_service_finishes_its_work_and_leaves_nothing(planted_shm: PlantedMesh, name: str) -> None:
    """The stream under way comes to its end; status 0; none of its rank processes, sockets or memory is left; it comes back."""
    services = planted_shm.services
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await services.ready(session)
        sockets = services.directory / "s"
        before = _entries(sockets)
        began = asyncio.Event()
        stream = asyncio.get_running_loop().create_task(_stream(session, services.url, LONG, began))
        async with asyncio.timeout(DEADLINE_S):
            await began.wait()
        status, left = await services.terminate(name)
        assert await stream == LONG
        assert (status, left) == (0, [])
        assert not {entry for entry in before & _entries(sockets) if name in entry}
        await services.start(name)
        await services.ready(session)
        assert await _stream(session, services.url, SHORT, asyncio.Event()) == SHORT
