"""What a broker keeps in memory: handoffs in flight, and for a while those that have ended."""

import asyncio

from common.runtime.clock import Deadline, SystemClock
from contracts.handoff import HandoffRecord, HandoffState
from contracts.requests import MixedRoute, SamplingParams, WorkerRef
from services.broker.core.events import DeadlinePassed, Event
from services.broker.core.handoff import Handoff, Policy
from services.broker.live import Live, LiveHandoffs


def live(handoff_id: str) -> Live:
    """A handoff that nothing happens to."""
    record = HandoffRecord(
        handoff_id=handoff_id,
        request_id=handoff_id,
        attempt=0,
        router_id="router-0",
        route=MixedRoute(mixed=WorkerRef(worker_id="mixed-0", incarnation="i")),
        state=HandoffState.DECODING,
        fence=1,
        num_prompt_tokens=1,
        prompt_hash="h",
        sampling=SamplingParams(max_tokens=1, seed=1),
        deadline_at="2030-01-01T00:00:00+00:00",
    )
    handoff = Handoff(policy=Policy(), record=record, deadline_ns=0, begun_ns=0)
    return Live(_ignore, handoff, Deadline.after(SystemClock(), 60), None)


def _ignore(_live: Live, _event: Event) -> None:
    """Nobody feeds it."""


def remembered(handoffs: LiveHandoffs, candidates: str) -> str:
    """Which of these ids are remembered."""
    return "".join(each for each in candidates if handoffs.get(each) is not None)


def in_flight(handoffs: LiveHandoffs) -> str:
    """The ids of those in flight, in order."""
    return "".join(each.handoff.handoff_id for each in handoffs)


async def test_an_ended_handoff_is_remembered_for_a_while() -> None:
    """It is not in flight any more, but routers may still ask for it; then it is forgotten."""
    handoffs = LiveHandoffs(keep_ended_s=10, max_ended=5)
    first, second = live("a"), live("b")
    handoffs.add(first)
    handoffs.add(second)
    handoffs.ended(first, 100.0)
    handoffs.expire(109.9)
    assert (handoffs.num_in_flight, in_flight(handoffs), remembered(handoffs, "ab")) == (1, "b", "ab")
    handoffs.expire(110.0)
    assert (handoffs.num_in_flight, in_flight(handoffs), remembered(handoffs, "ab")) == (1, "b", "b")
    assert handoffs.get("a") is None
    assert handoffs.get("b") is second


async def test_of_too_many_that_ended_the_oldest_go() -> None:
    """Whatever their age; those in flight stay, however many they are."""
    handoffs = LiveHandoffs(keep_ended_s=1000, max_ended=2)
    for number in range(6):
        each = live(str(number))
        handoffs.add(each)
        if number < 4:
            handoffs.ended(each, float(number))
    handoffs.expire(4.0)
    assert remembered(handoffs, "012345") == "2345"
    assert in_flight(handoffs) == "45"


async def test_the_end_of_those_in_flight_is_waited_for() -> None:
    """Neither those that are merely remembered nor those that come meanwhile hold up a drain, in whatever order they end."""
    handoffs = LiveHandoffs(keep_ended_s=1000, max_ended=2)
    async with asyncio.timeout(5):
        await handoffs.wait_ended()
        first, second = live("a"), live("b")
        handoffs.add(first)
        handoffs.add(second)
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(handoffs.wait_ended(), name=f"waiting-{number}") for number in range(2)]
            await asyncio.sleep(0)
            handoffs.add(live("c"))
            handoffs.ended(second, 1.0)
            await asyncio.sleep(0)
            assert not any(each.done() for each in waiting)
            handoffs.ended(first, 1.0)
        assert in_flight(handoffs) == "c"


async def test_handoffs_may_come_while_all_are_told_something() -> None:
    """The walk is over those of its beginning."""
    handoffs = LiveHandoffs(keep_ended_s=1, max_ended=1)
    handoffs.add(live("a"))
    for each in handoffs:
        each.tell(DeadlinePassed(at_ns=0))
        handoffs.add(live("b"))
    assert in_flight(handoffs) == "ab"
