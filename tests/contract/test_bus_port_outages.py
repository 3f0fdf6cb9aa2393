"""What every bus adapter owes its users, 4: servers that go away, come back, or stand still."""

import asyncio

import pytest

from common.bus.errors import (
    BusUnavailable,
)
from common.bus.port import BucketConfig, Bus, Entry, Snapshot, StreamConfig
from tests.contract.bus_world import PATIENCE_S, World, answer, holds, soon, told, unique, until, value_of


async def test_calls_fail_at_once_while_the_server_is_down_and_work_again_after(breakable: World) -> None:
    """Nothing is buffered; subscriptions and buckets survive; each return is counted and told."""
    async with breakable.open() as bus, breakable.open() as other:
        bucket = await bus.ensure_bucket(BucketConfig(name="B"))
        revision = await bucket.put("k", b"1")
        subscription = await other.subscribe("pd.again")
        serving = await answer(other, "pd.rpc", b"re:")
        assert (bus.is_connected, bus.reconnects) == (True, 0)
        await breakable.go_down()
        await until(lambda: value_of(not bus.is_connected and not other.is_connected))
        for call in (
            bus.publish("pd.again", b"lost"),
            bus.request("pd.rpc", b"", timeout=3600),
            bus.subscribe("pd.x"),
            bus.flush(),
            bucket.get("k"),
            bucket.put("k", b"2"),
        ):
            with pytest.raises(BusUnavailable) as caught:
                await soon(call)
            assert not caught.value.maybe_done
        await breakable.come_back()
        assert await soon(bus.reconnected(0)) == 1
        await soon(other.reconnected(0))
        assert bus.is_connected
        assert (await soon(bus.request("pd.rpc", b"1"))).data == b"re:1"
        await bus.publish("pd.again", b"heard")
        assert (await soon(anext(subscription))).data == b"heard"
        await until(lambda: holds(bucket.update("k", b"3", last=revision)))
    await soon(serving)


async def test_a_request_in_flight_fails_when_the_server_dies(breakable: World) -> None:
    """At once, and its outcome is unknown."""
    async with breakable.open() as bus, await bus.subscribe("pd.mute") as mute, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(_outcome(bus), name="asking")
        await soon(anext(mute))
        await breakable.go_down()
        error = await soon(asking)
        assert error.maybe_done
        await breakable.come_back()


async def _outcome(bus: Bus) -> BusUnavailable:
    with pytest.raises(BusUnavailable) as caught:
        await bus.request("pd.mute", b"", timeout=3600)
    return caught.value


async def test_a_watch_survives_a_restart_of_the_server(breakable: World) -> None:
    """It repeats what is there, tells a new snapshot, and goes on with changes."""
    async with breakable.open() as bus, breakable.open() as other:
        config = BucketConfig(name="B")
        bucket, theirs = await bus.ensure_bucket(config), await other.ensure_bucket(config)
        revision = await bucket.put("k", b"1")
        async with await bucket.watch() as watch:
            assert (await told(watch))[0] == {"k": (b"1", revision)}
            await breakable.go_down()
            await breakable.come_back()
            assert await told(watch) == ({"k": (b"1", revision)}, Snapshot(frozenset({"k"})))
            await soon(other.reconnected(0))
            later = await theirs.update("k", b"2", last=revision)
            assert await soon(anext(watch)) == Entry("k", b"2", later)


async def test_a_wiped_store_is_told_and_built_again(breakable: World) -> None:
    """Buckets and streams come back empty by themselves, the epoch is another one, and the watch tells the loss."""
    async with breakable.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="B"))
        await bus.ensure_stream(StreamConfig(name="E", subjects=("ev.>",)))
        await bucket.put("k", b"1")
        epoch = await bucket.epoch()
        async with await bucket.watch() as watch:
            assert (await told(watch))[1].keys == {"k"}
            await breakable.go_down()
            await breakable.come_back(wiped=True)
            assert await told(watch) == ({}, Snapshot(frozenset()))
            assert await bucket.epoch() != epoch
            created = await bucket.create("k", b"2")
            assert await soon(anext(watch)) == Entry("k", b"2", created)
        bus.publish_event("ev.a", b"1", message_id="1")
        assert await bus.flush_events(PATIENCE_S)
        assert [stored.data async for stored in bus.read_stream("E")] == [b"1"]


async def test_events_of_an_outage_are_sent_after_it_and_are_bounded(breakable: World) -> None:
    """What fits waits and is stored once; what does not is refused and counted."""
    async with breakable.open() as bus:
        await bus.ensure_stream(StreamConfig(name="E", subjects=("ev.>",)))
        await breakable.go_down()
        await until(lambda: value_of(not bus.is_connected))
        count = 0
        while bus.publish_event("ev.a", str(count).encode(), message_id=str(count)):
            count += 1
        assert bus.events_dropped == 1
        assert count >= 1000
        assert not await bus.flush_events(0.01)
        await breakable.come_back()
        assert await bus.flush_events(PATIENCE_S)
        stored = [int(each.data) async for each in bus.read_stream("E")]
        assert sorted(stored) == list(range(count))
        assert bus.events_dropped == 1


async def test_a_closed_bus_refuses_calls(world: World) -> None:
    """BusUnavailable, nothing hangs."""
    async with world.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name=unique("CLOSED")))
    assert not bus.is_connected
    for call in (bus.publish("pd.x", b""), bus.request("pd.x", b""), bus.subscribe("pd.x"), bus.flush()):
        with pytest.raises(BusUnavailable):
            await soon(call)
    with pytest.raises(BusUnavailable):
        await bucket.get("k")
    with pytest.raises(BusUnavailable):
        await bucket.watch()
    assert not bus.publish_event("pd.x", b"", message_id="1")
