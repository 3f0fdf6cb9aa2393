"""Hazards of what is stored: expiry, wiped stores, writes without an answer, repeats, and streams that keep requests.

Which hazard is tested where: see the table in `test_bus_hazards.py`.
"""

import asyncio
from collections import Counter

import nats
import pytest

from common.bus import memory, nats_storage
from common.bus.errors import BusTimeout, BusUnavailable, RevisionConflict, StorageRefused
from common.bus.port import Bucket, BucketConfig, Entry, StreamConfig
from common.bus.server import NatsServer
from common.runtime.clock import SystemClock
from contracts.handoff import HandoffRecord
from services.broker.core.effects import StoreRecord
from services.broker.core.events import RecordConflict, RecordStored
from services.broker.records import Records
from tests.contract import golden_samples
from tests.contract.bus_proxy import proxied
from tests.contract.bus_world import PATIENCE_S, World, holds, open_nats, soon, told, unique, until

TTL_S = 0.5


@pytest.fixture
def short_store_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call to the store give up soon."""
    monkeypatch.setattr(nats_storage, "API_TIMEOUT_S", 0.3)
    monkeypatch.setattr(memory, "STORE_TIMEOUT_S", 0.3)


# --- hazards 11 and 12: expiry and fence tokens -----------------------------------------------------------------------


async def test_a_renewed_value_still_expires_and_no_watch_tells_of_it(world: World) -> None:
    """Renewing by update keeps the bucket's ttl, unlike a ttl of the message; expiry must be polled for."""
    async with world.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name=unique("RENEWED"), ttl_s=TTL_S))
        async with await bucket.watch() as watch:
            await told(watch)
            revision = await bucket.create("lease", b"0")
            for number in range(3):
                revision = await bucket.update("lease", str(number).encode(), last=revision)
            await until(lambda: _is_gone(bucket, "lease"))
            marker = await bucket.put("marker", b"")
            async with asyncio.timeout(PATIENCE_S):
                seen = [await anext(watch)]
                while seen[-1] != Entry("marker", b"", marker):
                    seen.append(await anext(watch))
            assert not any(isinstance(event, Entry) and event.deleted for event in seen)


async def _is_gone(bucket: Bucket, key: str) -> bool:
    return await bucket.get(key) is None


async def test_the_revisions_of_a_wiped_bucket_start_again_under_another_epoch(breakable: World) -> None:
    """A revision alone is no fence token: after the loss of the store it comes a second time."""
    async with breakable.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="FENCE"))
        before = (await bucket.epoch(), await bucket.create("lease", b"1"))
        await breakable.go_down()
        await breakable.come_back(wiped=True)
        await soon(bus.reconnected(0))
        await until(lambda: holds(bucket.epoch()))
        after = (await bucket.epoch(), await bucket.create("lease", b"2"))
        assert before[1] == after[1]
        assert before[0] != after[0]


# --- hazard 13: writes whose answer does not come ---------------------------------------------------------------------


async def test_a_write_that_a_frozen_server_takes_later_is_done_once(
    breakable: World, short_store_timeout: None
) -> None:
    """The answer is a timeout. After the thaw the value is there, a repeat conflicts, and the revision grew by one."""
    async with breakable.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="B"))
        first = await bucket.create("k", b"1")
        await breakable.freeze()
        with pytest.raises(BusTimeout):
            await soon(bucket.update("k", b"2", last=first))
        await breakable.thaw()
        await until(lambda: _holds_value(bucket, b"2"))
        with pytest.raises(RevisionConflict):
            await bucket.update("k", b"2", last=first)
        assert await bucket.get("k") == Entry("k", b"2", first + 1)


