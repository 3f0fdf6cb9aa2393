"""What every bus adapter owes its users: one suite, run on NATS and in memory."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, TypeVar
from unittest.mock import Mock

import pytest

from common.bus.errors import (
    BusTimeout,
    BusUnavailable,
    InvalidSubject,
    NoResponders,
    PayloadTooLarge,
    RevisionConflict,
    StorageRefused,
)
from common.bus.memory import MemoryServer
from common.bus.nats import NatsBus
from common.bus.port import BucketConfig, Bus, Entry, Message, Snapshot, StreamConfig, Watch
from common.bus.server import NatsServer
from common.runtime.clock import SystemClock
from contracts.codec import MAX_MESSAGE_BYTES

PATIENCE_S = 30.0
_counter = itertools.count()

T = TypeVar("T")


class World(Protocol):
    """A server that buses connect to, and that can be stopped and started."""

    def open(self) -> AbstractAsyncContextManager[Bus]:
        """Open a connection for the length of a block."""
        ...

    async def go_down(self) -> None:
        """Stop the server as a crash would."""
        ...

    async def come_back(self, *, wiped: bool = False) -> None:
        """Start it at the same address, with what it had stored, or with nothing."""
        ...


class MemoryWorld:
    """The in-memory server."""

    def __init__(self) -> None:
        self.server = MemoryServer(SystemClock())

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Bus]:
        """See World."""
        bus = self.server.connect()
        try:
            yield bus
        finally:
            await bus.close()
            await bus.close()

    async def go_down(self) -> None:
        """See World."""
        self.server.go_down()

    async def come_back(self, *, wiped: bool = False) -> None:
        """See World."""
        self.server.come_back(wiped=wiped)


class NatsWorld:
    """A NATS server."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Bus]:
        """See World."""
        async with asyncio.TaskGroup() as tasks:
            bus = await NatsBus.connect(self.server.url, name="test", tasks=tasks, clock=SystemClock(), log=Mock())
            try:
                yield bus
            finally:
                await bus.close()
                await bus.close()

    async def go_down(self) -> None:
        """See World."""
        await asyncio.to_thread(self.server.kill)

    async def come_back(self, *, wiped: bool = False) -> None:
        """See World."""
        await asyncio.to_thread(self.server.start, wipe=wiped)


@pytest.fixture(params=["memory", "nats"])
def world(request: pytest.FixtureRequest) -> World:
    """Each adapter in turn, on a server that other tests use too."""
    return MemoryWorld() if request.param == "memory" else NatsWorld(request.getfixturevalue("nats_server"))


@pytest.fixture(params=["memory", "nats"])
def breakable(request: pytest.FixtureRequest) -> World:
    """Each adapter in turn, on a server that only this test has."""
    return MemoryWorld() if request.param == "memory" else NatsWorld(request.getfixturevalue("own_nats_server"))


def unique(stem: str) -> str:
    """Return a name for a bucket, stream or subject that no other test has."""
    return f"{stem}_{next(_counter)}"


async def soon(awaitable: Awaitable[T]) -> T:
    """Wait for what must happen."""
    async with asyncio.timeout(PATIENCE_S):
        return await awaitable


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again for what must become true."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await SystemClock().sleep(0.02)


async def told(watch: Watch) -> tuple[dict[str, tuple[bytes, int]], Snapshot]:
    """Take entries up to the next snapshot: key -> value and revision."""
    entries: dict[str, tuple[bytes, int]] = {}
    async with asyncio.timeout(PATIENCE_S):
        while True:
            event = await anext(watch)
            if isinstance(event, Snapshot):
                return entries, event
            entries[event.key] = (event.value, event.revision)


async def answer(bus: Bus, subject: str, reply: bytes, group: str = "") -> asyncio.Task[None]:
    """Answer every request in a task that ends with the bus."""
    subscription = await bus.subscribe(subject, queue_group=group)

    async def serve() -> None:
        async for message in subscription:
            await message.respond(reply + message.data, {"pd-type": "answer"})

    return asyncio.get_running_loop().create_task(serve())


# --- messages ---------------------------------------------------------------------------------------------------------


