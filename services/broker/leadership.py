"""Of the brokers of one partition one leads: it works while it holds the lease, and the others stand by.

A term of leadership is a broker of its own. It ends with everything that it had under way; the next leader, here or
elsewhere, takes over from the records, and workers obey its larger fence only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Never

from common.bus.errors import BusError, BusTimeout, BusUnavailable
from common.bus.lease import Lease
from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from common.runtime.tasks import obey_cancel
from services.broker.service import Broker

_PAUSE_S: Final = 0.5

OpenTerm = Callable[[asyncio.TaskGroup, int, Lease], Awaitable[Broker]]
"""Opens a broker whose tasks live in the group, with the fence of its term and the lease that it holds."""


class _TermOver(Exception):  # noqa: N818 - ends the group of a term from inside; never leaves this module
    """The lease is lost."""


class Leadership:
    """Runs one broker a term. Not for use after `release`."""

    def __init__(
        self, open_lease: Callable[[], Awaitable[Lease]], open_term: OpenTerm, clock: Clock, log: Log, metrics: Metrics
    ) -> None:
        self._open_lease = open_lease
        self._open_term = open_term
        self._clock = clock
        self._log = log
        self._lease: Lease | None = None
        self._settled = asyncio.Event()
        self._over = asyncio.Event()
        self._draining = False
        self._standing_by_for: str | None = None
        self._begun: int | None = None
        self.broker: Broker | None = None
        """The one that works now; None while another process leads, or nobody."""
        metrics.gauge("broker_leads", "1 while this process leads its partition.").set_function(
            lambda: float(self.broker is not None)
        )
        self._terms = metrics.counter("broker_terms_total", "Terms of leadership that began in this process.")

    async def run(self) -> None:
        """Lead whenever the lease can be had, for ever. Raises StorageRefused for a server that cannot keep it."""
        lease = self._lease = await self._open_lease()
        while True:
            self._standing_by_for = None
            term = await lease.acquire(self._stand_by)
            if self._draining:
                return  # whoever has no work yet begins none
            self._over.clear()
            self._terms.inc()
            self._begun = term.fence
            self._log.info("leadership_began", fence=term.fence)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._keep(lease), name="lease")
                    self.broker = await self._open_term(group, term.fence, lease)
                    self._settled.set()
                    await asyncio.Event().wait()  # see `obey_cancel`: the term ends by a failure or a cancel
            except* _TermOver:
                self._log.error("leadership_lost", fence=term.fence)
            except* (BusUnavailable, BusTimeout) as errors:  # the term could not be opened: let others try, then again
                self._log.error("leadership_not_opened", fence=term.fence, error=repr(errors.exceptions))
                await self._give_back(lease)
            finally:
                self.broker = None
                self._over.set()
            obey_cancel()
            await self._clock.sleep(_PAUSE_S)

    async def wait_settled(self) -> None:
        """Return once this process leads, or has found that another one does."""
        await self._settled.wait()

    async def drain(self) -> None:
        """Let the broker that leads end its work; one that stands by has none. It leads until `release`, and takes what comes."""
        self._draining = True
        if self.broker is None:
            return
        async with asyncio.TaskGroup() as group:
            ends = [
                group.create_task(self.broker.drain(), name="drain"),
                group.create_task(self._over.wait(), name="term-over"),  # then the work is another one's
            ]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for each in ends:
                each.cancel()

    async def release(self) -> None:
        """Give the lease back after the end of `run`, so that whoever stands by need not wait for it to expire."""
        if self._lease is not None:
            held = self._lease.term
            await self._give_back(self._lease)
            if held is not None and held.fence == self._begun:
                self._log.info("leadership_ended", fence=held.fence)

    def _stand_by(self, leader: str) -> None:
        """Another process leads; that is told once, and again when a third one does."""
        self._settled.set()
        if leader != self._standing_by_for:
            self._standing_by_for = leader
            self._log.info("standing_by", leader=leader or "unknown")

    async def _keep(self, lease: Lease) -> Never:
        reason = await lease.keep()
        self._log.error("lease_lost", reason=reason)
        raise _TermOver

    async def _give_back(self, lease: Lease) -> None:
        try:
            await lease.release()
        except BusError as error:  # it expires by itself
            self._log.info("lease_not_released", reason=error.message)
