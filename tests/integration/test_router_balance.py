"""Requests are spread evenly again after failures, clients that left, and restarts: nothing is counted as running for ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from common.bus.storage import WORKERS_CONFIG
from contracts.codec import encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.requests import MixedRoute, SubmitRequest, WorkerRef
from contracts.workers import WorkerRecord
from services.router.core.placement import Loads
from tests.integration.router_world import (
    PATIENCE_S,
    Mesh,
    World,
    overloaded,
    record,
    router_world,
    silence,
    whole_answer,
)

WORKERS = ("mixed-0", "mixed-1", "mixed-2")
PLAIN = {"model": "tiny", "prompt": "hello"}
NUM_ROUNDS = 4
ANOTHER_START = "another-start"


def workers_of(mesh: Mesh) -> Counter[str]:
    """How many submits went to each worker."""
    return Counter(each.route.mixed.worker_id for each in mesh.submits if isinstance(each.route, MixedRoute))


async def broken_off(mesh: Mesh, submit: SubmitRequest) -> None:
    """End with an error behind two tokens."""
    await mesh.send(submit, 0, mesh.answer[:2])
    error = ErrorInfo(code=ErrorCode.WORKER_LOST, message="it is gone")
    await mesh.send(submit, 2, [], final=True, num_tokens=2, error=error)


async def leave(world: World) -> None:
    """A client that leaves while nobody answers it."""
    world.mesh.scripts = [silence]
    before = (len(world.mesh.submits), len(world.mesh.cancels))
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:

        async def post() -> None:
            async with session.post(f"{world.url}/v1/completions", json=PLAIN) as response:
                await response.read()

        task = group.create_task(post(), name="client")
        await world.mesh.until(lambda: len(world.mesh.submits) > before[0])
        task.cancel()
    await world.mesh.until(lambda: len(world.mesh.cancels) > before[1])


async def rounds(world: World) -> Counter[str]:
    """Serve requests one after the other; how many each worker got."""
    world.mesh.submits.clear()
    world.mesh.scripts = [whole_answer]
    for _ in range(NUM_ROUNDS * len(WORKERS)):
        assert (await world.post("/v1/completions", PLAIN))[0] == 200
    return workers_of(world.mesh)


async def nothing_runs(world: World) -> None:
    """Wait until the router counts nothing as running."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with world.session.get(f"{world.url}/metrics") as response:
                if "pdmesh_router_running_requests 0.0" in (await response.text()).splitlines():
                    return


def starts_of(mesh: Mesh) -> set[str]:
    """The starts of workers that submits went to."""
    return {each.route.mixed.incarnation for each in mesh.submits if isinstance(each.route, MixedRoute)}


async def test_load_is_even_after_failures_departures_and_a_restart(tmp_path: Path) -> None:
    """Refusals of prompts and submits, an error in mid-stream, a client that leaves, a worker that comes back as another start."""
    records: list[WorkerRecord] = [record(each) for each in WORKERS]
    async with router_world(tmp_path, records=records, expected_workers=WORKERS) as world:
        mesh = world.mesh
        assert set((await rounds(world)).values()) == {NUM_ROUNDS}
        for _ in range(3):
            mesh.refuse_prompts = [overloaded()]
            assert (await world.post("/v1/completions", PLAIN))[0] == 200
            mesh.refuse_submits = [overloaded()]
            assert (await world.post("/v1/completions", PLAIN))[0] == 200
            mesh.scripts = [broken_off]
            assert (await world.post("/v1/completions", PLAIN | {"redispatch": False}))[0] == 503
            await leave(world)
            mesh.scripts = [whole_answer]
        records[0] = record(WORKERS[0], incarnation=ANOTHER_START)
        bucket = await mesh.bus.ensure_bucket(WORKERS_CONFIG)
        await bucket.put(WORKERS[0], encode(records[0]))
        await nothing_runs(world)
        async with asyncio.timeout(PATIENCE_S):
            while ANOTHER_START not in starts_of(mesh):
                await rounds(world)
        found = await rounds(world)
        assert set(found) == set(WORKERS)
        assert set(found.values()) == {NUM_ROUNDS}
        assert starts_of(mesh) == {ANOTHER_START, *(f"i{each}" for each in WORKERS[1:])}
        await nothing_runs(world)


async def test_a_count_that_is_never_given_back_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a router that forgets to count down after an attempt sends its requests elsewhere."""
    remove, forgotten = Loads.remove, list[WorkerRef]()

    def forget_the_first(self: Loads, worker: WorkerRef) -> None:
        if forgotten:
            remove(self, worker)
        else:
            forgotten.append(worker)

    monkeypatch.setattr(Loads, "remove", forget_the_first)
    records = [record(each) for each in WORKERS]
    async with router_world(tmp_path, records=records, expected_workers=WORKERS) as world:
        await leave(world)
        await nothing_runs(world)
        assert set((await rounds(world)).values()) != {NUM_ROUNDS}


async def test_a_prompt_of_300000_tokens_that_fits_nowhere_is_refused_at_once(tmp_path: Path) -> None:
    """413 before any worker hears of it; nobody waits for a deadline."""
    async with router_world(tmp_path, request_timeout_s=10 * PATIENCE_S) as world:
        async with asyncio.timeout(PATIENCE_S):
            status, answer, _ = await world.post("/v1/completions", PLAIN | {"prompt": [5] * 300_000})
        assert (status, answer["error"]["code"]) == (413, "prompt_too_long")
        assert (world.mesh.frames, world.mesh.submits) == ({}, [])