async def test_a_message_reaches_every_subscriber_whose_pattern_matches(world: World) -> None:
    """Exact subjects, `*` for one token and `>` for the rest; headers and payload arrive as they were sent."""
    root = unique("pd")
    async with world.open() as one, world.open() as other:
        patterns = [f"{root}.a.b", f"{root}.*.b", f"{root}.>", f"{root}.*", f"{root}.a.b.c"]
        subscriptions = [await other.subscribe(pattern) for pattern in patterns]
        headers = {"pd-type": "test", "traceparent": "00-1"}
        await one.publish(f"{root}.a.b", b"\x00data", headers)
        for subscription in subscriptions[:3]:
            message = await soon(anext(subscription))
            assert (message.subject, message.data, dict(message.headers)) == (f"{root}.a.b", b"\x00data", headers)
            assert message.reply == ""
            await message.respond(b"nobody asked")
        for subscription, pattern in zip(subscriptions[3:], (f"{root}.z", f"{root}.a.b.c"), strict=True):
            await one.publish(pattern, b"mine")
            assert (await soon(anext(subscription))).data == b"mine"


async def test_messages_keep_their_order(world: World) -> None:
    """One sender, one subscriber: first in, first out, also of an empty payload."""
    subject = unique("pd.order")
    async with world.open() as one, world.open() as other:
        subscription = await other.subscribe(subject)
        sent = [b"", *(str(number).encode() for number in range(500))]
        for data in sent:
            await one.publish(subject, data)
        assert [(await soon(anext(subscription))).data for _ in sent] == sent


async def test_one_member_of_a_queue_group_gets_each_message(world: World) -> None:
    """A group shares, others get everything."""
    subject = unique("pd.group")
    async with world.open() as one, world.open() as other:
        members = [await bus.subscribe(subject, queue_group="g") for bus in (one, other)]
        plain = await one.subscribe(subject)
        for number in range(40):
            await one.publish(subject, str(number).encode())
        assert len([await soon(anext(plain)) for _ in range(40)]) == 40
        shared: list[bytes] = []
        done = asyncio.Event()

        async def collect(subscription: AsyncIterator[Message]) -> None:
            async for message in subscription:
                shared.append(message.data)
                if len(shared) == 40:
                    done.set()

        async with asyncio.TaskGroup() as tasks:
            for member in members:
                tasks.create_task(collect(member), name="member")
            await soon(done.wait())
            await one.flush()
            for member in members:
                await member.unsubscribe()
        assert sorted(shared, key=int) == [str(number).encode() for number in range(40)]


async def test_a_full_subscription_drops_the_newest_and_counts(world: World) -> None:
    """`max_pending` bounds what waits; what waited comes, what did not fit is counted."""
    subject = unique("pd.full")
    async with world.open() as bus:
        small = await bus.subscribe(subject, max_pending=2)
        large = await bus.subscribe(subject)
        for number in range(5):
            await bus.publish(subject, str(number).encode())
        for _ in range(5):
            await soon(anext(large))
        assert small.dropped == 3
        assert [(await soon(anext(small))).data for _ in range(2)] == [b"0", b"1"]


async def test_unsubscribing_ends_the_iteration(world: World) -> None:
    """Also for a task that waits, twice is fine, and a bus that closes ends it too."""
    subject = unique("pd.end")
    async with world.open() as bus:
        async with await bus.subscribe(subject) as subscription:
            waiting = asyncio.get_running_loop().create_task(_drain(subscription))
            await bus.publish(subject, b"x")
            await until(lambda: _is(waiting.done() or subscription.dropped == 0))
        assert await soon(waiting) <= 1
        await subscription.unsubscribe()
        left_open = asyncio.get_running_loop().create_task(_drain(await bus.subscribe(subject)))
    assert await soon(left_open) == 0


async def _drain(iterator: AsyncIterator[object]) -> int:
    count = 0
    async for _ in iterator:
        count += 1
    return count


async def _is(value: bool) -> bool:
    return value


# --- requests ---------------------------------------------------------------------------------------------------------


async def test_a_request_gets_its_answer(world: World) -> None:
    """Many in flight at once, each gets its own, with headers."""
    subject = unique("pd.rpc")
    async with world.open() as client, world.open() as server:
        serving = await answer(server, subject, b"re:")

        async def ask(number: int) -> None:
            reply = await client.request(subject, str(number).encode(), headers={"pd-type": "question"})
            assert (reply.data, reply.headers["pd-type"]) == (f"re:{number}".encode(), "answer")

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(ask(number), name=f"ask-{number}")
    await soon(serving)


