"""How many requests are under way, and whether more may come in."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from common.runtime.clock import Deadline
from contracts.errors import ErrorCode, PdmeshError
from services.router.interruption import Interruptible
from services.router.metrics import RouterMetrics

_DRAINING: Final = "the router is shutting down"


class Admission:
    """Counts choices under way. While draining nothing comes in, and what is in can be told to end."""

    def __init__(self, metrics: RouterMetrics, *, limit: int) -> None:
        self._limit = limit
        self._running = 0
        self._ended = asyncio.Event()
        self._scopes: set[Interruptible] = set()
        self._gauge = metrics.running
        metrics.running_limit.set(limit)
        self.draining = False

    @property
    def running(self) -> int:
        """Choices under way."""
        return self._running

    def check(self) -> None:
        """Raise `PdmeshError` if not even one request may come in: `draining` or `overloaded`."""
        self._check(1)

    @contextmanager
    def enter(self, num_choices: int) -> Iterator[None]:
        """Count choices while the context lasts. Raises as `check` does."""
        self._check(num_choices)
        self._count(num_choices)
        try:
            yield
        finally:
            self._count(-num_choices)

    @contextmanager
    def interruptible(self, scope: Interruptible) -> Iterator[None]:
        """Let the end of draining interrupt this scope while the context lasts."""
        self._scopes.add(scope)
        try:
            yield
        finally:
            self._scopes.discard(scope)

    async def drain(self, deadline: Deadline) -> bool:
        """Let nothing in, and wait for what is in; say whether all of it has ended by the deadline."""
        self.draining = True
        try:
            async with deadline.timeout():
                while self._running:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def interrupt_all(self) -> None:
        """End everything that is in, with an explicit error for each client."""
        for scope in list(self._scopes):
            scope.interrupt(PdmeshError(_DRAINING, code=ErrorCode.DRAINING))

    def _check(self, num_choices: int) -> None:
        if self.draining:
            raise PdmeshError(_DRAINING, code=ErrorCode.DRAINING)
        if self._running + num_choices > self._limit:
            message = f"{self._running} requests are under way; the rule is: at most {self._limit}"
            raise PdmeshError(message, code=ErrorCode.OVERLOADED)

    def _count(self, difference: int) -> None:
        self._running += difference
        self._gauge.set(self._running)
        self._ended.set()
