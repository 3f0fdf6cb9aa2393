"""Records that nobody goes on with: what a leader that stood still wrote too late, and what arrived after it was given up."""

from __future__ import annotations

from typing import Any, Final

from common.bus.errors import BusTimeout
from common.bus.memory import MemoryServer
from common.bus.port import Bucket
from contracts.codec import decode, encode
from contracts.errors import ErrorCode
from contracts.handoff import HandoffRecord, HandoffState, ReleaseHandoff, RunPrefill
from contracts.requests import Accepted, Refused
from services.broker.core.deadline_text import write_deadline
from services.broker.core.messages import first_record
from services.broker.settings import BrokerSettings
from tests.integration.broker_world import HANDOFF, World, in_world

PAUSE_S: Final = BrokerSettings().keep_ended_s + 30.0
LONG_MS: Final = 600_000


def written(world: World, handoff_id: str, fence: int) -> HandoffRecord:
    """The first record of a handoff, as the broker of that term writes it."""
    submit = world.submit_request(handoff_id=handoff_id, request_id=handoff_id[:-2], timeout_ms=LONG_MS)
    return first_record(submit, fence=fence, deadline_at=write_deadline(world.clock.wall_time() + LONG_MS / 1e3))


async def handoffs(world: World) -> Bucket:
    """The bucket of records."""
    return await world.bus.ensure_bucket(world.broker._records._config)


async def state(world: World, handoff_id: str) -> HandoffState:
    """What the bucket says."""
    entry = await (await handoffs(world)).get(handoff_id)
    assert entry is not None
    return decode(entry.value, HandoffRecord).state


def released(world: World) -> set[str]:
    """Which handoffs decode was told to let go of."""
    return {message.handoff_id for message in world.decode.of(ReleaseHandoff)}


def test_what_a_leader_that_stood_still_wrote_too_late_is_ended_by_the_next_one() -> None:
    """Its workers let go, too. What this broker goes on with, and what a later one has written, is left alone."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await (await handoffs(world)).create("before-0", encode(written(world, "before-0", 0)))
        await world.stop_broker()
        await world.start_broker()
        assert await world.submit(timeout_ms=LONG_MS) == Accepted(handoff_id=HANDOFF)
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        for handoff_id, fence in (("late-0", 0), ("later-0", 9)):
            await (await handoffs(world)).create(handoff_id, encode(written(world, handoff_id, fence)))
        await world.clock.sleep(PAUSE_S - 1.0)
        assert await state(world, "late-0") is HandoffState.RESERVING
        await world.clock.sleep(2.0)
        assert await state(world, "late-0") is HandoffState.CANCELLED
        assert "late-0" in released(world)
        assert await state(world, HANDOFF) is HandoffState.PREFILLING
        assert await state(world, "later-0") is HandoffState.RESERVING
        assert not released(world) & {HANDOFF, "later-0"}

    in_world(scenario)


def test_a_record_that_arrives_after_its_handoff_was_given_up_is_ended() -> None:
    """The bucket did not answer the write in all of its time, and took it all the same."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        bus: Any = world.broker_bus
        ask_store = bus.ask_store

        async def unanswered(_subject: str, _act: Any) -> None:
            raise BusTimeout("no answer from the store")

        bus.ask_store = unanswered
        answer = await world.submit(timeout_ms=LONG_MS)
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.BUS_UNAVAILABLE
        bus.ask_store = ask_store
        await (await handoffs(world)).create(HANDOFF, encode(written(world, HANDOFF, 1)))
        await world.clock.sleep(PAUSE_S + 1.0)
        assert await state(world, HANDOFF) is HandoffState.CANCELLED

    in_world(scenario)


def test_without_a_reason_nobody_looks_again() -> None:
    """A look reads every record: a term has one, and where nothing went wrong no other."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        bucket = await handoffs(world)
        for handoff_id, after in (("late-0", HandoffState.CANCELLED), ("later-0", HandoffState.RESERVING)):
            await bucket.create(handoff_id, encode(written(world, handoff_id, 0)))
            await world.clock.sleep(2 * PAUSE_S)
            assert await state(world, handoff_id) is after

    in_world(scenario)
