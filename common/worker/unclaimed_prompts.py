"""Prompts that nobody asks to run: the broker is asked what became of them, so that they do not fill the worker until their deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from common.runtime.tasks import BoundedTasks
from common.worker.broker_client import BrokerClient
from common.worker.core.prompts import PromptBuffer
from common.worker.core.table import HandoffTable
from common.worker.core.unclaimed import Needless, Unclaimed, why_needless

MAX_QUESTIONS: Final = 64
"""Questions under way at once, and begun by one look."""

End = Callable[[str, Deadline], Awaitable[object]]
"""Ends a handoff here, and refuses it until then."""


class UnclaimedPrompts:
    """Asks about those of one worker, in the background, and drops what will not be run.

    A prompt is uploaded before its request is submitted: if the submit is refused or never comes, or the handoff fails and its release
    is not heard, nobody else takes the prompt back. Its handoff is refused until its deadline then: a late order to run is answered
    with CANCELLED. While no broker answers, prompts stay.
    """

    def __init__(
        self,
        broker: BrokerClient,
        prompts: PromptBuffer,
        table: HandoffTable,
        clock: Clock,
        log: Log,
        *,
        metrics: Metrics,
        group: asyncio.TaskGroup,
        end: End,
    ) -> None:
        self._broker = broker
        self._prompts = prompts
        self._table = table
        self._clock = clock
        self._log = log
        self._end = end
        self._questions = BoundedTasks(group, name="unclaimed", limit=MAX_QUESTIONS, on_error=self._failed)
        self._dropped = metrics.counter(
            "worker_dropped_prompts_total",
            "Prompts dropped before their deadline because nobody would ask to run them, by what the broker said of their handoff.",
            ("reason",),
        )
        for reason in Needless:
            self._dropped.labels(reason)

    def look(self) -> None:
        """Begin to ask about the prompts that are due, as far as there is room for questions; the others wait for the next look."""
        room = MAX_QUESTIONS - self._questions.running
        for unclaimed in self._prompts.take_unclaimed(self._clock.monotonic(), limit=room):
            self._questions.try_start(partial(self._settle, unclaimed))

    async def _settle(self, unclaimed: Unclaimed) -> None:
        handoff_id = unclaimed.handoff_id
        reason = why_needless(handoff_id, await self._broker.outcome_of(handoff_id))
        # Meanwhile it may have been asked to run, been released, or come again.
        if reason is None or not self._prompts.is_still(unclaimed) or self._table.get(handoff_id) is not None:
            return
        self._log.info("prompt_dropped", handoff_id=handoff_id, reason=reason)
        self._dropped.labels(reason).inc()
        await self._end(handoff_id, Deadline(self._clock, unclaimed.deadline))

    def _failed(self, name: str, error: Exception) -> None:
        self._log.error("task_failed", task=name, error=repr(error), exc_info=error)
