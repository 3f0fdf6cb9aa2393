"""What only the in-memory bus has: virtual time and seeded faults."""

import asyncio
import random

import pytest

from common.bus.errors import BusTimeout
from common.bus.faults import SeededFaults
from common.bus.memory import MemoryServer
from common.bus.port import BucketConfig, StreamConfig
from common.runtime.virtual_time import VirtualClock, run_virtual


def test_values_expire_in_virtual_time() -> None:
    """A value lives for its ttl after its last write; a deletion marker does too."""

    async def main(clock: VirtualClock) -> None:
        bus = MemoryServer(clock).connect()
        bucket = await bus.ensure_bucket(BucketConfig(name="B", ttl_s=6.0))
        revision = await bucket.create("k", b"1")
        await bucket.put("gone", b"1")
        await bucket.delete("gone")
        await clock.sleep(5.0)
        await bucket.update("k", b"2", last=revision)
        await clock.sleep(5.0)
        assert await bucket.keys() == ["k"]
        assert await bucket.update("gone", b"2", last=0) > revision
        await clock.sleep(1.0)
        assert await bucket.get("k") is None

    run_virtual(main)


def test_old_and_surplus_events_make_room() -> None:
    """Age and size bound a stream, and an id is forgotten after the duplicate window."""

    async def main(clock: VirtualClock) -> None:
        bus = MemoryServer(clock).connect()
        config = StreamConfig(name="E", subjects=("ev.>",), max_age_s=100.0, max_bytes=10, duplicate_window_s=5.0)
        await bus.ensure_stream(config)

        async def stored() -> list[bytes]:
            return [each.data async for each in bus.read_stream("E")]

        for number, data in enumerate((b"aaaa", b"bbbb", b"cccc")):
            bus.publish_event("ev.a", data, message_id=str(number))
        assert await stored() == [b"bbbb", b"cccc"]
        await clock.sleep(6.0)
        bus.publish_event("ev.a", b"d", message_id="2")
        assert await stored() == [b"bbbb", b"cccc", b"d"]
        await clock.sleep(95.0)
        assert await stored() == [b"d"]

    run_virtual(main)


def faulty_run(seed: int, **rates: float) -> list[tuple[float, int]]:
    """Send 200 messages through a faulty server; return when each copy came."""

    async def main(clock: VirtualClock) -> list[tuple[float, int]]:
        faults = SeededFaults(random.Random(seed), **rates)  # type: ignore[arg-type]  # only the rates are given
        bus = MemoryServer(clock, faults=faults).connect()
        subscription = await bus.subscribe("pd.x")
        got: list[tuple[float, int]] = []

        async def collect() -> None:
            got.extend([(clock.monotonic(), int(message.data)) async for message in subscription])

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(collect(), name="collect")
            for number in range(200):
                await bus.publish("pd.x", str(number).encode())
            await clock.sleep(10.0)
            await bus.close()
        return got

    return run_virtual(main)


def test_faults_are_repeatable_and_do_what_they_say() -> None:
    """The same seed gives the same run; losses lose, repeats repeat, delays reorder."""
    assert faulty_run(1) == [(0.0, number) for number in range(200)]
    lossy = [number for _, number in faulty_run(1, loss=0.2)]
    assert 120 < len(lossy) < 195
    repeated = [number for _, number in faulty_run(1, repeat=0.2)]
    assert 210 < len(repeated) < 280
    assert set(repeated) == set(range(200))
    late = faulty_run(1, max_delay_s=1.0)
    assert sorted(number for _, number in late) == list(range(200))
    assert [number for _, number in late] != list(range(200))
    assert max(when for when, _ in late) <= 1.001
    assert faulty_run(7, loss=0.1, repeat=0.1, max_delay_s=0.5) == faulty_run(7, loss=0.1, repeat=0.1, max_delay_s=0.5)
    assert faulty_run(7, loss=0.1) != faulty_run(8, loss=0.1)


def test_a_lost_question_or_answer_is_a_timeout_and_protected_subjects_are_left_alone() -> None:
    """Faults hit requests and replies alike, except on protected subjects; both inboxes and rpc can be protected."""

    async def main(clock: VirtualClock) -> None:
        faults = SeededFaults(random.Random(0), loss=1.0, protected=("pd.safe",))
        bus = MemoryServer(clock, faults=faults).connect()

        async def serve(subject: str) -> None:
            async for message in await bus.subscribe(subject):
                await message.respond(b"re")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve("pd.rpc"), name="rpc")
            tasks.create_task(serve("pd.safe"), name="safe")
            await clock.sleep(0)
            for subject in ("pd.rpc", "pd.safe"):
                with pytest.raises(BusTimeout):
                    await bus.request(subject, b"", timeout=5.0)
            faults.protected = ("pd.safe", "_INBOX")
            assert (await bus.request("pd.safe", b"", timeout=5.0)).data == b"re"
            await bus.close()

    run_virtual(main)
