"""What drives handoffs: each event is one step of one of them, and what the step wants is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from common.runtime.tasks import BoundedTasks
from common.runtime.trace import within
from services.broker.core.effects import AnswerSubmit, Effect, Forget, Measured, Publish
from services.broker.core.events import Event, RecordUnwritten
from services.broker.core.step import step
from services.broker.live import Live, LiveHandoffs, Outcomes
from services.broker.observer import Observer
from services.broker.performer import Job, Performer


class Driver:
    """Takes events of all handoffs in one order. What takes time is done in tasks of `group`, at most `max_tasks` at once.

    `on_unwritten` hears of each write whose outcome is unknown.
    """

    def __init__(
        self,
        handoffs: LiveHandoffs,
        performer: Performer,
        observer: Observer,
        clock: Clock,
        log: Log,
        *,
        group: asyncio.TaskGroup,
        max_tasks: int,
        on_unwritten: Callable[[], None],
    ) -> None:
        self._handoffs = handoffs
        self._performer = performer
        self._observer = observer
        self._clock = clock
        self._log = log
        self._on_unwritten = on_unwritten
        self._tasks = BoundedTasks(group, name="effect", limit=max_tasks, on_error=self._failed)

    @property
    def num_running(self) -> int:
        """Things that are being done."""
        return self._tasks.running

    def begin(self, live: Live, effects: tuple[Effect, ...]) -> None:
        """Do what the first step of a handoff wants."""
        self._start_each(live, self._perform(live, effects))

    def feed(self, live: Live, event: Event) -> None:
        """One step of one handoff."""
        self._start_each(live, self._step(live, event))

    def _step(self, live: Live, event: Event) -> list[Job]:
        """One step of one handoff; returns what is to be done about it that takes time."""
        before = live.handoff
        live.handoff, effects = step(before, event)
        if isinstance(event, RecordUnwritten):
            self._on_unwritten()
        self._observer.moved(before, live.handoff)
        jobs = self._perform(live, effects)
        live.stepped()
        return jobs

    def _perform(self, live: Live, effects: tuple[Effect, ...]) -> list[Job]:
        """Do what a step wants, in the handoff's own trace, whosever message made the step. Returns what takes time."""
        with within(live.trace):
            return self._perform_each(live, effects)

    def _perform_each(self, live: Live, effects: tuple[Effect, ...]) -> list[Job]:
        jobs: list[Job] = []
        for effect in effects:
            match effect:
                case AnswerSubmit(error=error):
                    if not live.admission.done():
                        live.admission.set_result(error)
                case Publish():
                    self._observer.saw(live.handoff, effect)
                case Measured():
                    self._observer.measured(live.handoff, effect)
                case Forget():
                    self._observer.over(live.handoff)
                    self._handoffs.ended(live, self._clock.monotonic())
                case _:
                    jobs.append(effect)
        return jobs

    def _start_each(self, live: Live, jobs: Iterable[Job]) -> None:
        """Do these things side by side, in the handoff's own trace."""
        with within(live.trace):
            for job in jobs:
                if not self._tasks.try_start(partial(self._work, live, job)):
                    # Each handoff has room for all of its effects: to be here is a mistake of ours, and must be heard of.
                    self._log.error("effect_dropped", handoff_id=live.handoff.handoff_id, effect=type(job).__name__)

    async def _work(self, live: Live, job: Job) -> None:
        """Do one thing, then the first that follows from its outcome, and so on: a task for each would cost more than most do."""
        outcomes = Outcomes(live)
        following = [job]
        while following:
            await self._performer.perform(outcomes, following[0])
            following = []
            for event in outcomes.taken():
                following += self._step(live, event)
            self._start_each(live, following[1:])

    def _failed(self, name: str, error: Exception) -> None:
        self._log.error("effect_failed", task=name, error=repr(error), exc_info=error)
