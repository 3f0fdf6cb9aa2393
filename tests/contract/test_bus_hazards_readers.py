"""Hazards of watches and stream readers: the library's own go silent for ever after a restart or a freeze.

Which hazard is tested where: see the table in `test_bus_hazards.py`.
"""

import asyncio

import pytest

from common.bus import nats_connection, nats_reader
from common.bus.errors import BusUnavailable
from common.bus.port import BucketConfig, Entry, Snapshot, StreamConfig
from common.bus.server import NatsServer
from common.runtime.clock import SystemClock
from tests.contract.bus_world import (
    PATIENCE_S,
    NatsWorld,
    World,
    drain,
    open_nats,
    soon,
    told,
    told_of,
    until,
    value_of,
)

SILENCE_S = 0.8


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let silence be noticed soon."""
    monkeypatch.setattr(nats_reader, "HEARTBEAT_S", SILENCE_S / 4)
    monkeypatch.setattr(nats_reader, "_SILENCE_S", SILENCE_S)


async def test_a_watch_goes_on_after_the_server_stood_still(own_nats_server: NatsServer, impatient: None) -> None:
    """Hazard 2: the silence of a frozen server ends the pass; after the thaw it repeats, and tells every later change."""
    async with open_nats(own_nats_server.url) as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="B"))
        revision = await bucket.put("k", b"1")
        async with await bucket.watch() as watch:
            assert (await told(watch))[0] == {"k": (b"1", revision)}
            (reader,) = bus._connection.readers
            own_nats_server.freeze()
            await until(lambda: value_of(reader not in bus._connection.readers))
            own_nats_server.thaw()
            assert await told(watch) == ({"k": (b"1", revision)}, Snapshot(frozenset({"k"})))
            await told_of(watch, Entry("k", b"2", await bucket.put("k", b"2")))
        assert bus.reconnects == 0


async def test_a_watch_goes_on_after_a_freeze_that_cost_the_connection(
    own_nats_server: NatsServer, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard 2: the same when pings went unanswered and the client has connected anew."""
    monkeypatch.setattr(nats_connection, "PING_EVERY_S", 0.1)
    world = NatsWorld(own_nats_server)
    async with world.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="B"))
        async with await bucket.watch() as watch:
            assert (await told(watch))[1] == Snapshot(frozenset())
            await world.freeze()
            await until(lambda: value_of(not bus.is_connected))
            await world.thaw()
            await soon(bus.reconnected(0))
            assert (await told(watch))[1] == Snapshot(frozenset())
            await told_of(watch, Entry("k", b"2", await bucket.put("k", b"2")))


async def test_a_watch_goes_on_after_restart_upon_restart(breakable: World) -> None:
    """Hazard 2: each restart is told as a repeat with a snapshot, and no change after it is missed."""
    async with breakable.open() as bus, breakable.open() as other:
        config = BucketConfig(name="B")
        mine, theirs = await bus.ensure_bucket(config), await other.ensure_bucket(config)
        async with await mine.watch() as watch:
            await told(watch)
            for number in range(3):
                await breakable.go_down()
                await breakable.come_back()
                await soon(other.reconnected(number))
                expected = {"k"} if number else set()
                assert (await told(watch))[1] == Snapshot(frozenset(expected))
                value = str(number).encode()
                await told_of(watch, Entry("k", value, await theirs.put("k", value)))


async def test_a_storm_of_reconnects_leaves_no_consumers_behind(
    nats_server: NatsServer, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard 2: the consumers of passes that were cut off go by themselves, and the watch still works."""
    monkeypatch.setattr(nats_reader, "_INACTIVE_S", 0.5)
    async with open_nats(nats_server.url) as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="STORM"))

        async def num_consumers() -> int:
            return int((await bus._jetstream.info("KV_STORM"))["state"]["consumer_count"])

        async with await bucket.watch() as watch:
            await told(watch)
            for number in range(3):
                bus._connection.client._transport._io_writer.transport.abort()
                await soon(bus.reconnected(number))
                await told(watch)
            async with asyncio.timeout(PATIENCE_S):
                while await num_consumers() != 1:
                    await SystemClock().sleep(0.05)
            await told_of(watch, Entry("k", b"1", await bucket.put("k", b"1")))


async def test_reading_a_stream_fails_when_the_server_stands_still_and_works_after(
    own_nats_server: NatsServer, impatient: None
) -> None:
    """Hazards 2 and 10: no reader is left hanging, and one that begins after the thaw gets everything without a stall."""
    async with open_nats(own_nats_server.url) as bus:
        await bus.ensure_stream(StreamConfig(name="E", subjects=("ev.>",)))
        for number in range(300):
            bus.publish_event("ev.a", number.to_bytes(2, "big") * 8192, message_id=str(number))
        assert await bus.flush_events(PATIENCE_S)
        reading = bus.read_stream("E")
        assert (await soon(anext(reading))).sequence == 1
        own_nats_server.freeze()
        with pytest.raises(BusUnavailable, match="not read to the end"):
            await soon(drain(reading))
        own_nats_server.thaw()
        again = [stored.sequence async for stored in bus.read_stream("E")]
        assert again == list(range(1, 301))
