"""The lease of the brokers, as if one led with a fence that a test chooses: workers believe no other."""

from __future__ import annotations

from contextlib import suppress
from typing import Never

from common.bus.errors import BusError
from common.bus.port import Bus
from common.bus.storage import LEASE_TTL_S, LEASES_CONFIG
from common.runtime.clock import Clock
from contracts import subjects
from contracts.codec import encode
from contracts.leases import LeaseValue


class LeaseHolder:
    """Writes the lease, and again before it expires."""

    def __init__(self, bus: Bus, clock: Clock, *, fence: int = 1) -> None:
        self._bus = bus
        self._clock = clock
        self.fence = fence

    async def lead(self, fence: int) -> None:
        """Begin a term. Raises `BusError`."""
        self.fence = fence
        await self.put()

    async def put(self) -> None:
        """Write the lease. Raises `BusError`."""
        bucket = await self._bus.ensure_bucket(LEASES_CONFIG)
        value = LeaseValue(holder="broker-0", start="made-up", fence=self.fence)
        await bucket.put(subjects.broker_lease(), encode(value))

    async def run(self) -> Never:
        """Renew it, for ever."""
        while True:
            with suppress(BusError):
                await self.put()
            await self._clock.sleep(LEASE_TTL_S / 4)