async def test_a_write_that_died_with_the_server_can_be_made_again(breakable: World, short_store_timeout: None) -> None:
    """Killed before it took the write: reading shows that nothing happened, and the repeat is the only one."""
    async with breakable.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="B"))
        first = await bucket.create("k", b"1")
        await breakable.freeze()
        with pytest.raises(BusTimeout):
            await soon(bucket.update("k", b"2", last=first))
        await breakable.go_down()
        await breakable.come_back()
        await soon(bus.reconnected(0))
        await until(lambda: holds(bucket.get("k")))
        assert await bucket.get("k") == Entry("k", b"1", first)
        assert await bucket.update("k", b"2", last=first) == first + 1


async def test_a_write_in_flight_when_the_server_dies_may_have_been_done(breakable: World) -> None:
    """It fails at once, and says that its outcome is unknown."""
    async with breakable.open() as bus, asyncio.TaskGroup() as tasks:
        bucket = await bus.ensure_bucket(BucketConfig(name="B"))
        await breakable.freeze()
        writing = tasks.create_task(_failure(bucket), name="writing")
        await SystemClock().sleep(0.05)
        await breakable.go_down()
        assert (await soon(writing)).maybe_done
        await breakable.come_back()


async def _failure(bucket: Bucket) -> BusUnavailable:
    with pytest.raises(BusUnavailable) as caught:
        await bucket.put("k", b"1")
    return caught.value


async def _holds_value(bucket: Bucket, value: bytes) -> bool:
    entry = await bucket.get("k")
    return entry is not None and entry.value == value


@pytest.mark.parametrize("dies", [False, True], ids=["thaws", "dies"])
async def test_records_over_a_server_that_stands_still_in_mid_write(
    breakable: World, short_store_timeout: None, dies: bool
) -> None:
    """The broker's compare-and-set: whatever the server does meanwhile, a write lands once and is known to have landed."""
    record: HandoffRecord = next(each for each in golden_samples.BUS_MESSAGES if isinstance(each, HandoffRecord))
    async with breakable.open() as bus:
        records = Records(bus, SystemClock(), ttl_s=600.0, timeout_s=PATIENCE_S)
        await records.open()
        bucket = await bus.ensure_bucket(BucketConfig(name="PD_HANDOFFS", ttl_s=600.0))
        revision: int | None = None
        for number in range(2):
            async with asyncio.TaskGroup() as tasks:
                await breakable.freeze()
                effect = StoreRecord(write=number, record=record, last=revision)
                storing = tasks.create_task(records.store(effect), name="storing")
                await SystemClock().sleep(0.5)  # longer than one try
                if dies:
                    await breakable.go_down()
                    await breakable.come_back()
                else:
                    await breakable.thaw()
                outcome = await soon(storing)
            match outcome:
                case RecordStored():
                    stored = outcome.revision
                case RecordConflict(found=found):
                    assert found == record
                    stored = outcome.revision
                case _:
                    raise AssertionError(outcome)
            assert stored == (revision or 0) + 1
            revision = stored
            entry = await bucket.get(record.handoff_id)
            assert entry is not None
            assert entry.revision == stored


# --- hazards 13 and 14: events and memory -----------------------------------------------------------------------------


async def test_events_survive_kill_upon_kill_each_stored_once(breakable: World) -> None:
    """The server dies three times while events are on their way: none is lost, none is there twice."""
    async with breakable.open() as bus:
        await bus.ensure_stream(StreamConfig(name="E", subjects=("ev.>",)))
        count = 0
        for number in range(3):
            for _ in range(400):
                assert bus.publish_event("ev.a", str(count).encode(), message_id=str(count))
                count += 1
            await bus.flush_events(0.02)
            await breakable.go_down()
            await breakable.come_back()
            await soon(bus.reconnected(number))
        assert await bus.flush_events(PATIENCE_S)
        await until(lambda: holds(anext(aiter(bus.read_stream("E")))))
        stored = Counter([int(each.data) async for each in bus.read_stream("E")])
        assert stored == Counter(range(count))
        assert bus.events_dropped == 0


