"""A decode worker of two is killed in the middle of streams, and a router: the streams go on, the memory comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio

from common.runtime.clock import SystemClock
from loadtest.mesh import Mesh, MeshSpec
from tests.e2e.conftest import MODEL
from tests.e2e.mesh_probe import Probe
from tests.e2e.proc import DEADLINE_S, descendants
from tests.e2e.stream import Stream

pytestmark = pytest.mark.asyncio(loop_scope="session")

GUESSING: Final = "num_speculative_tokens=3"
SPEC: Final = MeshSpec(
    mode="P1/D1 x 2",
    model=MODEL,
    workers=(
        ("prefill", f"tp=1,{GUESSING}"),
        ("decode", "tp=1,num_speculative_tokens=2"),
        ("decode", f"tp=1,{GUESSING}"),
    ),
    restart=True,
)
"""The worker that is killed guesses more tokens than the one that goes on, from the draft that comes with the other attempt."""
PROMPT: Final = tuple(60 + number % 900 for number in range(40))
MAX_TOKENS: Final = 200
BEFORE: Final = 5
GREEDY: Final[dict[str, Any]] = {"temperature": 0}
SAMPLED: Final[dict[str, Any]] = {"temperature": 0.9, "top_p": 0.95, "seed": 7}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Probe]:
    """A mesh of its own: its services are killed, and started again by `pdmesh up`."""
    running = await Mesh.start(SPEC, tmp_path_factory.mktemp("two-decodes"), SystemClock(), print)
    try:
        async with Probe(running) as probe:
            yield probe
    finally:
        assert await running.stop()


def _pid(probe: Probe, service: str, worker_id: str = "") -> int:
    """The process of one service, as its command line says."""
    assert isinstance(probe.mesh, Mesh)
    for pid in descendants(probe.mesh.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        if f"services.{service}\0".encode() in words and worker_id.encode() in words:
            return pid
    raise AssertionError(f"{service} {worker_id} does not run")


async def test_a_killed_decode_worker_ends_no_stream(mesh: Probe) -> None:
    """Greedy and sampled streams are token by token those that nothing disturbed; the killed worker's were going on elsewhere.

    Between two of its steps or of their frames lie several tokens, of which the client has all or none.
    """
    expected = []
    for fields in (GREEDY, SAMPLED):
        undisturbed = Stream()
        await undisturbed.read(mesh, PROMPT, MAX_TOKENS, **fields)
        assert len(undisturbed.token_ids) == MAX_TOKENS
        expected.append(undisturbed.token_ids)
    clients = [Stream() for _ in range(4)]
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        for client, fields in zip(clients, (GREEDY, SAMPLED) * 2, strict=True):
            group.create_task(client.read(mesh, PROMPT, MAX_TOKENS, **fields))
        for client in clients:
            await client.until(BEFORE)
        os.kill(_pid(mesh, "decode", "decode-1"), signal.SIGKILL)
    assert [client.error for client in clients] == [None] * len(clients)
    assert [client.token_ids for client in clients] == expected * 2
    moved = [
        event
        for client in clients
        for event in mesh.of_request(client.request_id)
        if not event["handoff_id"].endswith("-0")
    ]
    assert moved, "decode-1 had none of the streams: nothing was tested"
    released = [event for event in moved if event["event"] == "decode_released"]
    assert all(event["num_accepted"] > 0 for event in released), "it goes on with guesses"


async def test_a_killed_router_holds_no_memory(mesh: Probe) -> None:
    """Nobody waits any more: what its requests held comes back, long before their deadlines."""
    client = Stream()
    reading = asyncio.get_running_loop().create_task(client.read(mesh, PROMPT, 4000, **GREEDY))
    await client.until(BEFORE)
    os.kill(_pid(mesh, "router"), signal.SIGKILL)
    with pytest.raises(aiohttp.ClientError):
        await reading
    cancelled = await mesh.event(
        lambda event: event["request_id"] == client.request_id and event["event"] == "request_cancelled"
    )
    assert "is gone" in json.dumps(cancelled)
    async with asyncio.timeout(DEADLINE_S):
        while any([(await mesh.scan(each.role, each.worker_id)).held_blocks for each in await mesh.workers()]):
            await SystemClock().sleep(0.1)
        while not await _is_ready(mesh):  # the router starts again, and can be drained then
            await SystemClock().sleep(0.1)


async def _is_ready(probe: Probe) -> bool:
    try:
        async with probe.http.get(f"{probe.url}/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
