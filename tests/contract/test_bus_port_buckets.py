"""What every bus adapter owes its users, 2: buckets and watches."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from common.bus.errors import (
    InvalidSubject,
    RevisionConflict,
    StorageRefused,
)
from common.bus.port import BucketConfig, Entry, Snapshot, StreamConfig
from tests.contract.bus_world import PATIENCE_S, World, drain, soon, told, unique, until


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


async def test_entries_are_read_in_one_pass(world: World) -> None:
    """The last value of each key that matches, with its revision; nothing of deleted ones; an empty bucket ends at once."""
    async with world.open() as bus:
        bucket = await bus.ensure_bucket(BucketConfig(name=unique("PASS")))

        async def entries(pattern: str = ">") -> list[Entry]:
            return await soon(collected(bucket.entries(pattern)))

        async def collected(found: AsyncIterator[Entry]) -> list[Entry]:
            return [entry async for entry in found]

        assert await entries() == []
        for key in ("a.0", "b.0", "a.1", "a.2"):
            await bucket.put(key, b"first")
        last = await bucket.put("a.0", b"last")
        await bucket.delete("a.2")
        assert await entries("a.*") == [Entry("a.1", b"first", last - 2), Entry("a.0", b"last", last)]
        assert [entry.key for entry in await entries()] == ["b.0", "a.1", "a.0"]
        assert await entries("c.>") == []


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
        waiting = asyncio.get_running_loop().create_task(drain(watch))
        await watch.stop()
        await watch.stop()
        assert await soon(waiting) == 0
        left_open = asyncio.get_running_loop().create_task(drain(await bucket.watch("x.>")))
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
