"""A worker that stood still past its lease must begin anew; one whose bus was away must not."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import structlog

from common.bus.memory import MemoryServer
from common.bus.storage import WORKER_TTL_S, WORKERS_CONFIG
from common.runtime.lifecycle import EXIT_LEASE_LAPSED, ServiceEnded
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.own_lease import LOOK_EVERY_S, OwnLease
from common.worker.registration import Registration
from contracts.codec import encode
from contracts.workers import WorkerLoad, WorkerRecord, WorkerRole, WorkerState


async def _look_for(lease: OwnLease, clock: VirtualClock, seconds: float) -> bool:
    lapsed = False
    for _ in range(round(seconds / LOOK_EVERY_S)):
        await clock.sleep(LOOK_EVERY_S)
        lapsed = lapsed or lease.has_lapsed()
    return lapsed


def test_silence_of_the_bus_alone_is_no_lapse() -> None:
    """However long no write is acknowledged: this process went on, and everybody was silent."""

    async def scenario(clock: VirtualClock) -> None:
        lease = OwnLease(clock, ttl_s=6.0)
        lease.renewed(clock.monotonic())
        assert not await _look_for(lease, clock, 60.0)

    run_virtual(scenario)


@pytest.mark.parametrize(("before_s", "still_s", "lapses"), [(1.0, 8.0, True), (1.5, 4.0, False), (2.0, 4.5, True)])
def test_a_lease_lapses_when_the_process_stood_still_past_its_end(
    before_s: float, still_s: float, lapses: bool
) -> None:
    """The age of the last write counts, not the length of the standstill; a standstill that ended in time is forgiven."""

    async def scenario(clock: VirtualClock) -> None:
        lease = OwnLease(clock, ttl_s=6.0)
        lease.renewed(clock.monotonic())
        assert not await _look_for(lease, clock, before_s)
        await clock.sleep(still_s)
        assert lease.has_lapsed() is lapses
        lease.renewed(clock.monotonic())
        assert not await _look_for(lease, clock, 60.0)

    run_virtual(scenario)


def test_a_worker_that_stood_still_writes_nothing_more() -> None:
    """Its next write ends the process with a status of its own, and the record, perhaps another start's, is left alone."""

    async def scenario(clock: VirtualClock) -> None:
        bus = MemoryServer(clock).connect()
        registration = Registration(bus, clock, structlog.get_logger(), _record)
        bucket = await registration.open()
        await clock.sleep(2 * WORKER_TTL_S)
        await (await bus.ensure_bucket(WORKERS_CONFIG)).put("decode-0", b"of another start")
        with pytest.raises(ServiceEnded) as end:
            await registration.put(bucket)
        assert end.value.status == EXIT_LEASE_LAPSED
        await registration.close()
        entry = await bucket.get("decode-0")
        assert entry is not None
        assert entry.value == b"of another start"

    run_virtual(scenario)


def test_a_worker_that_was_replaced_while_it_was_cut_off_ends() -> None:
    """It went on all the time, so its own lease tells nothing; it writes nothing over the record of the start in its place."""

    async def scenario(clock: VirtualClock) -> None:
        bus = MemoryServer(clock).connect()
        registration = Registration(bus, clock, structlog.get_logger(), _record)
        bucket = await registration.open()
        later = encode(msgspec.structs.replace(_record(), incarnation="i2"))
        await bucket.put("decode-0", later)
        with pytest.raises(ServiceEnded, match="decode-0: the start i1 gives way to the start i2") as end:
            await registration.put(bucket)
        assert end.value.status == EXIT_LEASE_LAPSED
        await registration.close()
        entry = await bucket.get("decode-0")
        assert entry is not None
        assert entry.value == later

    run_virtual(scenario)


def test_a_worker_at_work_keeps_its_lease() -> None:
    """Nothing ends while records are written and the lease is looked after, and closing removes the record."""

    async def scenario(clock: VirtualClock) -> None:
        bus = MemoryServer(clock).connect()
        registration = Registration(bus, clock, structlog.get_logger(), _record)
        bucket = await registration.open()
        async with asyncio.TaskGroup() as group:
            works = [group.create_task(registration.run()), group.create_task(registration.run_lease())]
            await clock.sleep(10 * WORKER_TTL_S)
            for work in works:
                work.cancel()
        assert await bucket.get("decode-0") is not None
        await registration.close()
        assert await bucket.get("decode-0") is None

    run_virtual(scenario)


def _record() -> WorkerRecord:
    return WorkerRecord(
        worker_id="decode-0",
        incarnation="i1",
        role=WorkerRole.DECODE,
        state=WorkerState.READY,
        model="tiny",
        model_fingerprint="f",
        tp=1,
        dp=1,
        dcp=1,
        block_size=16,
        num_blocks=8,
        num_slots=2,
        max_sequence_tokens=128,
        load=WorkerLoad(num_free_blocks=8, num_free_slots=2, num_waiting=0, num_running=0),
    )
