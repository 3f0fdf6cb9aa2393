"""What every bus adapter owes its users, 3: event streams."""

import pytest

from common.bus.errors import (
    StorageRefused,
)
from common.bus.port import StreamConfig
from common.runtime.clock import SystemClock
from tests.contract.bus_world import PATIENCE_S, World, soon, unique


async def test_events_are_stored_once_in_order_and_read_by_subject(world: World) -> None:
    """A repeat with the same id is stored once; readers get what matches, then the end."""
    root, name = unique("ev"), unique("EVENTS")
    async with world.open() as bus:
        await bus.ensure_stream(StreamConfig(name=name, subjects=(f"{root}.>",)))
        assert [stored async for stored in bus.read_stream(name)] == []
        for number in range(200):
            subject = f"{root}.router.h{number % 2}.step"
            for _ in range(2):
                assert bus.publish_event(
                    subject, str(number).encode(), message_id=str(number), headers={"pd-type": "e"}
                )
        assert await bus.flush_events(PATIENCE_S)
        everything = [stored async for stored in bus.read_stream(name)]
        assert [stored.data for stored in everything] == [str(number).encode() for number in range(200)]
        assert [stored.sequence for stored in everything] == sorted(stored.sequence for stored in everything)
        assert everything[0].headers["pd-type"] == "e"
        assert abs(everything[0].time - SystemClock().wall_time()) < 3600
        odd = [stored.data async for stored in bus.read_stream(name, f"{root}.*.h1.>")]
        assert odd == [str(number).encode() for number in range(1, 200, 2)]
        assert [stored async for stored in bus.read_stream(name, f"{root}.none.>")] == []
        assert bus.events_dropped == 0


async def test_events_reach_those_who_listen_now(world: World) -> None:
    """An event is also an ordinary message."""
    root, name = unique("ev"), unique("EVENTS")
    async with world.open() as bus:
        await bus.ensure_stream(StreamConfig(name=name, subjects=(f"{root}.>",)))
        subscription = await bus.subscribe(f"{root}.>")
        bus.publish_event(f"{root}.a", b"1", message_id="1")
        assert (await soon(anext(subscription))).data == b"1"


async def test_an_event_that_the_stream_refuses_is_counted(world: World) -> None:
    """Too large for the stream: dropped, counted, and the next one is stored."""
    root, name = unique("ev"), unique("EVENTS")
    async with world.open() as bus:
        await bus.ensure_stream(StreamConfig(name=name, subjects=(f"{root}.>",), max_message_bytes=1024))
        bus.publish_event(f"{root}.a", bytes(2048), message_id="1")
        bus.publish_event(f"{root}.a", b"small", message_id="2")
        assert await bus.flush_events(PATIENCE_S)
        assert [stored.data async for stored in bus.read_stream(name)] == [b"small"]
        assert bus.events_dropped == 1


async def test_reading_a_stream_that_does_not_exist_is_refused(world: World) -> None:
    """An error, not an empty answer."""
    async with world.open() as bus:
        with pytest.raises(StorageRefused):
            await anext(aiter(bus.read_stream("NOWHERE")))
