"""Bounded tasks: room, refusal, and what happens to failures."""

import asyncio

import pytest

from common.runtime.clock import Deadline
from common.runtime.tasks import BoundedTasks
from common.runtime.virtual_time import VirtualClock, run_virtual


def test_try_start_refuses_when_full_and_start_waits_for_room() -> None:
    """No more than `limit` run at once, refusals are counted, and a waiting start gets the next place."""

    async def main(clock: VirtualClock) -> None:
        peak = 0

        async def work() -> None:
            nonlocal peak
            peak = max(peak, pool.running)
            await clock.sleep(1.0)

        async with asyncio.TaskGroup() as group:
            pool = BoundedTasks(group, name="work", limit=2)
            assert [pool.try_start(work) for _ in range(3)] == [True, True, False]
            assert pool.refused == 1
            async with asyncio.TaskGroup() as feeders:
                for index in range(4):
                    feeders.create_task(pool.start(work), name=f"feeder-{index}")
            assert clock.monotonic() == pytest.approx(2.0, abs=1e-4)
            assert await pool.wait_idle(Deadline.after(clock, 5.0))
        assert peak == 2
        assert clock.monotonic() == pytest.approx(3.0, abs=1e-4)

    run_virtual(main)


def test_wait_idle_gives_up_at_its_deadline_and_cancel_frees_the_places() -> None:
    """A drain is bounded; what still runs can be cancelled, even before its first step."""

    async def main(clock: VirtualClock) -> None:
        async with asyncio.TaskGroup() as group:
            pool = BoundedTasks(group, name="work", limit=1)
            await pool.start(_for_ever)
            assert not await pool.wait_idle(Deadline.after(clock, 1.0))
            pool.cancel()
            assert await pool.wait_idle(Deadline.after(clock, 1.0))
            await pool.start(_for_ever)
            pool.cancel()
            await pool.start(_for_ever)
            pool.cancel()

    run_virtual(main)


async def _for_ever() -> None:
    await asyncio.Event().wait()


def test_a_failure_goes_to_on_error_or_else_fails_the_group() -> None:
    """With a handler the pool goes on; without one the failure is everybody's."""

    async def fail() -> None:
        raise ValueError("planted")

    async def handled(_clock: VirtualClock) -> list[str]:
        seen: list[str] = []
        async with asyncio.TaskGroup() as group:
            pool = BoundedTasks(
                group, name="work", limit=1, on_error=lambda name, error: seen.append(f"{name} {error}")
            )
            await pool.start(fail)
            await pool.start(fail)
        return seen

    async def unhandled(_clock: VirtualClock) -> None:
        async with asyncio.TaskGroup() as group:
            BoundedTasks(group, name="work", limit=1).try_start(fail)

    assert run_virtual(handled) == ["work planted", "work planted"]
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(unhandled)
    assert caught.group_contains(ValueError, match="planted")


def test_a_pool_without_places_is_refused() -> None:
    """The limit is 1 or more."""

    async def main(_clock: VirtualClock) -> None:
        async with asyncio.TaskGroup() as group:
            BoundedTasks(group, name="work", limit=0)

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main)
    assert caught.group_contains(ValueError, match="limit: 0")