async def test_a_request_to_nobody_fails_fast(world: World) -> None:
    """NoResponders long before the timeout, also right after the last subscriber left."""
    subject = unique("pd.nobody")
    async with world.open() as bus:
        with pytest.raises(NoResponders):
            await soon(bus.request(subject, b"", timeout=3600))
        async with await bus.subscribe(subject):
            pass
        await bus.flush()
        with pytest.raises(NoResponders):
            await soon(bus.request(subject, b"", timeout=3600))


async def test_a_request_without_an_answer_times_out(world: World) -> None:
    """BusTimeout after the timeout; at once if no time was left."""
    subject = unique("pd.mute")
    async with world.open() as bus, await bus.subscribe(subject) as mute:
        with pytest.raises(BusTimeout):
            await soon(bus.request(subject, b"", timeout=0.05))
        with pytest.raises(BusTimeout):
            await bus.request(subject, b"never sent", timeout=0)
        late = await soon(anext(mute))
        await late.respond(b"too late is nobody's")
        await bus.publish(subject, b"marker")
        assert (await soon(anext(mute))).data == b"marker"


# --- limits -----------------------------------------------------------------------------------------------------------


async def test_payload_and_headers_together_are_capped(world: World) -> None:
    """The largest message passes; one byte more, in payload or header, is refused and harms nothing."""
    subject = unique("pd.cap")
    async with world.open() as bus:
        subscription = await bus.subscribe(subject)
        await bus.publish(subject, bytes(MAX_MESSAGE_BYTES))
        assert len((await soon(anext(subscription))).data) == MAX_MESSAGE_BYTES
        with pytest.raises(PayloadTooLarge):
            await bus.publish(subject, bytes(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(PayloadTooLarge):
            await bus.publish(subject, bytes(MAX_MESSAGE_BYTES), {"a": "b"})
        with pytest.raises(PayloadTooLarge):
            await bus.request(subject, bytes(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(PayloadTooLarge):
            bus.publish_event(subject, bytes(MAX_MESSAGE_BYTES), message_id="1")
        await bus.publish(subject, b"still connected")
        assert (await soon(anext(subscription))).data == b"still connected"


@pytest.mark.parametrize("subject", ["", "a..b", ".a", "a.", "a b", "a.*", "a.>", "a\r\nPUB x 0"])
async def test_bad_subjects_are_refused(world: World, subject: str) -> None:
    """Empty tokens, white space and wildcards do not leave the process."""
    async with world.open() as bus:
        for call in (bus.publish, bus.request):
            with pytest.raises(InvalidSubject):
                await call(subject, b"")
        with pytest.raises(InvalidSubject):
            bus.publish_event(subject, b"", message_id="1")


async def test_bad_patterns_and_headers_are_refused(world: World) -> None:
    """A `>` in the middle, half-wild tokens, and headers that would break the protocol."""
    async with world.open() as bus:
        for pattern in ("a.>.b", "a.b*", "", "a b"):
            with pytest.raises(InvalidSubject):
                await bus.subscribe(pattern)
        for headers in ({"a b": "c"}, {"": "c"}, {"a": "c\r\nd: e"}, {"a": "ä"}, {"a": " c"}):
            with pytest.raises(InvalidSubject):
                await bus.publish("pd.x", b"", headers)


# --- buckets ----------------------------------------------------------------------------------------------------------


async def test_compare_and_set(world: World) -> None:
    """Create once, update with the last revision only, put always; revisions grow over all keys."""
    async with world.open() as bus, world.open() as other:
        config = BucketConfig(name=unique("CAS"))
        mine, theirs = await bus.ensure_bucket(config), await other.ensure_bucket(config)
        assert mine.name == config.name
        assert await mine.get("a.b") is None
        first = await mine.create("a.b", b"1")
        with pytest.raises(RevisionConflict):
            await theirs.create("a.b", b"2")
        second = await theirs.update("a.b", b"2", last=first)
        with pytest.raises(RevisionConflict):
            await mine.update("a.b", b"3", last=first)
        assert await mine.get("a.b") == Entry("a.b", b"2", second)
        third = await mine.put("c", b"")
        fourth = await mine.put("a.b", b"4")
        assert first < second < third < fourth
        assert await theirs.get("c") == Entry("c", b"", third)
        with pytest.raises(RevisionConflict):
            await mine.update("never-there", b"", last=fourth)


async def test_deleted_keys_are_absent_but_have_a_revision(world: World) -> None:
    """Deleting hides the value; an old writer still loses, and the key can be created again."""
    async with world.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name=unique("DEL")))
        first = await bucket.create("k", b"1")
        with pytest.raises(RevisionConflict):
            await bucket.delete("k", last=first + 7)
        await bucket.delete("k", last=first)
        await bucket.delete("k")
        await bucket.delete("never-there")
        assert await bucket.get("k") is None
        assert await bucket.keys() == []
        with pytest.raises(RevisionConflict):
            await bucket.update("k", b"stale", last=first)
        again = await bucket.create("k", b"2")
        assert again > first
        assert await bucket.get("k") == Entry("k", b"2", again)


async def test_one_of_many_writers_wins(world: World) -> None:
    """Of concurrent creates and of concurrent updates exactly one succeeds."""
    async with world.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name=unique("RACE")))

        async def count_winners(write: Callable[[str, bytes], Awaitable[int]]) -> list[int]:
            won: list[int] = []

            async def attempt(number: int) -> None:
                try:
                    won.append(await write("k", str(number).encode()))
                except RevisionConflict:
                    return

            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
                for number in range(20):
                    tasks.create_task(attempt(number), name=f"writer-{number}")
            return won

        created = await count_winners(bucket.create)
        assert len(created) == 1
        updated = await count_winners(lambda key, value: bucket.update(key, value, last=created[0]))
        assert len(updated) == 1


