"""Which broker a worker obeys: one that holds the lease, whatever number a command bears."""

from __future__ import annotations

import asyncio

import pytest

from common.bus.errors import BusTimeout
from common.bus.storage import LEASES_CONFIG
from contracts import subjects
from contracts.codec import encode
from contracts.errors import ErrorCode
from contracts.handoff import Reserved
from contracts.leases import LeaseValue
from contracts.requests import Refused
from tests.integration.worker_world import Mesh, in_mesh, pair

FORGED = 1 << 60


def exposed(mesh: Mesh, worker_id: str) -> str:
    """The metrics of a worker."""
    return mesh.services[worker_id].metrics.exposition().decode()


def test_a_forged_fence_is_refused_and_deposes_nobody() -> None:
    """A number that no lease has had is not believed: the broker that leads is obeyed as before."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        assert isinstance(await mesh.reserve(), Reserved)
        for _ in range(2):
            forged = await mesh.reserve(handoff="r2-0", fence=FORGED)
            assert isinstance(forged, Refused)
            assert forged.error.code is ErrorCode.STALE_FENCE
            assert forged.error.message == f"fence: {FORGED} was given to no broker; the one that leads has 1"
        assert isinstance(await mesh.reserve(handoff="r3-0"), Reserved)
        assert "pdmesh_worker_fences_refused_total 2.0" in exposed(mesh, "decode-0")

    in_mesh(scenario)


def test_a_broker_that_follows_is_obeyed_and_the_one_before_is_not() -> None:
    """Also when only a deposed broker's command tells the worker that there is a new term."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        assert isinstance(await mesh.reserve(), Reserved)
        await mesh.lease.lead(5)
        assert isinstance(await mesh.reserve(handoff="r2-0", fence=5), Reserved)
        stale = await mesh.reserve(handoff="r3-0", fence=4)
        assert stale.error.code is ErrorCode.STALE_FENCE
        await mesh.lease.lead(9)
        between = await mesh.reserve(handoff="r3-0", fence=7)
        assert between.error.code is ErrorCode.STALE_FENCE
        assert (await mesh.reserve(handoff="r3-0", fence=5)).error.code is ErrorCode.STALE_FENCE
        assert isinstance(await mesh.reserve(handoff="r3-0", fence=9), Reserved)
        assert "pdmesh_worker_fences_refused_total 0.0" in exposed(mesh, "decode-0")

    in_mesh(scenario)


def test_a_term_that_has_just_begun_is_known_by_the_revision_of_its_lease() -> None:
    """The write that begins a term cannot name its own number; whoever reads it can make it out."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        bucket = await mesh.bus.ensure_bucket(LEASES_CONFIG)
        revision = await bucket.put(subjects.broker_lease(), encode(LeaseValue(holder="b", start="s")))
        fence = await bucket.epoch() // 1_000_000_000 << 32 | revision
        assert (await mesh.reserve(fence=fence + 1)).error.code is ErrorCode.STALE_FENCE
        assert isinstance(await mesh.reserve(fence=fence), Reserved)

    in_mesh(scenario)


def test_a_new_term_that_a_server_has_not_heard_of_yet_is_looked_for_again() -> None:
    """The command waits for the lease to show, and is refused only when it does not."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)

        async def late() -> None:
            await mesh.clock.sleep(0.2)
            await mesh.lease.lead(3)

        async with asyncio.TaskGroup() as group:
            group.create_task(late())
            assert isinstance(await mesh.reserve(fence=3), Reserved)

    in_mesh(scenario)


@pytest.mark.parametrize("value", [None, b"no lease"])
def test_while_nobody_can_be_seen_to_lead_a_new_fence_is_not_answered(value: bytes | None) -> None:
    """Whoever leads asks again until the lease can be read; a fence that was believed before goes on to be."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        assert isinstance(await mesh.reserve(), Reserved)
        bucket = await mesh.bus.ensure_bucket(LEASES_CONFIG)
        mesh.lease.put = never  # type: ignore[method-assign]  # nobody renews it
        if value is None:
            await bucket.delete(subjects.broker_lease())
        else:
            await bucket.put(subjects.broker_lease(), value)
        with pytest.raises(BusTimeout):
            await mesh.reserve(handoff="r2-0", fence=2)
        assert isinstance(await mesh.reserve(handoff="r3-0"), Reserved)
        await bucket.put(subjects.broker_lease(), encode(LeaseValue(holder="b", start="s", fence=2)))
        assert isinstance(await mesh.reserve(handoff="r2-0", fence=2), Reserved)

    in_mesh(scenario)


async def never() -> None:
    """Write nothing."""
