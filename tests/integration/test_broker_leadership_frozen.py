"""A server that stands still: who led stops in time, takes nobody for gone, and leads again."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from common.bus.memory import MemoryServer
from common.bus.storage import LEASE_TTL_S, WORKER_TTL_S
from contracts.errors import ErrorCode
from contracts.handoff import HandoffState, RunPrefill
from contracts.requests import Accepted
from tests.integration.broker_world import HANDOFF, World, in_world
from tests.integration.leadership_world import Candidate, follow, two

OK = Accepted(handoff_id=HANDOFF)


def test_a_leader_that_cannot_renew_stops_before_anybody_else_begins() -> None:
    """A server that stands still: the leader ends its term by its own clock, and after the thaw one of both leads."""

    async def scenario(world: World, server: MemoryServer) -> None:
        first, second = await two(world, server)
        await world.clock.sleep(0.5 * LEASE_TTL_S)
        server.freeze()
        await world.clock.sleep(0.75 * LEASE_TTL_S)
        assert (first.leads, second.leads) == (False, False)
        await world.clock.sleep(2 * LEASE_TTL_S)
        server.thaw()
        await world.until(lambda: first.leads or second.leads)
        assert not (first.leads and second.leads)
        leader = first if first.leads else second
        await follow(world, leader)
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        assert b"pdmesh_broker_leads 1.0" in leader.metrics.exposition()

    in_world(scenario, with_broker=False)


@pytest.mark.parametrize("moment_s", [20.0, 21.25, 22.0, 23.75, 25.5, 27.75, 29.75])
def test_a_leader_takes_nobody_for_gone_while_the_server_stands_still(moment_s: float) -> None:
    """Its workers fall silent before its lease ends, whenever that begins; but so would it be itself, if anybody listened."""

    async def scenario(world: World, server: MemoryServer) -> None:
        alone = Candidate(world, server.connect(), "broker-0")
        await follow(world, alone)
        await world.clock.sleep(moment_s - world.clock.monotonic())
        server.freeze()
        with capture_logs() as frozen:
            await world.until(lambda: not alone.leads)
        server.thaw()
        assert "worker_gone" not in {line["event"] for line in frozen}

    in_world(scenario, with_broker=False)


def test_a_leader_misses_a_worker_in_time_while_it_keeps_its_lease() -> None:
    """Renewals that come in time are no reason to wait."""

    async def scenario(world: World, server: MemoryServer) -> None:
        alone = Candidate(world, server.connect(), "broker-0")
        await follow(world, alone)
        await world.clock.sleep(2 * LEASE_TTL_S)
        with capture_logs() as logs:
            del world.decode.scripts["alive"]
            await world.clock.sleep(WORKER_TTL_S + 0.5)
        assert [line["worker_id"] for line in logs if line["event"] == "worker_gone"] == ["decode-0"]

    in_world(scenario, with_broker=False)


def test_a_lone_broker_leads_again_after_it_has_lost_its_lease() -> None:
    """The same process begins a new term with all of its metrics; a drain that meets the loss does not hang."""

    async def scenario(world: World, server: MemoryServer) -> None:
        alone = Candidate(world, server.connect(), "broker-0")
        await alone.leadership.wait_settled()
        await follow(world, alone)
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        server.freeze()
        await world.until(lambda: not alone.leads)
        server.thaw()
        await follow(world, alone)
        await world.until(lambda: world.broker.num_in_flight == 0)
        left = await world.record()  # nobody finished it before its deadline
        assert left.error is not None
        assert (left.state, left.error.code) == (HandoffState.FAILED, ErrorCode.DEADLINE_EXCEEDED)
        assert b"pdmesh_broker_terms_total 2.0" in alone.metrics.exposition()
        assert await world.submit(handoff_id="r2-0", request_id="r2") == Accepted(handoff_id="r2-0")
        draining = world.group.create_task(alone.leadership.drain(), name="drain")
        await world.clock.sleep(1.0)
        assert not draining.done()
        server.freeze()
        async with asyncio.timeout(LEASE_TTL_S):
            await draining
        server.thaw()
        await alone.task  # who drains begins no new term

    in_world(scenario, with_broker=False)