async def test_keys_are_listed_by_pattern(world: World) -> None:
    """Sorted, without deleted ones, filtered by tokens."""
    async with world.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name=unique("KEYS")))
        assert await bucket.keys() == []
        for key in ("decode.1", "decode.0", "prefill.0", "decode.2"):
            await bucket.put(key, b"x")
        await bucket.delete("decode.2")
        assert await bucket.keys() == ["decode.0", "decode.1", "prefill.0"]
        assert await bucket.keys("decode.*") == ["decode.0", "decode.1"]
        assert await bucket.keys("mixed.>") == []


async def test_values_expire(world: World) -> None:
    """A value that is not written again is gone after the ttl; the key is then free; renewal keeps it."""
    async with world.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name=unique("TTL"), ttl_s=1.0))
        first = await bucket.create("gone", b"1")
        renewed = await bucket.create("kept", b"0")

        async def has_expired() -> bool:
            nonlocal renewed
            renewed = await bucket.update("kept", b"1", last=renewed)
            return await bucket.get("gone") is None

        await until(has_expired)
        assert await bucket.keys() == ["kept"]
        with pytest.raises(RevisionConflict):
            await bucket.update("gone", b"2", last=first)
        assert await bucket.create("gone", b"2") > renewed


@pytest.mark.parametrize("key", ["", "a..b", ".a", "a.", "a b", "a*", ">", "ä"])
async def test_bad_keys_are_refused(world: World, key: str) -> None:
    """Nothing that could be a pattern or break the protocol becomes a key."""
    async with world.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name="BADKEYS"))
        for call in (bucket.get(key), bucket.put(key, b""), bucket.create(key, b""), bucket.delete(key)):
            with pytest.raises(InvalidSubject):
                await call


async def test_bad_buckets_and_streams_are_refused(world: World) -> None:
    """A bad name is InvalidSubject, impossible options are StorageRefused."""
    async with world.open() as bus:
        with pytest.raises(InvalidSubject):
            await bus.ensure_bucket(BucketConfig(name="a b"))
        with pytest.raises(InvalidSubject):
            await bus.ensure_stream(StreamConfig(name="a.b", subjects=("x",)))
        for bad in (BucketConfig(name="BAD", history=0), BucketConfig(name="BAD", ttl_s=-1.0)):
            with pytest.raises(StorageRefused):
                await bus.ensure_bucket(bad)
        with pytest.raises(StorageRefused):
            await bus.ensure_stream(StreamConfig(name="BAD", subjects=()))