async def test_what_was_stored_and_not_acknowledged_is_not_stored_again(nats_server: NatsServer) -> None:
    """Every answer of the store is lost, then the connection: events are there once, and a write may have been done."""
    async with (
        proxied(nats_server.url) as line,
        open_nats(line.url) as bus,
        open_nats(nats_server.url) as witness,
        asyncio.TaskGroup() as tasks,
    ):
        name = unique("UNHEARD")
        await bus.ensure_stream(StreamConfig(name=name, subjects=(f"{name}.>",)))
        bucket = await bus.ensure_bucket(BucketConfig(name=name))
        line.is_mute = True
        for number in range(40):
            bus.publish_event(f"{name}.a", b"", message_id=str(number))
        writing = tasks.create_task(_failure(bucket), name="writing")

        async def all_is_stored() -> bool:
            events, values = await witness._jetstream.info(name), await witness._jetstream.info(f"KV_{name}")
            return (events["state"]["messages"], values["state"]["messages"]) == (40, 1)

        await until(all_is_stored)
        line.is_mute = False
        line.cut()
        assert (await soon(writing)).maybe_done
        assert await bus.flush_events(PATIENCE_S)
        assert (bus.reconnects, bus.events_dropped) == (1, 0)
        assert len([stored async for stored in bus.read_stream(name)]) == 40
        assert await bucket.get("k") == Entry("k", b"1", 1)


async def test_buckets_and_streams_lie_in_files_and_those_in_memory_are_refused(nats_server: NatsServer) -> None:
    """A bucket that somebody made in memory would vanish with the server: it is not used, and not changed silently."""
    async with open_nats(nats_server.url) as bus:
        await bus.ensure_bucket(BucketConfig(name="FILES"))
        assert (await bus._jetstream.info("KV_FILES"))["config"]["storage"] == "file"
        client = await nats.connect(nats_server.url)
        try:
            stream = nats.js.api.StorageType.MEMORY
            await client.jetstream().create_key_value(bucket="FLEETING", storage=stream)
            await client.jetstream().add_stream(name="FLEETING_EVENTS", subjects=["fleeting.>"], storage=stream)
        finally:
            await client.close()
        with pytest.raises(StorageRefused, match="storage"):
            await bus.ensure_bucket(BucketConfig(name="FLEETING"))
        with pytest.raises(StorageRefused, match="storage"):
            await bus.ensure_stream(StreamConfig(name="FLEETING_EVENTS", subjects=("fleeting.>",)))


# --- hazard 16: streams that keep requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", [">", "pd.>", "pd.v1.>", "pd.*.rpc.>", "pd.v1.rpc.broker.0.submit", "*.v1.rpc.*.>", "_INBOX.>", "$JS.>"]
)
async def test_a_stream_that_would_keep_requests_is_refused(world: World, pattern: str) -> None:
    """Its acknowledgement would race the reply, and would hide that nobody is there."""
    async with world.open() as bus:
        with pytest.raises(StorageRefused, match="where requests travel"):
            await bus.ensure_stream(StreamConfig(name="GREEDY", subjects=("ev.>", pattern)))
        with pytest.raises(StorageRefused):
            await anext(aiter(bus.read_stream("GREEDY")))


async def test_a_strange_stream_that_keeps_requests_stops_a_service_from_starting(own_nats_server: NatsServer) -> None:
    """Somebody else's stream on the same server: it is named, so that its owner can be found."""
    async with open_nats(own_nats_server.url) as bus:
        client = await nats.connect(own_nats_server.url)
        try:
            await client.jetstream().add_stream(name="AUDIT", subjects=["pd.v1.rpc.>"])
            with pytest.raises(StorageRefused, match="AUDIT"):
                await bus.ensure_stream(StreamConfig(name="EVENTS", subjects=("pd.v1.ev.>",)))
            await client.jetstream().delete_stream("AUDIT")
            await bus.ensure_stream(StreamConfig(name="EVENTS", subjects=("pd.v1.ev.>",)))
        finally:
            await client.close()
