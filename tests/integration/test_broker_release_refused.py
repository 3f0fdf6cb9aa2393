"""A worker whose engine is lost cannot release: that is said as it is, and the handoff ends."""

from typing import Any

import msgspec
import structlog

from common.bus.memory import MemoryServer
from contracts.errors import ErrorCode
from contracts.events import EventName
from contracts.handoff import Released
from services.launcher.core.handoff_view import render_handoff
from tests.integration.broker_world import HANDOFF, World, in_world
from tests.integration.handoff_stages import OK, forgotten, prefilling
from tests.integration.scripted_worker import refusing


def test_a_refused_release_is_told_with_the_workers_reason() -> None:
    """The log names the worker's own error, and nothing waits for an answer that will not come."""

    async def scenario(world: World, _: MemoryServer) -> None:
        world.decode.scripts["release"] = refusing(ErrorCode.WORKER_LOST)
        with structlog.testing.capture_logs() as lines:
            await prefilling(world)
            assert await world.cancel() == OK
            await forgotten(world)
        (line,) = [line for line in lines if line["event"] == "release_unheard"]
        assert (line["error_code"], line["worker_id"]) == ("worker_lost", world.decode.ref.worker_id)

    in_world(scenario)


def test_people_are_shown_that_a_release_was_not_heard_or_left_memory_in_quarantine() -> None:
    """`show` says neither of decode, which does not answer, nor of prefill, whose memory is not free, that it has given all back."""

    async def scenario(world: World, _: MemoryServer) -> None:
        world.decode.scripts["release"] = refusing(ErrorCode.WORKER_LOST)
        world.prefill.scripts["release"] = lambda message: Released(handoff_id=message.handoff_id, quarantined=True)
        await prefilling(world)
        assert await world.cancel() == OK
        await forgotten(world)
        view = await world.broker.show(HANDOFF)
        assert (view.settled, view.quarantined, view.unheard) == (("prefill",), ("prefill",), ("decode",))
        lines = [line.split(":")[0].split() for line in render_handoff(view).splitlines()]
        assert ["quarantine", "prefill"] in lines
        assert ["unheard", "decode"] in lines
        assert not [line for line in lines if line[0] == "memory"]
        (event,) = [each for each in await world.events() if each.event is EventName.PREFILL_RELEASED]
        assert event.quarantined

    in_world(scenario)


def test_a_worker_that_is_too_busy_is_asked_to_release_again() -> None:
    """It has not looked at what it was asked: its memory would be held until the deadline, and its times would be lost."""

    async def scenario(world: World, _: MemoryServer) -> None:
        left, busy = [3], refusing(ErrorCode.OVERLOADED)

        def script(message: Any) -> msgspec.Struct | None:
            left[0] -= 1
            return busy(message) if left[0] else Released(handoff_id=message.handoff_id)

        world.decode.scripts["release"] = script
        with structlog.testing.capture_logs() as lines:
            await prefilling(world)
            assert await world.cancel() == OK
            await forgotten(world)
        assert left == [0]
        assert not [line for line in lines if line["event"] == "release_unheard"]

    in_world(scenario)
