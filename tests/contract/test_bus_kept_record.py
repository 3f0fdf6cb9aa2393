"""Two starts of one id on every bus, a real server's too: whose record it is, and what becomes of one that is gone."""

import pytest
import structlog

from common.bus.kept_record import KeptRecord
from common.bus.port import BucketConfig, Bus
from common.runtime.lifecycle import EXIT_LEASE_LAPSED, ServiceEnded
from contracts.codec import decode, encode
from contracts.routers import RouterRecord
from tests.contract.bus_world import World, unique


def _start(bus: Bus, config: BucketConfig, name: str) -> KeptRecord:
    value = encode(RouterRecord(router_id="router-0", incarnation=name))
    return KeptRecord(bus, structlog.get_logger(), config, lambda: ("router-0", value))


async def test_a_later_start_takes_the_record_and_the_earlier_one_gives_way(world: World) -> None:
    """A start takes the key when it begins, once; the other one ends at its next write, and its farewell removes nothing."""
    config = BucketConfig(name=unique("KEPT"), ttl_s=60.0)
    async with world.open() as one, world.open() as two:
        first, second = _start(one, config, "i1"), _start(two, config, "i2")
        bucket = await first.open()
        await first.put(bucket)
        await second.open()
        with pytest.raises(ServiceEnded, match="the start i1 gives way to the start i2") as end:
            await first.put(bucket)
        assert end.value.status == EXIT_LEASE_LAPSED
        await first.close()
        await second.put(bucket)
        entry = await bucket.get("router-0")
        assert entry is not None
        assert decode(entry.value, RouterRecord).incarnation == "i2"
        await second.close()
        assert await bucket.get("router-0") is None


async def test_a_record_that_a_stranger_removed_or_wrote_over_comes_back(world: World) -> None:
    """Neither is another start's: whoever keeps it goes on."""
    config = BucketConfig(name=unique("KEPT"), ttl_s=60.0)
    async with world.open() as bus:
        record = _start(bus, config, "i1")
        bucket = await record.open()
        for spoil in (bucket.delete("router-0"), bucket.put("router-0", b"\xff")):
            await spoil
            await record.put(bucket)
            await record.put(bucket)
            entry = await bucket.get("router-0")
            assert entry is not None
            assert decode(entry.value, RouterRecord).incarnation == "i1"
