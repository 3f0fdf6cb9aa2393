"""A sequence whose logits are not finite ends with an error of its own; who shared its step goes on."""

from __future__ import annotations

from tests.unit.engine_loop_world import World, in_world


def test_bad_logits_fail_their_own_sequence_alone() -> None:
    """It is taken out before the step is told of, its neighbour gets its token, and its memory comes back with its release."""

    async def scenario(world: World) -> None:
        for _ in range(3):
            await world.loop.advance()
        told = world.younger.num_generated_tokens
        world.engine.bad_logits = frozenset({2})
        world.heard.clear()
        await world.loop.advance()
        assert [seq for _, seq in world.heard] == [2]
        assert "not finite" in world.heard[0][0]
        assert [produced.seq for produced in world.produced] == [1]
        assert (world.younger.num_generated_tokens, world.scheduler.num_running) == (told, 1)
        await world.loop.advance()
        assert [produced.seq for produced in world.produced] == [1]
        await world.loop.release(world.younger)
        while world.older.num_generated_tokens < 12:
            await world.loop.advance()
        await world.loop.release(world.older)
        world.pool.check_integrity()
        assert world.pool.num_free_blocks == 20

    in_world(scenario, num_blocks=20)
