"""An engine that does not answer costs its own replica everything, and the others nothing."""

from contracts.handoff import Reserved
from tests.integration.worker_world import FaultyEngine, Mesh, in_mesh, pair


async def _one_in_each_replica(mesh: Mesh) -> None:
    await pair(mesh, dp=2)
    for handoff, dp_rank in (("r1-0", 0), ("r2-0", 1)):
        reserved = await mesh.reserve(handoff=handoff)
        assert isinstance(reserved, Reserved)
        assert reserved.grant.dp_rank == dp_rank


def test_deadlines_are_kept_beside_an_engine_that_does_not_answer() -> None:
    """A handoff on the other replica ends at its deadline and grace; the stuck one ends as soon as its engine answers again."""

    async def scenario(mesh: Mesh) -> None:
        await _one_in_each_replica(mesh)
        stuck, other = mesh.services["decode-0"].replicas
        async with stuck.loop.lock:  # a command is under way, and its answer does not come
            await mesh.clock.sleep(60 + 5 + 3)
            assert (len(stuck.pool.held), len(other.pool.held)) == (1, 0)
        await mesh.clock.sleep(1)
        mesh.assert_empty()

    in_mesh(scenario)


def test_quarantine_ends_beside_an_engine_that_does_not_answer() -> None:
    """Memory of the other replica comes back when its writers have stopped, however long the stuck engine is silent."""

    async def scenario(mesh: Mesh) -> None:
        await _one_in_each_replica(mesh)
        stuck, other = mesh.services["decode-0"].replicas
        for replica, handoff in ((stuck, "r1-0"), (other, "r2-0")):
            assert isinstance(replica.engine, FaultyEngine)
            replica.engine.writers_left = 1
            await mesh.release("decode", "decode-0", handoff)
        async with stuck.loop.lock:
            await mesh.clock.sleep(5)
            assert (stuck.pool.num_quarantined_slots, other.pool.num_quarantined_slots) == (1, 0)
        await mesh.clock.sleep(2)
        mesh.assert_empty()

    in_mesh(scenario)
