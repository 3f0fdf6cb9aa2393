"""The seeded faults of the in-memory bus: repeatable, as frequent as asked for, and never inconsistent."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from common.bus.errors import BusError, BusTimeout, BusUnavailable, RevisionConflict
from common.bus.faults import DIRECT, SeededFaults, Trip
from common.bus.measurement import BusMetrics
from common.bus.memory import MemoryServer
from common.bus.port import Bucket, BucketConfig, Entry, StreamConfig
from common.runtime.metrics import Metrics
from common.runtime.virtual_time import VirtualClock, run_virtual

NUM_DRAWS = 10_000


def drawn(seed: int, **rates: float) -> tuple[list[tuple[float, ...]], list[Trip]]:
    """Draw deliveries and trips."""
    faults = SeededFaults(random.Random(seed), **rates)  # type: ignore[arg-type]  # only the rates are given
    return (
        [tuple(faults.deliveries("pd.x")) for _ in range(NUM_DRAWS)],
        [faults.trip("$KV.B.k") for _ in range(NUM_DRAWS)],
    )


@pytest.mark.parametrize("rate", [0.01, 0.2, 0.9])
def test_each_kind_of_fault_comes_at_the_rate_that_was_asked_for(rate: float) -> None:
    """Loss, repeat, lost calls and lost answers within five standard deviations; delays spread over their range."""
    rates: dict[str, Any] = {"loss": rate, "repeat": rate, "store_loss": rate, "answer_loss": rate}
    deliveries, trips = drawn(3, **rates, max_delay_s=2.0, store_delay_s=4.0)
    arrived = [copies for copies in deliveries if copies]
    observed = {
        "loss": (sum(not copies for copies in deliveries), len(deliveries)),
        "repeat": (sum(len(copies) == 2 for copies in arrived), len(arrived)),
        "store_loss": (sum(trip.lost for trip in trips), len(trips)),
        "answer_loss": (sum(trip.unanswered for trip in trips), len(trips)),
    }
    for kind, (count, total) in observed.items():
        spread = (rate * (1 - rate) * total) ** 0.5
        assert abs(count - rate * total) < 5 * spread, kind
    for delays, bound in (
        ([copies[0] for copies in arrived], 2.0),
        ([trip.there_s for trip in trips], 4.0),
        ([trip.back_s for trip in trips], 4.0),
    ):
        assert 0 <= min(delays) < 0.05 * bound
        assert 0.95 * bound < max(delays) <= bound
        assert abs(sum(delays) / len(delays) - bound / 2) < 0.05 * bound


def test_the_seed_decides_everything() -> None:
    """The same seed draws the same, another one does not, and protected subjects are left alone."""
    rates = {
        "loss": 0.1,
        "repeat": 0.1,
        "max_delay_s": 1.0,
        "store_loss": 0.1,
        "answer_loss": 0.1,
        "store_delay_s": 1.0,
    }
    assert drawn(1, **rates) == drawn(1, **rates)
    assert drawn(1, **rates) != drawn(2, **rates)
    faults = SeededFaults(random.Random(0), loss=1.0, store_loss=1.0, protected=("pd.safe", "$KV.SAFE."))
    assert faults.deliveries("pd.safe.x") == (0.0,)
    assert faults.trip("$KV.SAFE.k") is DIRECT
    assert faults.trip("$KV.B.k").lost


def test_without_faults_of_the_store_no_draw_is_spent_on_it() -> None:
    """A run with message faults alone is the same whether or not it uses buckets."""
    faults = SeededFaults(random.Random(1), loss=0.5)
    before = faults.rng.getstate()
    assert faults.trip("$KV.B.k") is DIRECT
    assert faults.rng.getstate() == before


async def add_token(bucket: Bucket, token: str) -> int:
    """Append a token to the list in `k` by compare-and-set, whatever the line does; return how many tries that took."""
    tries = 0
    while True:
        tries += 1
        try:
            entry = await bucket.get("k")
            tokens = [] if entry is None else json.loads(entry.value)
            if token in tokens:
                return tries  # an earlier try did get through
            value = json.dumps([*tokens, token]).encode()
            if entry is None:
                await bucket.create("k", value)
            else:
                await bucket.update("k", value, last=entry.revision)
        except (BusTimeout, RevisionConflict):
            continue
        return tries


def written_over_a_bad_line(seed: int) -> tuple[list[str], int, int]:
    """Let five writers add ten tokens each, over a line that loses and delays. Return tokens, revision and tries."""

    async def main(clock: VirtualClock) -> tuple[list[str], int, int]:
        faults = SeededFaults(random.Random(seed), store_loss=0.1, answer_loss=0.2, store_delay_s=0.5)
        server = MemoryServer(clock, faults=faults)
        bucket = await server.connect().ensure_bucket(BucketConfig(name="B"))
        tries = 0

        async def write(writer: int) -> None:
            nonlocal tries
            for number in range(10):
                took = await add_token(bucket, f"{writer}-{number}")
                tries += took

        async with asyncio.TaskGroup() as tasks:
            for writer in range(5):
                tasks.create_task(write(writer), name=f"writer-{writer}")
        entry = server.buckets["B"].last("k")
        assert entry is not None
        return json.loads(entry.value), entry.revision, tries

    return run_virtual(main)


@pytest.mark.parametrize("seed", range(8))
def test_compare_and_set_stays_exact_over_a_bad_line(seed: int) -> None:
    """Calls and answers get lost, others overtake: each token is there once, and each write made one revision."""
    tokens, revision, tries = written_over_a_bad_line(seed)
    assert Counter(tokens) == Counter(f"{writer}-{number}" for writer in range(5) for number in range(10))
    assert revision == len(tokens)
    assert tries > len(tokens)  # the faults did occur
    assert written_over_a_bad_line(seed) == (tokens, revision, tries)


def test_an_unanswered_write_is_done_and_a_lost_one_is_not() -> None:
    """To the writer both are a timeout: only reading tells them apart."""

    async def main(clock: VirtualClock) -> None:
        server = MemoryServer(clock, faults=SeededFaults(random.Random(0), answer_loss=1.0))
        bucket = await server.connect().ensure_bucket(BucketConfig(name="B"))
        for answer_loss, store_loss, expected in ((1.0, 0.0, Entry("k", b"1", 1)), (0.0, 1.0, None)):
            server.buckets["B"].wipe(7)
            server.faults = SeededFaults(random.Random(0), answer_loss=answer_loss, store_loss=store_loss)
            with pytest.raises(BusTimeout):
                await bucket.create("k", b"1")
            server.faults = SeededFaults(random.Random(0))
            assert await bucket.get("k") == expected

    run_virtual(main)


@pytest.mark.parametrize("seed", range(4))
def test_events_over_a_bad_line_are_stored_once_and_in_order(seed: int) -> None:
    """What is not answered is sent again, and its id keeps it from being stored twice."""

    async def main(clock: VirtualClock) -> None:
        faults = SeededFaults(random.Random(seed), store_loss=0.2, answer_loss=0.3, store_delay_s=0.2)
        bus = MemoryServer(clock, faults=faults).connect()
        await bus.ensure_stream(StreamConfig(name="E", subjects=("ev.>",), duplicate_window_s=60.0))
        for number in range(50):
            assert bus.publish_event("ev.a", str(number).encode(), message_id=str(number))
        assert not await bus.flush_events(0.001)
        assert await bus.flush_events(3600.0)
        assert [int(each.data) async for each in bus.read_stream("E")] == list(range(50))
        assert bus.events_dropped == 0

    run_virtual(main)


def test_what_is_under_way_dies_with_the_server() -> None:
    """A delayed message and a delayed write do not arrive in the server's next life; the writer hears at once."""

    async def main(clock: VirtualClock) -> None:
        faults = SeededFaults(random.Random(0), max_delay_s=10.0, store_delay_s=10.0)
        server = MemoryServer(clock, faults=faults)
        bus = server.connect()
        bucket = await bus.ensure_bucket(BucketConfig(name="B"))
        subscription = await bus.subscribe("pd.x")
        await bus.publish("pd.x", b"delayed")
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(outcome(bucket), name="writing")
            await clock.sleep(0.001)
            server.go_down()
            server.come_back()
            error = await writing
        assert isinstance(error, BusUnavailable)
        assert error.maybe_done
        await clock.sleep(20.0)
        server.faults = SeededFaults(random.Random(0))
        assert await bucket.get("k") is None
        await bus.publish("pd.x", b"new")
        assert (await anext(subscription)).data == b"new"

    run_virtual(main)


