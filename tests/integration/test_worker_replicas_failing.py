"""Workers of several replicas of which one fails: a step costs its replica's requests, an engine's death the worker."""

from __future__ import annotations

import asyncio

import pytest

from common.engine.fake.engine import FakeEngine
from common.engine.port import EngineDeadError, StepResult
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts.errors import ErrorCode
from contracts.handoff import RequestEnded
from contracts.rank import RankProgress, StepPlan
from tests.integration.worker_world import EXPECTED, FaultyEngine, Mesh, in_mesh, pair

A, B = "ra-0", "rb-0"


def test_a_step_that_fails_ends_the_requests_of_its_replica_alone() -> None:
    """The other replica's request ends with its tokens."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, dp=2)
        for handoff in (A, B):
            await mesh.reserve(handoff=handoff)
        engine = mesh.services["decode-0"].replicas[1].engine
        assert isinstance(engine, FaultyEngine)
        engine.failing_steps = 1
        for handoff in (B, A):
            await mesh.commit(EXPECTED[0], handoff)
        ended: dict[str, RequestEnded] = {}
        while len(ended) < 2:
            message = await mesh.heard.get()
            if isinstance(message, RequestEnded):
                ended[message.handoff_id] = message
        assert ended[A].error is None
        assert ended[A].num_tokens == len(EXPECTED)
        error = ended[B].error
        assert error is not None
        assert error.code is ErrorCode.WORKER_FAILED
        mesh.assert_empty()

    in_mesh(scenario)


class DyingEngine(FakeEngine):
    """An engine whose rank dies in its first step."""

    async def step(self, plan: StepPlan) -> StepResult:
        """Find the rank gone."""
        raise EngineDeadError("rank 1 ended")


def test_one_engine_that_dies_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker does not go on with fewer replicas than it has announced: its process ends, and its next start is a new one."""

    async def main(clock: VirtualClock) -> None:
        async with asyncio.timeout(300), asyncio.TaskGroup() as group:
            mesh = Mesh(group, clock)
            await mesh.open()
            await pair(mesh, dp=2)
            for handoff in (A, B):
                await mesh.reserve(handoff=handoff)
            engine = mesh.services["decode-0"].replicas[1].engine
            monkeypatch.setattr(engine, "step", DyingEngine.step.__get__(engine))
            await mesh.commit(EXPECTED[0], B)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main)
    assert [type(error) for error in caught.value.exceptions] == [EngineDeadError]


def test_an_engine_that_dies_while_nothing_is_asked_of_it_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missed at once, not by the first request that is given to it."""

    async def main(clock: VirtualClock) -> None:
        async with asyncio.timeout(300), asyncio.TaskGroup() as group:
            mesh = Mesh(group, clock)
            dead = asyncio.Event()

            async def next_progress(_engine: FakeEngine) -> RankProgress:
                await dead.wait()
                raise EngineDeadError("rank 1 ended")

            monkeypatch.setattr(FakeEngine, "next_progress", next_progress)
            await mesh.open()
            await pair(mesh, dp=2)
            await clock.sleep(60.0)
            dead.set()
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup, match="TaskGroup") as caught:
        run_virtual(main)
    assert {type(error) for error in caught.value.exceptions} == {EngineDeadError}
