"""A decode worker whose data link is slow, or swallows everything: the others are served, and nobody dies of it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import pytest

from common.runtime.clock import SystemClock
from loadtest.mesh import Mesh, MeshSpec
from tests.e2e.chaos.cases import greedy_cases
from tests.e2e.chaos.processes import Processes
from tests.e2e.chaos.report import judge
from tests.e2e.chaos.rest import unrest_after
from tests.e2e.chaos.slow_link import HOST, SlowLink
from tests.e2e.chaos.streams import Ending, Load, Outcome
from tests.e2e.mesh_probe import Probe

SPEC = MeshSpec(
    mode="a link that can swallow",
    model=Path(__file__).resolve().parents[3] / "models" / "tiny",
    workers=(("prefill", "tp=1"), ("decode", "tp=1"), ("decode", f"tp=1,transport_advertise_host={HOST}")),
    overrides=("transport=tcp", "router.request_timeout_s=60"),
)
NUM_STREAMS = 8
SLOW_BYTES_PER_S = 2e6
_REST_S = 120.0


async def _stand_before_decode_1(link: SlowLink, starting: asyncio.Task[Mesh]) -> None:
    """The launcher waits until all workers are linked, so the way must be there before the mesh is ready."""
    clock = SystemClock()
    processes = Processes(os.getpid())
    while not starting.done():
        rank = processes.rank("decode-1", 0)
        if rank is not None:
            await link.stand_before(rank)
            return
        await clock.sleep(0.1)


async def _round(mesh: Mesh, model: str) -> list[Outcome]:
    """So many streams at once, each to its end."""
    cases = [case for case in greedy_cases() if len(case.expected) > 4][:NUM_STREAMS]
    load = Load(mesh.url, model, cases, num_streams=NUM_STREAMS, seed=0)
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        asked = [group.create_task(load.ask(session, case)) for case in cases]
    return [task.result() for task in asked]


@pytest.mark.long
async def test_a_black_hole_costs_only_what_fell_into_it(tmp_path: Path) -> None:
    """All are served: with a link that is slow, with one that swallows, where they go elsewhere in time, and when it is back."""
    link = SlowLink()
    try:
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(Mesh.start(SPEC, tmp_path, SystemClock(), print), name="start")
            group.create_task(_stand_before_decode_1(link, starting), name="link")
        mesh = starting.result()
        try:
            async with Probe(mesh) as probe:
                await _under_a_bad_link(mesh, probe, link)
        finally:
            assert await mesh.stop()  # no process has died: a death would have ended the mesh
    finally:
        await link.close()


async def _under_a_bad_link(mesh: Mesh, probe: Probe, link: SlowLink) -> None:
    model = await probe.model()
    before = link.num_bytes
    link.let_through(SLOW_BYTES_PER_S)
    slow = await _round(mesh, model)
    assert [outcome.ending for outcome in slow] == [Ending.WHOLE] * NUM_STREAMS
    assert link.num_bytes > before  # some of them went over it
    link.swallow()
    swallowed = await _round(mesh, model)
    print([f"{each.ending} {each.code} {each.ended_at - each.started_at:.1f} s" for each in swallowed])
    assert judge([*slow, *swallowed], (), strict=False) == []
    assert [outcome.ending for outcome in swallowed] == [Ending.WHOLE] * NUM_STREAMS
    link.let_through()
    assert await unrest_after(probe, 3, _REST_S) == ""
    again = await _round(mesh, model)
    assert [outcome.ending for outcome in again] == [Ending.WHOLE] * NUM_STREAMS
