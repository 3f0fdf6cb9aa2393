"""Bringing the handoff of a broker's world to where a test begins."""

from __future__ import annotations

from contracts.handoff import (
    CommitHandoff,
    ReleaseHandoff,
    RunPrefill,
)
from contracts.requests import Accepted
from tests.integration.broker_world import HANDOFF, World

OK = Accepted(handoff_id=HANDOFF)


async def prefilling(world: World) -> None:
    """Bring the handoff to where prefill computes."""
    assert await world.submit() == OK
    await world.until(lambda: bool(world.prefill.of(RunPrefill)))


async def committed(world: World) -> None:
    """Bring the handoff to where decode was asked to commit."""
    await prefilling(world)
    await world.publish_parts()
    assert await world.finish_prefill() == OK
    await world.until(lambda: bool(world.decode.of(CommitHandoff)))


async def forgotten(world: World) -> None:
    """Wait until nothing is in flight any more."""
    await world.until(lambda: world.broker.num_in_flight == 0)


def assert_released(world: World) -> None:
    """Both workers were told, once, with a tombstone."""
    for worker in (world.prefill, world.decode):
        (release,) = worker.of(ReleaseHandoff)
        assert release.tombstone_ms >= 5_000
