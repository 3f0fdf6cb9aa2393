"""One handoff in the memory of a broker's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.runtime.clock import Deadline
from contracts.errors import ErrorInfo
from contracts.trace import TraceContext
from services.broker.core.events import Event
from services.broker.core.handoff import Handoff


class Live:
    """One handoff in memory: its state, who waits for its submit, its deadline here, and the trace that it belongs to."""

    def __init__(
        self, feed: Callable[[Live, Event], None], handoff: Handoff, deadline: Deadline, trace: TraceContext | None
    ) -> None:
        self.handoff = handoff
        self.deadline = deadline
        self.trace = trace
        self.admission: asyncio.Future[ErrorInfo | None] = asyncio.get_running_loop().create_future()
        self._feed = feed

    @property
    def ended(self) -> bool:
        """See `Target.ended`."""
        return self.handoff.terminal or self.handoff.forgotten

    def tell(self, event: Event) -> None:
        """See `Target.tell`."""
        self._feed(self, event)