async def test_a_bucket_can_be_configured_anew(world: World) -> None:
    """Ensuring the same again changes nothing; other options take effect and values stay."""
    async with world.open() as bus:
        name = unique("AGAIN")
        bucket = await bus.ensure_bucket(BucketConfig(name=name))
        epoch = await bucket.epoch()
        await bucket.put("k", b"1")
        bucket = await bus.ensure_bucket(BucketConfig(name=name))
        bucket = await bus.ensure_bucket(BucketConfig(name=name, ttl_s=3600.0, history=3))
        assert await bucket.epoch() == epoch
        entry = await bucket.get("k")
        assert entry is not None
        assert entry.value == b"1"


# --- watches ----------------------------------------------------------------------------------------------------------


async def test_a_watch_tells_what_is_there_then_every_change(world: World) -> None:
    """First the values, then a snapshot of the keys, then changes in order with their revisions."""
    async with world.open() as bus, world.open() as other:
        config = BucketConfig(name=unique("WATCH"))
        bucket = await bus.ensure_bucket(config)
        first = await bucket.put("decode.0", b"1")
        await bucket.put("decode.1", b"1")
        await bucket.delete("decode.1")
        await bucket.put("prefill.0", b"1")
        async with await (await other.ensure_bucket(config)).watch("decode.*") as watch:
            assert await told(watch) == ({"decode.0": (b"1", first)}, Snapshot(frozenset({"decode.0"})))
            second = await bucket.put("decode.2", b"2")
            assert await soon(anext(watch)) == Entry("decode.2", b"2", second)
            await bucket.put("prefill.1", b"1")
            await bucket.delete("decode.0")
            gone = await soon(anext(watch))
            assert gone == Entry("decode.0", b"", gone.revision if isinstance(gone, Entry) else 0, deleted=True)


async def test_a_watch_of_nothing_tells_an_empty_snapshot(world: World) -> None:
    """An empty bucket is told at once, and stopping ends the iteration; twice is fine."""
    async with world.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name=unique("EMPTY")))
        watch = await bucket.watch()
        assert await told(watch) == ({}, Snapshot(frozenset()))
        waiting = asyncio.get_running_loop().create_task(_drain(watch))
        await watch.stop()
        await watch.stop()
        assert await soon(waiting) == 0
        left_open = asyncio.get_running_loop().create_task(_drain(await bucket.watch("x.>")))
    assert await soon(left_open) <= 1


async def test_a_slow_watcher_gets_every_last_value(world: World) -> None:
    """Thousands of updates while nobody takes any: the last value of each key comes, memory stays bounded."""
    async with world.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name=unique("SLOW")))
        async with await bucket.watch() as watch:
            assert (await told(watch))[0] == {}
            for number in range(300):
                await bucket.put(f"k{number % 3}", str(number).encode())
            seen: dict[str, bytes] = {}
            async with asyncio.timeout(PATIENCE_S):
                while seen != {"k0": b"297", "k1": b"298", "k2": b"299"}:
                    event = await anext(watch)
                    assert isinstance(event, Entry)
                    seen[event.key] = event.value


# --- events -----------------------------------------------------------------------------------------------------------


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


# --- outages ----------------------------------------------------------------------------------------------------------


async def test_calls_fail_at_once_while_the_server_is_down_and_work_again_after(breakable: World) -> None:
    """Nothing is buffered; subscriptions and buckets survive; each return is counted and told."""
    async with breakable.open() as bus, breakable.open() as other:
        bucket = await bus.ensure_bucket(BucketConfig(name="B"))
        revision = await bucket.put("k", b"1")
        subscription = await other.subscribe("pd.again")
        serving = await answer(other, "pd.rpc", b"re:")
        assert (bus.is_connected, bus.reconnects) == (True, 0)
        await breakable.go_down()
        await until(lambda: _is(not bus.is_connected and not other.is_connected))
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
        await until(lambda: _holds(bucket.update("k", b"3", last=revision)))
    await soon(serving)


async def _holds(call: Awaitable[object]) -> bool:
    """Say whether a call works; just after a start the store may still be on its way up."""
    try:
        await call
    except BusUnavailable:
        return False
    return True


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
        await until(lambda: _is(not bus.is_connected))
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
