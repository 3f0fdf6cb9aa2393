"""The engine loop makes room: what may happen while it waits for a release, and when the ranks refuse a growth."""

from __future__ import annotations

import pytest

from common.worker.core.sequence import SequenceState
from tests.unit.engine_loop_world import World, in_world


def test_those_who_are_short_come_before_those_who_wait() -> None:
    """When it is said that memory is back, the older one has grown already."""

    async def scenario(world: World) -> None:
        await world.advance_until_short()
        world.heard.clear()
        assert await world.loop.advance()
        assert world.heard == [("released", 3), ("preempted", 2)]
        assert (world.younger.state, world.scheduler.num_waiting) == (SequenceState.WAITING, 1)

    in_world(scenario)


@pytest.mark.parametrize("writers_left", [0, 2])
def test_who_is_stopped_while_its_memory_is_taken_is_not_computed_again(writers_left: int) -> None:
    """Neither at once nor when its memory has left quarantine."""

    async def scenario(world: World) -> None:
        await world.advance_until_short()
        world.engine.writers_left = writers_left
        world.engine.meanwhile = lambda: world.scheduler.hold(world.younger)
        await world.loop.advance()
        world.engine.meanwhile = None
        for _ in range(3):
            await world.loop.retry_quarantine()
        assert (world.younger.state, world.younger.memory) == (SequenceState.HELD, None)
        assert world.scheduler.num_waiting == 0
        await world.loop.release(world.younger)
        assert world.pool.num_quarantined_blocks == 0

    in_world(scenario)


def test_who_gave_way_into_quarantine_waits_for_its_end() -> None:
    """The ranks know its number until then; whoever is stopped meanwhile does not come back either."""

    async def scenario(world: World) -> None:
        await world.advance_until_short()
        world.engine.writers_left = 2
        await world.loop.advance()
        assert (world.scheduler.num_waiting, world.pool.num_quarantined_blocks) == (0, 2)
        await world.loop.retry_quarantine()
        assert world.scheduler.num_waiting == 0
        assert [world.loop.has_quarantined(each) for each in ("h1", "h2")] == [False, True]
        assert world.quarantines == [("began", "h2", 1)]
        await world.loop.retry_quarantine()
        assert (world.scheduler.num_waiting, world.pool.num_quarantined_blocks) == (1, 0)
        assert not world.loop.has_quarantined("h2")
        assert world.quarantines == [("began", "h2", 1), ("ended", "h2", 1)]
        while world.older.num_generated_tokens < 12:
            await world.loop.advance()
        await world.loop.release(world.older)
        await world.loop.advance()
        assert world.heard[-1] == ("bound", 2)

    in_world(scenario)


def test_a_growth_that_the_ranks_refuse_fails_who_was_to_grow_and_loses_nothing() -> None:
    """Their memory comes back with their release, the added blocks with it."""

    async def scenario(world: World) -> None:
        await world.advance_until_short()
        world.engine.refuses = True
        assert not await world.loop.advance()
        assert world.heard[-2:] == [("rank 0: no", 1), ("rank 0: no", 2)]
        assert world.scheduler.num_running == 0
        await world.loop.release(world.younger)
        await world.loop.release(world.older)
        world.pool.check_integrity()
        assert world.pool.num_free_blocks == 6

    in_world(scenario, num_blocks=6)


def test_memory_that_the_ranks_fail_to_give_back_is_asked_for_again() -> None:
    """It is nobody's meanwhile; whoever was released or gave way has ended, or comes back, as ever."""

    async def scenario(world: World) -> None:
        await world.advance_until_short()
        world.engine.failing_releases = 3
        await world.loop.advance()  # the younger one gives way
        await world.loop.release(world.older)
        assert [told for told in world.heard if told[0] == "rank 0: cannot revoke"] == [
            ("rank 0: cannot revoke", 2),
            ("rank 0: cannot revoke", 1),
        ]
        assert world.heard[-1] == ("quarantined", 0)
        assert (world.pool.held, world.pool.num_quarantined_slots) == ((), 2)
        await world.loop.retry_quarantine()
        assert (world.pool.num_quarantined_slots, world.scheduler.num_waiting) == (1, 0)
        await world.loop.retry_quarantine()
        assert (world.pool.num_free_blocks, world.scheduler.num_waiting) == (5, 1)
        world.pool.check_integrity()

    in_world(scenario)


def test_memory_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    """After some looks the youngest gives way, as if nothing were on its way."""

    async def scenario(world: World) -> None:
        await world.advance_until_short()
        world.engine.writers_left = 100
        await world.loop.advance()
        assert world.pool.num_quarantined_blocks == 2
        while await world.loop.advance():
            pass
        assert world.heard[-1] == ("preempted", 2), "the older one waits"
        for _ in range(4):
            await world.loop.retry_quarantine()
        world.heard.clear()
        await world.loop.advance()
        assert world.heard == [("quarantined", 0), ("preempted", 1)]

    in_world(scenario, num_blocks=5)