async def outcome(bucket: Bucket) -> BusError | int:
    """Write, and return what became of it."""
    try:
        return await bucket.put("k", b"1")
    except BusError as error:
        return error


def test_a_frozen_server_does_later_what_it_was_sent_in_order() -> None:
    """Callers time out meanwhile; publishes, writes and questions are done after the thaw, in the order of sending."""

    async def main(clock: VirtualClock) -> None:
        server = MemoryServer(clock)
        bus = server.connect()
        bucket = await bus.ensure_bucket(BucketConfig(name="B"))
        subscription = await bus.subscribe("pd.x")
        server.freeze()
        for number in range(3):
            await bus.publish("pd.x", str(number).encode())
            with pytest.raises(BusTimeout):
                await bucket.put("k", str(number).encode())
        with pytest.raises(BusTimeout):
            await bus.request("pd.nobody", b"", timeout=1.0)
        with pytest.raises(BusTimeout):
            await bus.flush()
        assert server.buckets["B"].last("k") is None
        server.thaw()
        assert await bucket.get("k") == Entry("k", b"2", 3)
        assert [int((await anext(subscription)).data) for _ in range(3)] == [0, 1, 2]

    run_virtual(main)


def test_a_closed_connection_fails_what_is_in_flight_and_counts_waiting_events() -> None:
    """Nothing hangs on a bus that was closed."""

    async def main(clock: VirtualClock) -> None:
        metrics = Metrics()
        server = MemoryServer(clock)
        bus = server.connect(BusMetrics(metrics))
        bucket = await bus.ensure_bucket(BucketConfig(name="B"))
        bus.publish_event("ev.a", b"", message_id="1")  # no stream wants it
        server.freeze()
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(outcome(bucket), name="writing")
            await clock.sleep(0.001)
            await bus.close()
            assert isinstance(await writing, BusUnavailable)
        assert bus.events_dropped == 1
        assert b"pdmesh_bus_events_dropped_total 1.0" in metrics.exposition()

    run_virtual(main)
