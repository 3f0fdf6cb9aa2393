"""A worker whose memory waits for writers that never stop leaves in order, to come back whole; one that can wait stays."""

from __future__ import annotations

import pytest

from common.dataplane.tcp_transfer import SILENCE_S
from common.runtime.lifecycle import EXIT_QUARANTINED, ServiceEnded
from common.worker.quarantine_watch import PATIENCE_S
from contracts.handoff import Reserved
from contracts.workers import WorkerState
from tests.integration.worker_world import FaultyEngine, Mesh, in_mesh, pair


async def _quarantined(mesh: Mesh, num_slots: int, writers_left: int) -> None:
    """One handoff's memory is released while its writers still have so many looks to stop."""
    await pair(mesh, num_slots=num_slots)
    assert isinstance(await mesh.reserve(), Reserved)
    (replica,) = mesh.services["decode-0"].replicas
    assert isinstance(replica.engine, FaultyEngine)
    replica.engine.writers_left = writers_left
    await mesh.release("decode", "decode-0")
    assert replica.pool.num_quarantined_slots == 1


def test_a_worker_with_too_much_in_quarantine_drains_and_leaves() -> None:
    """More than a tenth of the slots for that long: it says that it drains, lets what it has end, and ends with the status that is kept for this."""
    states: list[WorkerState] = []

    async def scenario(mesh: Mesh) -> None:
        await _quarantined(mesh, num_slots=8, writers_left=10_000)
        assert isinstance(await mesh.reserve(handoff="r2-0"), Reserved)
        service = mesh.services["decode-0"]
        while True:
            await mesh.clock.sleep(0.1)
            states.append(service.record().state)
            if service.draining and len(service.table):
                await mesh.release("decode", "decode-0", "r2-0")

    with pytest.raises(ExceptionGroup) as end:
        in_mesh(scenario)
    found = end.value.subgroup(lambda error: isinstance(error, ServiceEnded) and error.status == EXIT_QUARANTINED)
    assert found is not None
    assert "1 of 8 slots of replica 0" in str(found.exceptions)
    assert states[-1] is WorkerState.DRAINING
    assert len(states) * 0.1 >= PATIENCE_S


@pytest.mark.parametrize(("num_slots", "writers_left"), [(8, 5), (8, int(SILENCE_S) + 3), (16, 10_000)])
def test_quarantine_that_ends_or_is_small_moves_nobody(num_slots: int, writers_left: int) -> None:
    """Writers that stop in time are waited for, those among them whose peer stands still, and so is anything up to a tenth of each pool.

    A writer is looked after every second.
    """

    async def scenario(mesh: Mesh) -> None:
        await _quarantined(mesh, num_slots, writers_left)
        await mesh.clock.sleep(5 * PATIENCE_S)
        assert not mesh.services["decode-0"].draining

    in_mesh(scenario)
