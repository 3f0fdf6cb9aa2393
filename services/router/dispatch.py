"""One attempt of a request on its way out: the prompt to the worker, the request to the broker, and taking it back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from common.bus.errors import BusError, BusTimeout, BusUnavailable, NoResponders
from common.bus.port import Bus
from common.bus.rpc import was_not_looked_at
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.pauses import pauses
from common.runtime.tasks import BoundedTasks
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import CodecError, ErrorCode, ErrorInfo, PdmeshError
from contracts.requests import (
    Accepted,
    Answer,
    CancelRequest,
    CancelWork,
    DisaggregatedRoute,
    FinishReason,
    MixedRoute,
    PromptFrame,
    Refused,
    Route,
    SubmitRequest,
)
from contracts.subjects import BrokerVerb, WorkerVerb
from contracts.workers import WorkerRole
from services.router.core.placement import workers_of
from services.router.core.prompt_frames import prompt_frames
from services.router.core.remainder import Remainder

_DELIVERIES: Final = 3
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 1.0
_MAX_UNHEARD: Final = 1024
MAX_LATE_CANCELS: Final = 1024
"""Cancels that may go on behind their `timeout_s`: there has to be room for those of clients that leave now."""
_LATE_PAUSE_S: Final = 3.0
_ON_ITS_WAY_S: Final = 5.0
"""How long a submit that nobody has answered may still be on its way to a broker that answers other questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of ours: one answer to one prompt. `redispatch` says whether it may go on elsewhere once it has begun."""

    request_id: str
    whole: Remainder
    stops: tuple[str, ...]
    redispatch: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try to serve what is left of a job, over one route. The one before, if there was one, failed with `previous_error`."""

    job: Job
    remainder: Remainder
    number: int
    handoff_id: str
    route: Route
    previous_error: ErrorInfo | None = None


class NotTakenError(PdmeshError):
    """No delivery of the attempt can have been taken on: each was refused, or never reached anybody. Nothing of it lives there."""


class Submission(StrEnum):
    """What the broker knows of an attempt."""

    NONE = "none"
    MAYBE = "maybe"
    ACCEPTED = "accepted"


class Dispatcher:
    """Sends attempts out. Sending the same message again is delivery, and is done here; another attempt is not.

    An outage of the bus, or of the broker, is waited out for `outage_patience_s`: it says nothing of the attempt. Each delivery
    names the time that is left then.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        *,
        router_id: str,
        incarnation: str,
        call_timeout_s: float,
        outage_patience_s: float,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._router_id = router_id
        self._incarnation = incarnation
        self._call_timeout_s = call_timeout_s
        self._outage_patience_s = outage_patience_s

    async def send_prompt(self, attempt: Attempt, deadline: Deadline) -> None:
        """Hand the prompt to the worker that will compute it.

        Raises `PdmeshError` if it is refused or unreachable, or if no time is left.
        """
        match attempt.route:
            case DisaggregatedRoute(prefill=worker):
                subject = subjects.worker_rpc(WorkerRole.PREFILL, worker.worker_id, WorkerVerb.PROMPT)
            case MixedRoute(mixed=worker):
                subject = subjects.worker_rpc(WorkerRole.MIXED, worker.worker_id, WorkerVerb.PROMPT)
        asked = attempt.remainder
        frames = prompt_frames(asked.packed, handoff_id=attempt.handoff_id, digest=asked.digest, timeout_ms=0)
        for frame in frames:
            await self._call(subject, frame, deadline, may_be_silent=False)

    async def submit(self, attempt: Attempt, deadline: Deadline) -> None:
        """Give the request to the broker. Raises as `send_prompt` does."""
        asked = attempt.remainder
        request = SubmitRequest(
            handoff_id=attempt.handoff_id,
            request_id=attempt.job.request_id,
            attempt=attempt.number,
            router_id=self._router_id,
            router_incarnation=self._incarnation,
            route=attempt.route,
            num_prompt_tokens=asked.num_prompt_tokens,
            prompt_hash=asked.digest,
            sampling=asked.sampling,
            timeout_ms=0,
            num_delivered_tokens=asked.num_delivered_tokens,
            previous_error=attempt.previous_error,
        )
        await self._call(subjects.broker_rpc(BrokerVerb.SUBMIT), request, deadline, may_be_silent=True)

    async def _call(
        self, subject: str, message: PromptFrame | SubmitRequest, deadline: Deadline, *, may_be_silent: bool
    ) -> None:
        """Deliver a message. `may_be_silent` says that somebody else will answer if nobody does now: the broker has successors.

        Raises `NotTakenError`, and any other `PdmeshError` behind a delivery whose outcome is unknown: a service that has no room for
        the repeat, or nobody who hears it, says nothing of what the first one began.
        """
        patience = deadline.capped(self._outage_patience_s)
        unanswered = 0
        may_be_taken = False
        waits = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            timeout_ms = deadline.remaining_ms
            if timeout_ms < 1:
                text = "the request's time was over before it could be handed on"
                raise PdmeshError(text, code=ErrorCode.DEADLINE_EXCEEDED)
            data = encode(msgspec.structs.replace(message, timeout_ms=timeout_ms))
            try:
                reply = await self._bus.request(subject, data, timeout=min(self._call_timeout_s, deadline.remaining))
            except BusTimeout:
                unanswered += 1
                may_be_taken = True
                if unanswered == _DELIVERIES:
                    raise
                continue
            except (BusUnavailable, NoResponders) as error:
                may_be_taken = may_be_taken or (isinstance(error, BusUnavailable) and error.maybe_done)
                if patience.passed or (isinstance(error, NoResponders) and not may_be_silent):
                    if may_be_taken:
                        raise
                    raise NotTakenError(error.message, code=error.code) from error
            else:
                answer: Accepted | Refused = decode(reply.data, Answer)  # type: ignore[arg-type]  # a union is not a type
                if isinstance(answer, Refused):
                    kind = PdmeshError if may_be_taken else NotTakenError
                    raise kind(answer.error.message, code=answer.error.code, param=answer.error.param)
                return
            await self._clock.sleep(min(next(waits), max(_FIRST_PAUSE_S, patience.remaining)))


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
