"""Reservations that wait for memory: first come, first served, each until its own deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from common.runtime.clock import Deadline
from common.worker.core.blocks import MemoryNeed, Reservation
from common.worker.replica import Replica

Placed: TypeAlias = tuple[Replica, Reservation]


@dataclass(slots=True)
class _Waiter:
    need: MemoryNeed
    placed: asyncio.Future[Placed | None]


class WaitingLine:
    """Whoever is first in line holds up all others, however small: so a large one gets its turn, too.

    `reserve` takes what is needed now, or returns None. Call `serve` whenever memory has come back.
    """

    def __init__(self, reserve: Callable[[MemoryNeed], Placed | None]) -> None:
        self._reserve = reserve
        self._waiters: dict[str, _Waiter] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, handoff_id: str, need: MemoryNeed, deadline: Deadline) -> Placed | None:
        """Memory for a handoff, at once or when it is its turn; None after the deadline, `drop` or `close`."""
        if not self._waiters and (placed := self._reserve(need)) is not None:
            return placed
        if self._closed or deadline.passed:
            return None
        waiter = self._waiters[handoff_id] = _Waiter(need, asyncio.get_running_loop().create_future())
        try:
            async with deadline.timeout():
                return await waiter.placed
        except TimeoutError:
            # Its turn may have come in the very moment in which it gave up: what it got must not be lost.
            return waiter.placed.result() if waiter.placed.done() and not waiter.placed.cancelled() else None
        finally:
            if self._waiters.get(handoff_id) is waiter:
                del self._waiters[handoff_id]
                self.serve()

    def serve(self) -> None:
        """Give memory to those in front, as far as it goes."""
        while self._waiters:
            handoff_id, waiter = next(iter(self._waiters.items()))
            if not waiter.placed.done():
                placed = self._reserve(waiter.need)
                if placed is None:
                    return
                waiter.placed.set_result(placed)
            del self._waiters[handoff_id]

    def drop(self, handoff_id: str) -> None:
        """End one wait. Unknown ones are no error."""
        waiter = self._waiters.pop(handoff_id, None)
        if waiter is not None:
            if not waiter.placed.done():
                waiter.placed.set_result(None)
            self.serve()

    def close(self) -> None:
        """End all waits, and let nobody wait any more."""
        self._closed = True
        for handoff_id in tuple(self._waiters):
            waiter = self._waiters.pop(handoff_id)
            if not waiter.placed.done():
                waiter.placed.set_result(None)
