"""Who is not there any more, and who is there twice: a worker computes for no router that is gone, and no id serves twice."""

from __future__ import annotations

import pytest

from common.bus.storage import ROUTER_TTL_S, ROUTERS_CONFIG
from common.worker.twin import WorkerIdTakenError
from contracts.codec import encode
from contracts.errors import ErrorCode
from contracts.handoff import PrefillFinished, RequestEnded, TakenOver
from contracts.requests import Accepted, SamplingParams
from contracts.routers import RouterRecord
from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from tests.integration.leaderless import Leaderless
from tests.integration.worker_world import EXPECTED, HANDOFF, FaultyEngine, Mesh, in_mesh, pair

LONG = SamplingParams(max_tokens=20_000, seed=9, temperature=0.0)


async def announce(mesh: Mesh, incarnation: str = "ir") -> None:
    """The router's sign of life."""
    bucket = await mesh.bus.ensure_bucket(ROUTERS_CONFIG)
    await bucket.put("router-0", encode(RouterRecord(router_id="router-0", incarnation=incarnation)))


async def decoding(mesh: Mesh) -> DecodeService:
    """A long request decodes for a router that has just spoken."""
    await pair(mesh)
    await announce(mesh)
    await mesh.send_prompt("prefill", "prefill-0")
    await mesh.run(await mesh.reserve(LONG, timeout_ms=600_000), sampling=LONG, timeout_ms=600_000)
    await mesh.heard.get()
    await mesh.commit(EXPECTED[0])
    service = mesh.services["decode-0"]
    assert isinstance(service, DecodeService)
    engine = service.replicas[0].engine
    assert isinstance(engine, FaultyEngine)
    engine._step_s = 0.05  # nobody looks at the tokens
    return service


def running(service: DecodeService) -> int:
    """Sequences that take part in steps."""
    return service.replicas.load.num_running


@pytest.mark.parametrize("signs_off", [True, False])
def test_nothing_is_computed_for_a_router_that_is_gone(signs_off: bool) -> None:
    """It stops when the router signs off or falls silent for its time to live; memory stays until the release."""

    async def scenario(mesh: Mesh) -> None:
        service = await decoding(mesh)
        if signs_off:
            await (await mesh.bus.ensure_bucket(ROUTERS_CONFIG)).delete("router-0")
            await mesh.clock.sleep(0.05)
        else:
            await mesh.clock.sleep(ROUTER_TTL_S / 4)
            assert running(service) == 1
            await mesh.clock.sleep(ROUTER_TTL_S)
        assert running(service) == 0
        assert service.replicas.load.num_free_slots == service.settings.num_slots - 1
        for role in ("decode", "prefill"):
            await mesh.release(role, f"{role}-0")
        mesh.assert_empty()

    in_mesh(scenario)


def test_an_outage_and_another_start_of_a_router_stop_nothing() -> None:
    """While the bus is away nobody can be heard; and another start of the router is the broker's to judge."""

    async def scenario(mesh: Mesh) -> None:
        service = await decoding(mesh)
        mesh.server.go_down()
        await mesh.clock.sleep(0.6)
        mesh.server.come_back()
        await mesh.clock.sleep(0.1)
        await announce(mesh, "ir-2")
        await mesh.clock.sleep(1.0)
        assert running(service) == 1

    in_mesh(scenario)


def test_a_bucket_that_does_not_answer_judges_no_router() -> None:
    """Nothing is heard of a router for longer than it may be silent; once it can be heard again, silence counts as before."""

    async def scenario(mesh: Mesh) -> None:
        service = await decoding(mesh)
        faults = mesh.server.faults = Leaderless(ROUTERS_CONFIG)
        await mesh.clock.sleep(2 * ROUTER_TTL_S)
        faults.is_electing = False
        await announce(mesh)
        await mesh.clock.sleep(ROUTER_TTL_S / 2)
        assert running(service) == 1
        await mesh.clock.sleep(3 * ROUTER_TTL_S)
        assert running(service) == 0

    in_mesh(scenario)


def test_a_router_whose_record_is_there_is_there() -> None:
    """Though a watch has not told of it for its time to live."""

    async def scenario(mesh: Mesh) -> None:
        service = await decoding(mesh)
        await mesh.clock.sleep(0.1)
        service.routers._heard._heard["router-0"] -= ROUTER_TTL_S
        await mesh.clock.sleep(1.0)
        assert running(service) == 1
        await mesh.clock.sleep(ROUTER_TTL_S + 1.0)
        assert running(service) == 0

    in_mesh(scenario)


def test_what_was_stopped_for_a_router_that_was_there_goes_on_elsewhere() -> None:
    """Its record had lapsed, and comes again: the stream ends with an error that is retried, and no client waits for its deadline."""

    async def scenario(mesh: Mesh) -> None:
        service = await decoding(mesh)
        prefill = mesh.services["prefill-0"]
        await mesh.send_prompt("prefill", "prefill-0", "r2-0")
        waiting, kept = await mesh.reserve(handoff="r2-0"), await mesh.reserve(handoff="r3-0")
        async with prefill.replicas[0].loop.lock:  # a long step
            assert await mesh.run(waiting) == Accepted(handoff_id="r2-0")
            await mesh.clock.sleep(2 * ROUTER_TTL_S)
            assert running(service) == 0
            while not mesh.heard.empty():
                mesh.heard.get_nowait()
            await announce(mesh)
            await mesh.clock.sleep(0.1)
        told = {report.handoff_id: report for report in (await mesh.heard.get(), await mesh.heard.get())}
        assert {handoff: type(report) for handoff, report in told.items()} == {
            HANDOFF: RequestEnded,
            "r2-0": PrefillFinished,
        }
        for report in told.values():
            assert not isinstance(report, TakenOver)
            assert report.error is not None
            assert report.error.code is ErrorCode.PREEMPTED
            assert "router-0 had fallen silent" in report.error.message
        assert (await mesh.text())[1].error is not None
        assert await mesh.commit(EXPECTED[0], kept.handoff_id) == Accepted(handoff_id="r3-0")
        assert isinstance(await mesh.heard.get(), TakenOver)
        ended = await mesh.heard.get()
        assert isinstance(ended, RequestEnded)
        assert ended.error is None, "who had computed nothing yet had lost nothing"

    in_mesh(scenario)


def test_a_second_worker_of_an_id_does_not_begin() -> None:
    """Of whichever role: the one that serves goes on and keeps its record, the other says who has the id."""

    async def scenario(mesh: Mesh) -> None:
        first = await mesh.add(DecodeService, "decode-0")
        with pytest.raises(
            WorkerIdTakenError, match=r"worker_id: 'decode-0' .* the start i-decode-0 of a decode worker answers"
        ):
            await mesh.add(DecodeService, "decode-0")
        with pytest.raises(WorkerIdTakenError):
            await mesh.add(PrefillService, "decode-0")
        assert first is mesh.services["decode-0"]

    in_mesh(scenario)
