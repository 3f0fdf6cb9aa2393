"""Clocks, deadlines and the loop of virtual time."""

import asyncio
from itertools import pairwise

import pytest

from common.runtime.clock import Clock, Deadline, SystemClock
from common.runtime.virtual_time import Deadlock, VirtualClock, run_virtual

YEAR = 365 * 24 * 3600.0


def test_the_system_clock_agrees_with_the_loop_and_never_goes_back() -> None:
    """Seconds, nanoseconds and the event loop read the same clock."""

    async def main() -> None:
        clock: Clock = SystemClock()
        loop = asyncio.get_running_loop()
        readings = [clock.monotonic(), loop.time(), clock.monotonic_ns() / 1e9, loop.time()]
        assert all(earlier <= later + 1e-6 for earlier, later in pairwise(readings))
        await clock.sleep(0)
        assert clock.wall_time() > 1_600_000_000

    asyncio.run(main())


def test_a_deadline_counts_down_and_stays_at_zero() -> None:
    """Remaining time is never negative, milliseconds round down, and the earlier of two wins."""

    async def main(clock: VirtualClock) -> None:
        deadline = Deadline.from_remaining_ms(clock, 1500)
        assert (deadline.at, deadline.remaining_ms, deadline.passed) == (1.5, 1500, False)
        await clock.sleep(0.9999)
        assert deadline.remaining_ms == 500
        assert deadline.capped(0.25).remaining_ms == 250
        assert deadline.capped(9.0) is deadline
        await clock.sleep(1.0)
        assert (deadline.remaining, deadline.remaining_ms, deadline.passed) == (0.0, 0, True)

    run_virtual(main)


def test_a_deadline_bounds_an_await() -> None:
    """`timeout()` raises TimeoutError at the deadline; one that has passed fires at the first await."""

    async def main(clock: VirtualClock) -> list[float]:
        ends = []
        deadline = Deadline.after(clock, 2.0)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with deadline.timeout():
                    await asyncio.Event().wait()
            ends.append(clock.monotonic())
        return ends

    assert run_virtual(main) == pytest.approx([2.0, 2.0], abs=1e-5)


def test_a_year_of_waiting_takes_no_time_and_keeps_its_order() -> None:
    """Tasks, groups and timeouts run in the order of virtual time, also when that is large."""

    async def main(clock: VirtualClock) -> list[str]:
        trace: list[str] = []

        async def note(name: str, seconds: float) -> None:
            await clock.sleep(seconds)
            trace.append(name)

        async with asyncio.TaskGroup() as group:
            for name, seconds in (("c", 30 * YEAR), ("a", 1.0), ("b", 30 * YEAR - 1)):
                group.create_task(note(name, seconds), name=name)
        assert clock.monotonic() >= 30 * YEAR
        assert clock.wall_time() - 1_700_000_000 == clock.monotonic()
        assert clock.monotonic_ns() == pytest.approx(30 * YEAR * 1e9)
        return trace

    assert run_virtual(main) == ["a", "b", "c"]


def test_waiting_for_ever_is_a_deadlock() -> None:
    """A program that can never go on ends with an error, not in silence."""

    async def main(clock: VirtualClock) -> None:
        await clock.sleep(1.0)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(main)


def test_threads_are_refused_in_virtual_time() -> None:
    """An executor would make a run depend on the machine."""

    async def main(clock: VirtualClock) -> None:
        await asyncio.to_thread(clock.monotonic)

    with pytest.raises(RuntimeError, match="no threads"):
        run_virtual(main)


def test_sleeping_for_next_to_nothing_gets_somewhere() -> None:
    """However short the sleeps of a circle are, time moves on, and others get their turn."""

    async def main(clock: VirtualClock) -> float:
        await clock.sleep(YEAR)
        began = clock.monotonic()
        for _ in range(1000):
            await clock.sleep(1e-12)
        return clock.monotonic() - began

    assert 0 < run_virtual(main) < 1e-4


def test_timers_of_one_moment_go_off_in_the_order_in_which_they_were_set() -> None:
    """Ties are decided by nothing but the order: a run can be repeated."""

    async def main(clock: VirtualClock) -> list[int]:
        seen: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_at(1.0, seen.append, number)
        await clock.sleep(2.0)
        return seen

    assert run_virtual(main) == list(range(50))
