"""The lease on a real server: expiry by its clock, and what happens when it freezes, dies or loses its store.

The same in memory and in virtual time: `tests/unit/test_bus_lease.py`.
"""

import asyncio
import itertools
from unittest.mock import Mock

from common.bus.lease import Lease, fence_of_holder
from common.bus.port import BucketConfig, Bus
from common.bus.server import NatsServer
from common.runtime.clock import SystemClock
from contracts.leases import LeaseValue
from tests.contract.bus_world import NatsWorld, soon, until, value_of

TTL_S = 2.0
CONFIG = BucketConfig(name="LEASES", ttl_s=TTL_S)
_starts = itertools.count()


async def candidate(bus: Bus) -> Lease:
    """One who wants the lease."""
    bucket = await bus.ensure_bucket(CONFIG)
    name = f"start-{next(_starts)}"
    return Lease(bucket, SystemClock(), Mock(), key="broker.0", value=LeaseValue(holder="b", start=name), ttl_s=TTL_S)


def held(candidate: Lease) -> int | None:
    """The fence of the term that is held now."""
    return None if candidate.term is None else candidate.term.fence


def last_revision(candidate: Lease) -> int:
    """The revision of the last renewal; 0 without a term."""
    return 0 if candidate.term is None else candidate.term.revision


async def test_a_lease_is_kept_over_many_ttls_and_passes_on_when_its_holder_is_gone(
    own_nats_server: NatsServer,
) -> None:
    """Renewals keep it; a holder that stops without a word is followed once the server has forgotten it."""
    breakable = NatsWorld(own_nats_server)
    async with breakable.open() as one, breakable.open() as two, asyncio.TaskGroup() as tasks:
        first, second = await candidate(one), await candidate(two)
        term = await soon(first.acquire())
        keeping = tasks.create_task(first.keep(), name="keep")
        waiting = tasks.create_task(second.acquire(), name="wait")
        await until(lambda: value_of(held(first) is not None and last_revision(first) >= term.revision + 5))
        assert not waiting.done()  # more than a ttl has passed
        assert await fence_of_holder(await two.ensure_bucket(CONFIG), "broker.0") == term.fence
        keeping.cancel()
        following = await soon(waiting)
        assert held(first) is None
        assert following.fence > term.fence


async def test_a_frozen_server_ends_the_term_before_anybody_can_begin_another(own_nats_server: NatsServer) -> None:
    """The holder steps down while the server stands still; after the thaw somebody leads, with a larger fence."""
    breakable = NatsWorld(own_nats_server)
    async with breakable.open() as one, breakable.open() as two:
        first, second = await candidate(one), await candidate(two)
        term = await soon(first.acquire())
        await breakable.freeze()
        assert await soon(first.keep())
        assert first.term is None
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(each.acquire(), name="wait") for each in (first, second)]
            await breakable.thaw()
            await until(lambda: value_of(any(task.done() for task in waiting)))
            assert sum(each.term is not None for each in (first, second)) == 1
            following = next(task for task in waiting if task.done()).result()
            assert following.fence > term.fence
            for task in waiting:
                task.cancel()


async def test_a_short_outage_does_not_cost_the_lease(own_nats_server: NatsServer) -> None:
    """The server dies and comes back within the term: the holder renews, and is the same one."""
    breakable = NatsWorld(own_nats_server)
    async with breakable.open() as bus, asyncio.TaskGroup() as tasks:
        bucket = await bus.ensure_bucket(BucketConfig(name="LONG", ttl_s=60.0))
        value = LeaseValue(holder="b", start="s")
        holder = Lease(bucket, SystemClock(), Mock(), key="k", value=value, ttl_s=8.0)
        term = await soon(holder.acquire())
        keeping = tasks.create_task(holder.keep(), name="keep")
        await breakable.go_down()
        await breakable.come_back()
        await soon(bus.reconnected(0))
        await until(lambda: value_of(last_revision(holder) > term.revision))
        assert held(holder) == term.fence
        keeping.cancel()


async def test_a_wiped_store_ends_the_term_and_the_next_one_has_a_larger_fence(own_nats_server: NatsServer) -> None:
    """A fence of revisions alone would repeat itself."""
    breakable = NatsWorld(own_nats_server)
    async with breakable.open() as bus:
        holder = await candidate(bus)
        before = await soon(holder.acquire())
        await SystemClock().sleep(1.1)  # a life of the store is told from the next by the second of its beginning
        await breakable.go_down()
        await breakable.come_back(wiped=True)
        await soon(bus.reconnected(0))
        assert await soon(holder.keep())
        after = await soon(holder.acquire())
        assert after.fence > before.fence
