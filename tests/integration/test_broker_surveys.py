"""What a worker holds for nobody is found by asking it, and taken back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.bus.memory import MemoryServer
from contracts.codec import encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import (
    HandoffList,
    HandoffState,
    ListHandoffs,
    ReleaseHandoff,
    RunPrefill,
)
from contracts.requests import Accepted, Refused
from contracts.subjects import WorkerVerb
from tests.integration.broker_world import HANDOFF, PREFILL, World, in_world, left_by_another, next_broker

OK = Accepted(handoff_id=HANDOFF)


def test_what_a_worker_holds_for_nobody_is_taken_back() -> None:
    """A handoff without a record, and one that is over: released by name; what is in flight is left alone."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await world.stop_broker()
        bucket = await world.bus.ensure_bucket(world.broker._records._config)
        over = left_by_another(world, handoff_id="r7-0", request_id="r7")
        over = msgspec.structs.replace(over, state=HandoffState.FINISHED, num_tokens=12)
        for record in (over, left_by_another(world)):
            await bucket.create(record.handoff_id, encode(record))
        world.prefill.scripts[WorkerVerb.HANDOFFS] = lambda _message: HandoffList(
            incarnation=PREFILL.incarnation, handoff_ids=("r7-0", "r8-0", HANDOFF)
        )
        await next_broker(world)
        await world.until(lambda: len(world.prefill.of(ReleaseHandoff)) >= 2)
        await world.clock.sleep(1.0)
        told = {message.handoff_id: message for message in world.prefill.of(ReleaseHandoff)}
        assert set(told) == {"r7-0", "r8-0"}
        assert told["r7-0"].reason == "it is finished"
        assert told["r8-0"].reason == "no broker knows of it"
        assert all(message.tombstone_ms >= 5_000 for message in told.values())
        assert not world.decode.of(ReleaseHandoff)
        assert b"pdmesh_broker_orphans_released_total 2.0" in world.metrics.exposition()

    in_world(scenario)


@pytest.mark.parametrize("why", ["cut off", "not heard"])
def test_a_worker_that_did_not_hear_its_release_is_asked_what_it_holds(why: str) -> None:
    """One that was cut off is taken for gone, and comes back as the same start with all that it held; or the release is lost."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        held: list[str] = []
        world.prefill.scripts[WorkerVerb.HANDOFFS] = lambda _message: HandoffList(
            incarnation=PREFILL.incarnation, handoff_ids=tuple(held)
        )
        release = world.prefill.scripts.pop(WorkerVerb.RELEASE)
        world.prefill.scripts[WorkerVerb.RELEASE] = lambda _message: None
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        held.append(HANDOFF)
        alive = world.prefill.scripts["alive"]
        if why == "cut off":
            del world.prefill.scripts["alive"]
        else:
            assert await world.cancel() == OK
        await world.until(lambda: world.broker.num_in_flight == 0)
        assert (await world.record()).state is (HandoffState.FAILED if why == "cut off" else HandoffState.CANCELLED)
        world.prefill.scripts |= {"alive": alive, WorkerVerb.RELEASE: release}
        world.prefill.heard.clear()
        await world.until(lambda: bool(world.prefill.of(ReleaseHandoff)))
        held.clear()
        (told,) = world.prefill.of(ReleaseHandoff)
        assert (told.handoff_id, told.reason) == (HANDOFF, "its release was not heard")
        assert told.tombstone_ms >= 5_000
        await world.clock.sleep(20.0)
        assert (len(world.prefill.of(ListHandoffs)), len(world.prefill.of(ReleaseHandoff))) == (1, 1)

    in_world(scenario, release_timeout_s=5.0)


def test_a_worker_that_refuses_to_say_what_it_holds_is_asked_again() -> None:
    """It may have asked a server that had not heard of the new term yet."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await world.stop_broker()
        refusals = [ErrorCode.STALE_FENCE, ErrorCode.INTERNAL]

        def listed(_message: Any) -> msgspec.Struct:
            if refusals:
                return Refused(handoff_id="unknown", error=ErrorInfo(code=refusals.pop(), message="no"))
            return HandoffList(incarnation=PREFILL.incarnation, handoff_ids=("r8-0",))

        world.prefill.scripts[WorkerVerb.HANDOFFS] = listed
        await next_broker(world)
        await world.until(lambda: bool(world.prefill.of(ReleaseHandoff)))
        assert len(world.prefill.of(ListHandoffs)) == 3

    in_world(scenario)


def test_each_start_of_a_worker_is_asked_once() -> None:
    """Signs of life go on for ever; the question is one of the term's beginning, or of the worker's."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await world.clock.sleep(20.0)
        assert len(world.prefill.of(ListHandoffs)) == 1
        world.prefill.ref = msgspec.structs.replace(world.prefill.ref, incarnation="ip2")
        await world.clock.sleep(20.0)
        assert len(world.prefill.of(ListHandoffs)) == 2

    in_world(scenario)
