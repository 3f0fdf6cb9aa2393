"""Calls that are asked for again while they are under way."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.shared_calls import SharedCalls
from contracts.errors import ErrorCode, PdmeshError


class Desk:
    """Calls that take a second each, and are counted."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.calls: SharedCalls[int] = SharedCalls()
        self.num_made = 0

    async def make(self) -> int:
        """Take a second."""
        self.num_made += 1
        await self.clock.sleep(1.0)
        return self.num_made

    async def refuse(self) -> int:
        """Take a second, and say no."""
        await self.make()
        raise PdmeshError("no", code=ErrorCode.OVERLOADED)


def test_whoever_asks_meanwhile_gets_the_outcome_of_the_first() -> None:
    """Others of another key are made beside it; the next of the same key is a call of its own again."""

    async def main(clock: VirtualClock) -> None:
        desk = Desk(clock)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(desk.calls.join(key, desk.make)) for key in ("a", "a", "b", "a")]
            await clock.sleep(0.5)
            assert (desk.calls.keys, len(desk.calls), "a" in desk.calls) == (frozenset({"a", "b"}), 2, True)
        assert ([task.result() for task in asked], len(desk.calls)) == ([2, 2, 2, 2], 0)
        assert await desk.calls.join("a", desk.make) == 3

    run_virtual(main)


def test_an_error_is_everybodys() -> None:
    """And it is not remembered."""

    async def main(clock: VirtualClock) -> None:
        desk = Desk(clock)

        async def ask() -> ErrorCode:
            with pytest.raises(PdmeshError) as caught:
                await desk.calls.join("a", desk.refuse)
            return caught.value.code

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask()) for _ in range(2)]
        assert [task.result() for task in asked] == [ErrorCode.OVERLOADED] * 2
        assert await desk.calls.join("a", desk.make) == 2

    run_virtual(main)


@pytest.mark.parametrize("who", [0, 1])
def test_who_only_waits_may_go_and_who_makes_it_takes_the_others_along(who: int) -> None:
    """A call is never made twice because somebody was cancelled."""

    async def main(clock: VirtualClock) -> None:
        desk = Desk(clock)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(desk.calls.join("a", desk.make)) for _ in range(3)]
            await clock.sleep(0.5)
            asked[who].cancel()
        assert [task.cancelled() for task in asked] == ([True] * 3 if who == 0 else [False, True, False])
        assert (desk.num_made, len(desk.calls)) == (1, 0)

    run_virtual(main)


def test_one_that_takes_no_time_is_over_at_once() -> None:
    """Nothing comes in between."""

    async def main(_clock: VirtualClock) -> None:
        calls: SharedCalls[str] = SharedCalls()

        async def say(text: str) -> str:
            return text

        assert [await calls.join("a", partial(say, text)) for text in ("x", "y")] == ["x", "y"]

    run_virtual(main)
