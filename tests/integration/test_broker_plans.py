"""What a broker keeps of pairs of workers is bounded by those that are there, whatever routers name and whoever leaves meanwhile."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from common.bus.memory import MemoryServer
from common.runtime.clock import Deadline
from contracts.errors import ErrorCode
from contracts.requests import DisaggregatedRoute, MixedRoute, Refused, WorkerRef
from contracts.subjects import WorkerVerb
from contracts.workers import DescribeWorker
from tests.integration.broker_world import DECODE, MIXED, PREFILL, World, in_world
from tests.integration.handoff_stages import OK


def test_nothing_is_kept_of_pairs_that_do_not_exist() -> None:
    """A router may name any number of workers that nobody has heard of: each submit is refused, and leaves nothing behind."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        for number in range(5):
            nobody = WorkerRef(worker_id=f"prefill-{number + 10}", incarnation="i9")
            route = DisaggregatedRoute(prefill=nobody, decode=DECODE)
            answer = await world.submit(handoff_id=f"r{number}-0", request_id=f"r{number}", route=route)
            assert isinstance(answer, Refused)
            assert answer.error.code is ErrorCode.WORKER_LOST
        assert world.broker._plans.is_empty

    in_world(scenario)


def test_what_is_found_out_of_a_worker_that_leaves_meanwhile_is_not_kept() -> None:
    """It is dropped while it describes itself: the submit has its plan, and nothing is written down after the drop."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        plans = world.broker._plans
        describe = world.prefill.scripts[WorkerVerb.DESCRIBE]

        def leave(message: DescribeWorker) -> msgspec.Struct | None:
            plans.drop(PREFILL)
            return describe(message)

        world.prefill.scripts[WorkerVerb.DESCRIBE] = leave
        assert await world.submit() == OK
        assert plans.is_empty
        world.prefill.scripts[WorkerVerb.DESCRIBE] = describe
        await plans.between(PREFILL, DECODE, Deadline.after(world.clock, 5.0))
        assert (plans.num_pairs, plans.is_empty) == (1, False)
        plans.drop(PREFILL)
        plans.drop(DECODE)
        assert plans.is_empty

    in_world(scenario)


def test_those_who_ask_for_a_pair_at_once_share_its_description() -> None:
    """Two submits of a pair that is met for the first time: each rank is asked once."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(2):
                group.create_task(world.submit(handoff_id=f"r{number}-0", request_id=f"r{number}"))
        assert [message.rank for message in world.prefill.of(DescribeWorker)] == [0, 1]
        assert world.broker._plans.num_pairs == 1

    in_world(scenario)


def test_many_who_ask_for_a_pair_that_does_not_answer_wait_no_longer_than_one() -> None:
    """A worker that is there for the bus and says nothing: its submits are refused together, not one after the other."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        world.decode.scripts[WorkerVerb.DESCRIBE] = lambda _message: None
        began = world.clock.monotonic()
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(world.submit(handoff_id=f"r{number}-0", request_id=f"r{number}"))
                for number in range(5)
            ]
        assert {task.result().error.code for task in asked} == {ErrorCode.TRANSFER_FAILED}  # type: ignore[union-attr]
        assert world.clock.monotonic() - began < 5.0
        assert world.broker._plans.num_pairs == 0

    in_world(scenario, describe_timeout_s=4.0)


@pytest.mark.parametrize("why", ["never heard", "gone before"])
def test_what_is_asked_of_a_worker_that_is_not_there_fails(why: str) -> None:
    """A mixed worker is not described: its death may lie before this broker's time, or between the router's choice and the submit."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        world.mixed.scripts[WorkerVerb.RUN] = lambda _message: None
        if why == "never heard":
            route = MixedRoute(mixed=WorkerRef(worker_id="mixed-9", incarnation="i9"))
            assert await world.submit(route=route) == OK
        else:
            await world.until(lambda: "alive" in world.mixed.scripts)
            del world.mixed.scripts["alive"]
            await world.until(lambda: world.broker.workers.is_gone(MIXED))
            answer = await world.submit(mixed=True)
            assert isinstance(answer, Refused)
            assert answer.error.code is ErrorCode.WORKER_LOST
            world.broker.workers.heard(MIXED)
            assert await world.submit(mixed=True) == OK
        frame = await world.frames.get()
        assert frame.error is not None
        assert frame.error.code is ErrorCode.WORKER_LOST

    in_world(scenario)
