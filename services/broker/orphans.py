"""Handoffs that a worker holds though no broker goes on with them: their memory is taken back.

A broker may die between the last message to a worker and the release; its record may be gone, or say that all is over. A worker
that was cut off may be taken for gone, and come back as the same start with all that it held. So each start of a worker that is met
in a term of leadership is asked what it holds: once, and once more for each release that it did not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from common.runtime.tasks import BoundedTasks
from contracts import subjects
from contracts.errors import CodecError, PdmeshError
from contracts.handoff import HandoffList, HandoffRecord, ListHandoffs, Released, ReleaseHandoff
from contracts.requests import Accepted, Refused, WorkerRef
from contracts.subjects import WorkerVerb
from contracts.workers import WorkerRole
from services.broker.calls import Calls
from services.broker.core import messages
from services.broker.core.deadline_text import seconds_left
from services.broker.core.handoff import Handoff
from services.broker.records import Records

_ASK_S: Final = 30.0
_MAX_ASKED_AT_ONCE: Final = 256
_MAX_JUDGED_AT_ONCE: Final = 16
_MAX_MET: Final = 4096


class Orphans:
    """Asks workers, and releases what is nobody's. `find` is asked for what this broker remembers of a handoff.

    What a broker that stood still had begun when this term began already is given to `take_left`, with its revision.
    """

    def __init__(
        self,
        calls: Calls,
        records: Records,
        clock: Clock,
        log: Log,
        *,
        metrics: Metrics,
        group: asyncio.TaskGroup,
        fence: int,
        tombstone_margin_ms: int,
        find: Callable[[str], Handoff | None],
        take_left: Callable[[HandoffRecord, int], object],
    ) -> None:
        self._calls = calls
        self._records = records
        self._clock = clock
        self._log = log
        self._fence = fence
        self._tombstone_margin_ms = tombstone_margin_ms
        self._find = find
        self._take_left = take_left
        self._met: dict[WorkerRef, None] = {}
        self._under_way: set[WorkerRef] = set()
        self._tasks = BoundedTasks(group, name="orphans", limit=_MAX_ASKED_AT_ONCE, on_error=self._failed)
        self._released = metrics.counter(
            "broker_orphans_released_total", "Handoffs that a worker held and nobody needed there any more."
        )

    def met(self, role: WorkerRole, worker: WorkerRef) -> None:
        """Note a worker's sign of life. The first of each start asks it; whoever finds no room is asked with its next one."""
        if worker in self._met or worker in self._under_way:
            return
        if not self._tasks.try_start(partial(self._meet, role, worker)):
            return
        self._under_way.add(worker)
        self._met[worker] = None
        while len(self._met) > _MAX_MET:
            del self._met[next(iter(self._met))]

    def expect(self, worker: WorkerRef) -> None:
        """Note that a start may hold what it was to release: its next sign of life asks it."""
        self._met.pop(worker, None)

    async def _meet(self, role: WorkerRole, worker: WorkerRef) -> None:
        try:
            await self._survey(role, worker)
        finally:
            self._under_way.discard(worker)

    async def _survey(self, role: WorkerRole, worker: WorkerRef) -> None:
        subject = subjects.worker_rpc(role, worker.worker_id, WorkerVerb.HANDOFFS)
        deadline = Deadline.after(self._clock, _ASK_S)
        try:
            answer = await self._calls.ask(
                subject, lambda: ListHandoffs(fence=self._fence), HandoffList | Refused, deadline, patient=True
            )
        except PdmeshError as error:
            self._log.info("handoffs_not_listed", worker_id=worker.worker_id, error_code=str(error.code))
            self.expect(worker)
            return
        if isinstance(answer, Refused):  # a newer broker leads, or it could not tell
            self.expect(worker)
            return
        if answer.incarnation != worker.incarnation:
            return  # that start will be met
        at_once = asyncio.Semaphore(_MAX_JUDGED_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            judged = [
                group.create_task(self._judged(role, worker, handoff_id, at_once), name=f"orphan-{handoff_id}")
                for handoff_id in answer.handoff_ids
            ]
        if not all(task.result() for task in judged):
            self.expect(worker)

    async def _judged(self, role: WorkerRole, worker: WorkerRef, handoff_id: str, at_once: asyncio.Semaphore) -> bool:
        """Judge one of those that a worker holds, beside others: a release may take its time. False if it has to be judged again."""
        try:
            async with at_once:
                await self._judge(role, worker, handoff_id)
        except PdmeshError as error:
            self._log.info(
                "orphan_not_released",
                handoff_id=handoff_id,
                worker_id=worker.worker_id,
                error_code=str(error.code),
            )
            return False
        return True

    async def _judge(self, role: WorkerRole, worker: WorkerRef, handoff_id: str) -> None:
        message = self._release_of(role, self._find(handoff_id)) or await self._release_by_record(handoff_id)
        if message is None:
            return
        subject = subjects.worker_rpc(role, worker.worker_id, WorkerVerb.RELEASE)
        answer = await self._calls.ask(
            subject, lambda: message, Accepted | Released | Refused, Deadline.after(self._clock, _ASK_S), patient=True
        )
        if isinstance(answer, Refused):
            raise PdmeshError.from_info(answer.error)
        self._released.inc()
        self._log.info("orphan_released", handoff_id=handoff_id, worker_id=worker.worker_id, reason=message.reason)

    def _release_of(self, role: WorkerRole, handoff: Handoff | None) -> ReleaseHandoff | None:
        """The release of what this broker remembers, once it expects no more of this worker."""
        if handoff is None or not (role in handoff.settled or (handoff.terminal and handoff.forgotten)):
            return None
        return messages.release(handoff, "its release was not heard", self._clock.monotonic_ns())

    async def _release_by_record(self, handoff_id: str) -> ReleaseHandoff | None:
        """The release of what no broker goes on with, as the bucket says. Raises `BusError`.

        What cannot be read cannot be judged, and keeps its memory until its deadline.
        """
        if self._goes_on(handoff_id):
            return None
        try:
            kept = await self._records.find(handoff_id)
        except CodecError as error:
            self._log.info("orphan_not_judged", handoff_id=handoff_id, error_code=str(error.code))
            return None
        if self._goes_on(handoff_id):
            return None
        if kept is not None and not kept[0].state.terminal:
            if self._find(handoff_id) is None:
                self._take_left(*kept)
            return None
        left_ms = 0 if kept is None else round(1e3 * seconds_left(kept[0].deadline_at, self._clock.wall_time()))
        reason = "no broker knows of it" if kept is None else f"it is {kept[0].state}"
        return ReleaseHandoff(handoff_id=handoff_id, reason=reason, tombstone_ms=left_ms + self._tombstone_margin_ms)

    def _goes_on(self, handoff_id: str) -> bool:
        """Whether this broker has a handoff in its own hands: it may have been submitted since the worker was asked."""
        handoff = self._find(handoff_id)
        return handoff is not None and not handoff.forgotten

    def _failed(self, name: str, error: Exception) -> None:
        self._log.error("orphans_failed", task=name, error=repr(error), exc_info=error)
