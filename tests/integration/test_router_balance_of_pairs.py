"""Pairs of workers are loaded evenly again after failures, clients that left, and a restart: on each side nothing counts for ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from common.bus.storage import LINKS_CONFIG, WORKERS_CONFIG
from contracts import subjects
from contracts.codec import encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.links import LinkRecord, LinkState
from contracts.requests import DisaggregatedRoute, SubmitRequest, WorkerRef
from contracts.workers import WorkerRecord
from services.router.core.placement import Loads
from tests.integration.router_world import (
    PATIENCE_S,
    Mesh,
    World,
    one_token,
    overloaded,
    record,
    router_world,
    whole_answer,
)
from tests.integration.test_router_balance import ANOTHER_START, PLAIN, broken_off, leave, nothing_runs

PREFILLS = ("prefill-0", "prefill-1")
DECODES = ("decode-0", "decode-1")
WAYS = [(prefill, decode) for prefill in PREFILLS for decode in DECODES]
NUM_ROUNDS = 3


def link(prefill: str, decode: WorkerRecord) -> LinkRecord:
    """A pair that is linked."""
    return LinkRecord(
        prefill=WorkerRef(worker_id=prefill, incarnation=f"i{prefill}"),
        decode=WorkerRef(worker_id=decode.worker_id, incarnation=decode.incarnation),
        state=LinkState.LINKED,
        since="2030-01-01T00:00:00+00:00",
    )


def registered() -> list[WorkerRecord | LinkRecord]:
    """Two of each, and all of them linked."""
    workers: list[WorkerRecord | LinkRecord] = [record(each) for each in (*PREFILLS, *DECODES)]
    return workers + [link(prefill, record(decode)) for prefill, decode in WAYS]


async def restart(world: World, records: list[WorkerRecord | LinkRecord], worker_id: str) -> None:
    """Let a decode worker come back as another start, linked with everybody."""
    again = record(worker_id, incarnation=ANOTHER_START)
    workers = await world.mesh.bus.ensure_bucket(WORKERS_CONFIG)
    links = await world.mesh.bus.ensure_bucket(LINKS_CONFIG)
    for place, each in enumerate(records):
        if isinstance(each, WorkerRecord) and each.worker_id == worker_id:
            records[place] = again
        elif isinstance(each, LinkRecord) and each.decode.worker_id == worker_id:
            records[place] = link(each.prefill.worker_id, again)
    await workers.put(worker_id, encode(again))
    for prefill in PREFILLS:
        await links.put(subjects.link_key(prefill, worker_id), encode(link(prefill, again)))


async def restart_under_answers(world: World, records: list[WorkerRecord | LinkRecord]) -> None:
    """The same while two answers are under way, one on each decode worker: both are lost then, and go on elsewhere."""
    mesh, begun, restarted = world.mesh, asyncio.Event(), asyncio.Event()

    async def lost(mesh: Mesh, submit: SubmitRequest) -> None:
        await mesh.send(submit, 0, mesh.answer[:1])
        if len(mesh.submits) == len(DECODES):
            begun.set()
        await restarted.wait()
        error = ErrorInfo(code=ErrorCode.WORKER_LOST, message="another start is in its place")
        await mesh.send(submit, 1, [], final=True, num_tokens=1, error=error)

    mesh.submits.clear()
    mesh.scripts = [lost, lost, whole_answer]
    async with asyncio.TaskGroup() as clients:
        answers = [clients.create_task(world.post("/v1/completions", PLAIN)) for _ in DECODES]
        async with asyncio.timeout(PATIENCE_S):
            await begun.wait()
        assert {route_of(submit).decode.worker_id for submit in mesh.submits} == set(DECODES)
        await restart(world, records, DECODES[0])
        restarted.set()
    assert [answer.result()[0] for answer in answers] == [200, 200]
    assert len(mesh.submits) == 2 * len(DECODES)


def route_of(submit: SubmitRequest) -> DisaggregatedRoute:
    """The way that a submit goes: there are only pairs."""
    assert isinstance(submit.route, DisaggregatedRoute)
    return submit.route


def ways_of(mesh: Mesh) -> Counter[tuple[str, str]]:
    """How many submits went each way."""
    routes = map(route_of, mesh.submits)
    return Counter((route.prefill.worker_id, route.decode.worker_id) for route in routes)


async def rounds(world: World) -> Counter[tuple[str, str]]:
    """Serve requests one after the other; how many went each way."""
    world.mesh.submits.clear()
    world.mesh.scripts = [whole_answer]
    for _ in range(NUM_ROUNDS * len(WAYS)):
        assert (await world.post("/v1/completions", PLAIN))[0] == 200
    return ways_of(world.mesh)


async def test_pairs_are_loaded_evenly_after_failures_departures_and_a_restart(tmp_path: Path) -> None:
    """Refused prompts, submits that are refused behind their prompt, errors in mid-stream, clients that leave, another start of decode.

    What was under way on the old start goes on elsewhere, and counts nowhere afterwards.
    """
    records, even = registered(), dict.fromkeys(WAYS, NUM_ROUNDS)
    async with router_world(tmp_path, records=records, expected_workers=(*PREFILLS, *DECODES)) as world:
        mesh = world.mesh
        assert await rounds(world) == even
        for _ in range(len(WAYS)):
            mesh.refuse_prompts = [overloaded()]
            assert (await world.post("/v1/completions", PLAIN))[0] == 200
            mesh.refuse_submits = [overloaded()]
            assert (await world.post("/v1/completions", PLAIN))[0] == 200
            mesh.scripts = [broken_off]
            assert (await world.post("/v1/completions", PLAIN | {"redispatch": False}))[0] == 503
            mesh.scripts = [broken_off, whole_answer]
            assert (await world.post("/v1/completions", PLAIN))[0] == 200
            await leave(world)
            mesh.scripts = [whole_answer]
        await nothing_runs(world)
        assert await rounds(world) == even
        await restart_under_answers(world, records)
        async with asyncio.timeout(PATIENCE_S):
            while all(route_of(submit).decode.incarnation != ANOTHER_START for submit in mesh.submits):
                await rounds(world)
        assert await rounds(world) == even
        starts = {route_of(submit).decode.incarnation for submit in mesh.submits}
        assert starts == {ANOTHER_START, "idecode-1"}


async def test_a_stream_counts_at_decode_alone(tmp_path: Path) -> None:
    """Its prompt is done: from its first token on both prefill workers are alike, and the other decode worker gets all. Until it leaves."""
    async with router_world(tmp_path, records=registered(), expected_workers=(*PREFILLS, *DECODES)) as world:
        world.mesh.scripts = [one_token]
        body = PLAIN | {"stream": True}
        async with aiohttp.ClientSession() as session, session.post(f"{world.url}/v1/completions", json=body) as stream:
            await stream.content.readline()
            busy = route_of(world.mesh.submits[0]).decode.worker_id
            free = next(each for each in DECODES if each != busy)
            assert await rounds(world) == {(prefill, free): 2 * NUM_ROUNDS for prefill in PREFILLS}
        await world.mesh.until(lambda: world.mesh.cancels)
        await nothing_runs(world)
        assert await rounds(world) == dict.fromkeys(WAYS, NUM_ROUNDS)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_count_that_is_never_given_back_by_one_side_is_seen(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check can fail: a router that forgets to count down on one side sends its requests to the other worker of that side."""
    remove, forgotten = Loads.remove, list[WorkerRef]()

    def forget_the_first(self: Loads, worker: WorkerRef) -> None:
        if worker.worker_id.startswith(role) and not forgotten:
            forgotten.append(worker)
        else:
            remove(self, worker)

    monkeypatch.setattr(Loads, "remove", forget_the_first)
    async with router_world(tmp_path, records=registered(), expected_workers=(*PREFILLS, *DECODES)) as world:
        await leave(world)
        await nothing_runs(world)
        found = await rounds(world)
        assert found.total() == NUM_ROUNDS * len(WAYS)
        assert not any(forgotten[0].worker_id in way for way in found)
