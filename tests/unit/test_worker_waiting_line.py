"""The line of reservations that wait for memory, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from common.engine.fake.engine import FakeEngine
from common.runtime.clock import Deadline
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.core.blocks import MemoryNeed
from common.worker.core.scheduler import StepLimits
from common.worker.engines import start_engines
from common.worker.replica_set import ReplicaSet
from common.worker.waiting_line import Placed, WaitingLine
from tests.integration.worker_world import Mute

BLOCK = 16


class Line:
    """A line before two replicas of four blocks, and what those who waited got."""

    def __init__(self, replicas: ReplicaSet, clock: VirtualClock, group: asyncio.TaskGroup) -> None:
        self.replicas = replicas
        self.clock = clock
        self.group = group
        self.line: WaitingLine = replicas.line
        self.got: dict[str, Placed | None] = {}

    def ask(self, name: str, num_blocks: int, seconds: float = 10.0) -> asyncio.Task[None]:
        """Let somebody wait."""

        async def wait() -> None:
            need = MemoryNeed(num_tokens=num_blocks * BLOCK, limit_tokens=num_blocks * BLOCK)
            self.got[name] = await self.line.wait(name, need, Deadline.after(self.clock, seconds))

        return self.group.create_task(wait(), name=name)

    def give_back(self, name: str) -> None:
        """Return what somebody got."""
        placed = self.got[name]
        assert placed is not None
        replica, memory = placed
        replica.pool.release(memory)
        self.line.serve()

    async def soon(self) -> list[str]:
        """Let everything run that can; who has memory."""
        await self.clock.sleep(0.001)
        return [name for name, placed in self.got.items() if placed is not None]


def in_line(scenario: Callable[[Line], Awaitable[None]]) -> None:
    """Run a scenario in virtual time."""

    async def main(clock: VirtualClock) -> None:
        engines = [
            FakeEngine(clock, worker_id="w", incarnation="i", dp_rank=dp_rank, dp=2, num_blocks=4, num_slots=4)
            for dp_rank in range(2)
        ]
        limits = StepLimits(max_step_tokens=16, prefill_chunk_tokens=16)
        replicas = ReplicaSet(await start_engines(engines), limits, Mute(), release_timeout_ms=100)
        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            await scenario(Line(replicas, clock, group))
        replicas.check_integrity()
        assert len(replicas.line) == 0

    run_virtual(main)


def test_who_finds_room_does_not_wait_and_who_does_not_is_served_in_order() -> None:
    """Memory that comes back goes to the first in line; one that would fit now waits behind one that does not."""

    async def scenario(line: Line) -> None:
        for name, num_blocks in (("a", 4), ("b", 3), ("large", 4), ("small", 1), ("c", 4)):
            line.ask(name, num_blocks)
        assert await line.soon() == ["a", "b"]
        assert line.replicas.load.num_waiting == 3
        line.give_back("a")
        assert await line.soon() == ["a", "b", "large", "small"]
        line.give_back("b")
        assert "c" not in await line.soon()
        line.give_back("large")
        assert "c" in await line.soon()

    in_line(scenario)


def test_a_wait_ends_at_its_deadline_and_lets_those_behind_in() -> None:
    """Who gives up got nothing, takes nothing, and no longer holds up a smaller one."""

    async def scenario(line: Line) -> None:
        line.ask("a", 4)
        line.ask("b", 3)
        line.ask("large", 2, seconds=1.0)
        line.ask("small", 1)
        assert await line.soon() == ["a", "b"]
        await line.clock.sleep(1.0)
        assert await line.soon() == ["a", "b", "small"]
        assert line.got["large"] is None

    in_line(scenario)


def test_no_time_is_no_wait() -> None:
    """With a deadline that has passed, the answer is what can be had now."""

    async def scenario(line: Line) -> None:
        for name in ("a", "b", "c"):
            line.ask(name, 4, seconds=0.0)
        assert await line.soon() == ["a", "b"]
        assert line.got["c"] is None

    in_line(scenario)


@pytest.mark.parametrize("how", ["drop", "close", "cancel"])
def test_a_wait_that_is_ended_from_outside_takes_nothing(how: str) -> None:
    """Dropped, closed or cancelled: the line goes on with the others, or is empty, and no memory is lost."""

    async def scenario(line: Line) -> None:
        line.ask("a", 4)
        line.ask("b", 3)
        waiting = line.ask("first", 2)
        line.ask("second", 1)
        await line.soon()
        match how:
            case "drop":
                line.line.drop("first")
                line.line.drop("first")
            case "close":
                line.line.close()
                line.ask("third", 4)
            case _:
                waiting.cancel()
        assert await line.soon() == (["a", "b"] if how == "close" else ["a", "b", "second"])
        assert line.got.get("first") is None
        assert line.got.get("third") is None
        for name in line.got:
            if line.got[name] is not None:
                line.give_back(name)
        assert line.replicas.load.num_free_blocks == 8

    in_line(scenario)


def test_memory_that_comes_in_the_moment_of_giving_up_is_not_lost() -> None:
    """The turn has come while the deadline's cancellation is already on its way: the memory is handed over all the same."""

    async def scenario(line: Line) -> None:
        line.ask("a", 4)
        line.ask("b", 4)
        await line.soon()
        # The loop runs both timers before the task that waits: first the memory comes, then the deadline cancels it.
        asyncio.get_running_loop().call_later(1.0, line.give_back, "a")
        line.ask("late", 4, seconds=1.0)
        await line.clock.sleep(2.0)
        assert line.got["late"] is not None
        assert sum(len(replica.pool.held) for replica in line.replicas) == 2

    in_line(scenario)
