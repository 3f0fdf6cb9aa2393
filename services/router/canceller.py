"""Taking attempts back: the workers are told to stop, and the broker until it has heard of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from common.bus.errors import BusError
from common.bus.port import Bus
from common.bus.rpc import was_not_looked_at
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.pauses import pauses
from common.runtime.tasks import BoundedTasks
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import CodecError, ErrorCode
from contracts.requests import (
    Accepted,
    Answer,
    CancelRequest,
    CancelWork,
    FinishReason,
    Refused,
)
from contracts.subjects import BrokerVerb
from services.router.core.placement import workers_of
from services.router.dispatch import Attempt, Submission

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 1.0
_MAX_UNHEARD: Final = 1024
MAX_LATE_CANCELS: Final = 1024
"""Cancels that may go on behind their `timeout_s`: there has to be room for those of clients that leave now."""
_LATE_PAUSE_S: Final = 3.0
_ON_ITS_WAY_S: Final = 5.0
"""How long a submit that nobody has answered may still be on its way to a broker that answers other questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recall:
    """What it takes to take an attempt back. It may have to be kept for long, so it is without the attempt's prompt."""

    request_id: str
    hints: tuple[str, ...]
    request: CancelRequest
    submission: Submission
    deadline: Deadline


class Canceller:
    """Takes attempts back in the background: whoever wanted them has gone, and must not be able to interrupt this.

    The broker sees to it that every worker lets go; the hints to the workers only stop their computing sooner. What a hint has
    stopped does not go on, and is held until a broker has heard of it or the request's deadline: as long, and for `timeout_s` at
    least, the broker is told. Hints are not repeated behind `timeout_s`, and so late only `MAX_LATE_CANCELS` go on.
    """

    def __init__(self, bus: Bus, clock: Clock, log: Log, tasks: BoundedTasks, *, timeout_s: float) -> None:
        self._bus = bus
        self._clock = clock
        self._log = log
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._unheard: deque[str] = deque(maxlen=_MAX_UNHEARD)
        self._num_late = 0
        self._closed = False

    def close(self) -> None:
        """Take nothing back any more: the process ends, and the broker cancels what a dead router leaves."""
        self._closed = True

    def cancel(
        self,
        attempt: Attempt,
        submission: Submission,
        deadline: Deadline,
        *,
        reason: str,
        num_tokens: int = 0,
        finish_reason: FinishReason | None = None,
    ) -> None:
        """Begin to take an attempt back, and return at once; `deadline` is the request's.

        `num_tokens` had come; `finish_reason` says that these are all.
        """
        request_id = attempt.job.request_id
        recall = _Recall(
            request_id=request_id,
            hints=tuple(subjects.cancel(worker.worker_id, request_id) for worker in workers_of(attempt.route)),
            request=CancelRequest(
                handoff_id=attempt.handoff_id, reason=reason, num_tokens=num_tokens, finish_reason=finish_reason
            ),
            submission=submission,
            deadline=deadline,
        )
        started = not self._closed and self._tasks.try_start(lambda: self._cancel(recall))
        if not started:
            self._log.error("cancel_left_out", handoff_id=attempt.handoff_id, reason=reason)

    async def _cancel(self, recall: _Recall) -> None:
        soon, unknown_until = Deadline.after(self._clock, self._timeout_s), None
        if recall.submission is Submission.NONE:
            await self._hint_once(recall, soon)
            return
        await self._hint(recall)
        latest = max(soon, recall.deadline, key=lambda each: each.at)
        is_late = False
        try:
            for pause_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
                answer = await self._ask_broker(recall.request, latest)
                if isinstance(answer, Refused) and answer.error.code is ErrorCode.UNKNOWN_HANDOFF:
                    # If the submit may be on its way still, not to know of it is no answer: for a while.
                    unknown_until = unknown_until or Deadline.after(self._clock, _ON_ITS_WAY_S)
                    if recall.submission is Submission.ACCEPTED or unknown_until.passed:
                        return
                elif answer is not None:
                    return
                await self._clock.sleep(min(_LATE_PAUSE_S if is_late else pause_s, latest.remaining))
                if latest.passed or (soon.passed and not is_late and self._num_late >= MAX_LATE_CANCELS):
                    break
                if not soon.passed:
                    await self._hint(recall)
                elif not is_late:
                    is_late = True
                    self._num_late += 1
        finally:
            self._num_late -= is_late
        self._note_unheard(recall)

    def _note_unheard(self, recall: _Recall) -> None:
        """Log it once a request: its attempts have the same cause."""
        request_id, request = recall.request_id, recall.request
        if request_id not in self._unheard:
            self._unheard.append(request_id)
            self._log.error(
                "cancel_not_heard", request_id=request_id, handoff_id=request.handoff_id, reason=request.reason
            )

    async def _ask_broker(self, request: CancelRequest, deadline: Deadline) -> Accepted | Refused | None:
        """What the broker says to it; None if it has not heard, or was too busy to look at it."""
        subject = subjects.broker_rpc(BrokerVerb.CANCEL)
        try:
            reply = await self._bus.request(subject, encode(request), timeout=min(1.0, deadline.remaining))
            answer: Accepted | Refused = decode(reply.data, Answer)  # type: ignore[arg-type]  # a union is not a type
        except (BusError, CodecError):
            return None
        return None if was_not_looked_at(answer) else answer

    async def _hint_once(self, recall: _Recall, deadline: Deadline) -> None:
        """Hint, and again while the bus does not take it: no broker will tell the workers."""
        for pause_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            if await self._hint(recall) or deadline.passed:
                return
            await self._clock.sleep(pause_s)

    async def _hint(self, recall: _Recall) -> bool:
        """Whether the bus has taken it for all workers."""
        data = encode(CancelWork(handoff_id=recall.request.handoff_id))
        for subject in recall.hints:
            try:
                await self._bus.publish(subject, data)
            except BusError:
                return False
        return True
