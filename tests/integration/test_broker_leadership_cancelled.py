"""A broker that is told to stop at the moment at which its term fails: it stops, and begins no other one."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from common.bus.errors import BusTimeout
from common.bus.lease import Lease
from common.bus.memory import MemoryServer
from common.bus.storage import LEASE_TTL_S
from common.runtime.metrics import Metrics
from common.runtime.offload import inline
from services.broker.app import make_leadership
from services.broker.service import Broker
from services.broker.settings import BrokerSettings
from tests.integration.broker_world import World, in_world


@pytest.mark.parametrize("fails", ["on its own", "because it is stopped"])
def test_a_term_that_fails_while_its_broker_is_stopped_is_the_last_one(fails: str) -> None:
    """The errors of a term's tasks come up instead of the cancel: the process must end all the same, and lead nothing again."""

    async def scenario(world: World, server: MemoryServer) -> None:
        metrics = Metrics()
        leadership = make_leadership(
            BrokerSettings(),
            bus=server.connect(),
            clock=world.clock,
            log=structlog.get_logger(),
            metrics=metrics,
            offload=inline,
        )
        open_term, trouble = leadership._open_term, asyncio.Event()

        async def fail() -> None:
            try:
                await trouble.wait()
            finally:
                raise BusTimeout("no answer")  # whether it was cancelled or not

        async def open_troubled(group: asyncio.TaskGroup, fence: int, lease: Lease) -> Broker:
            if b"terms_total 1.0" in metrics.exposition():
                group.create_task(fail(), name="trouble")
            return await open_term(group, fence, lease)

        leadership._open_term = open_troubled
        running = world.group.create_task(leadership.run(), name="leadership")
        await world.until(lambda: leadership.broker is not None)
        if fails == "on its own":
            trouble.set()
            await asyncio.sleep(0)  # the failure is known to the group, and not yet to whoever runs it
        running.cancel()
        await asyncio.wait([running], timeout=2 * LEASE_TTL_S)
        assert running.cancelled()
        assert leadership.broker is None
        assert b"pdmesh_broker_terms_total 1.0" in metrics.exposition()

    in_world(scenario, with_broker=False)
