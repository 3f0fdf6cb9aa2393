"""One attempt of a request on its way out: the prompt to the worker, the request to the broker, and taking it back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from common.bus.errors import BusError, BusTimeout, BusUnavailable
from common.bus.port import Bus
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.tasks import BoundedTasks
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import CodecError, ErrorCode, PdmeshError
from contracts.requests import (
    Accepted,
    Answer,
    CancelRequest,
    CancelWork,
    DisaggregatedRoute,
    FinishReason,
    MixedRoute,
    Refused,
    Route,
    SamplingParams,
    SubmitRequest,
)
from contracts.subjects import BrokerVerb, WorkerVerb
from contracts.workers import WorkerRole
from services.router.core.placement import workers_of
from services.router.core.prompt_frames import prompt_frames

_DELIVERIES: Final = 3
_CANCEL_PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of ours: one answer to one prompt. `packed` are the prompt's ids as u32, `digest` is their hash."""

    request_id: str
    packed: bytes
    digest: str
    sampling: SamplingParams
    stops: tuple[str, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.packed) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try to serve a job, over one route."""

    job: Job
    number: int
    handoff_id: str
    route: Route


class ExplicitRefusal(PdmeshError):  # noqa: N818 - an answer, not a mishap
    """The peer answered that it does not take the attempt: nothing of it lives there."""


class Submission(StrEnum):
    """What the broker knows of an attempt."""

    NONE = "none"
    MAYBE = "maybe"
    ACCEPTED = "accepted"


class Dispatcher:
    """Sends attempts out. Sending the same message again is delivery, and is done here; another attempt is not."""

    def __init__(self, bus: Bus, *, router_id: str, call_timeout_s: float) -> None:
        self._bus = bus
        self._router_id = router_id
        self._call_timeout_s = call_timeout_s

    async def send_prompt(self, attempt: Attempt, deadline: Deadline) -> None:
        """Hand the prompt to the worker that will compute it. Raises `PdmeshError` if it is refused or unreachable."""
        match attempt.route:
            case DisaggregatedRoute(prefill=worker):
                subject = subjects.worker_rpc(WorkerRole.PREFILL, worker.worker_id, WorkerVerb.PROMPT)
            case MixedRoute(mixed=worker):
                subject = subjects.worker_rpc(WorkerRole.MIXED, worker.worker_id, WorkerVerb.PROMPT)
        job = attempt.job
        frames = prompt_frames(
            job.packed, handoff_id=attempt.handoff_id, digest=job.digest, timeout_ms=deadline.remaining_ms
        )
        for frame in frames:
            await self._call(subject, frame, deadline)

    async def submit(self, attempt: Attempt, deadline: Deadline) -> None:
        """Give the request to the broker. Raises `PdmeshError` if it is refused or the broker is unreachable."""
        job = attempt.job
        request = SubmitRequest(
            handoff_id=attempt.handoff_id,
            request_id=job.request_id,
            attempt=attempt.number,
            router_id=self._router_id,
            route=attempt.route,
            num_prompt_tokens=job.num_prompt_tokens,
            prompt_hash=job.digest,
            sampling=job.sampling,
            timeout_ms=deadline.remaining_ms,
        )
        await self._call(subjects.broker_rpc(BrokerVerb.SUBMIT), request, deadline)

    async def _call(self, subject: str, message: msgspec.Struct, deadline: Deadline) -> None:
        data = encode(message)
        for delivery in range(1, _DELIVERIES + 1):
            try:
                reply = await self._bus.request(subject, data, timeout=min(self._call_timeout_s, deadline.remaining))
            except BusTimeout:
                if delivery == _DELIVERIES:
                    raise
            except BusUnavailable as error:
                if delivery == _DELIVERIES or not error.maybe_done:
                    raise
            else:
                answer: Accepted | Refused = decode(reply.data, Answer)  # type: ignore[arg-type]  # a union is not a type
                if isinstance(answer, Refused):
                    raise ExplicitRefusal(answer.error.message, code=answer.error.code, param=answer.error.param)
                return


class Canceller:
    """Takes attempts back in the background: whoever wanted them has gone, and must not be able to interrupt this.

    The broker sees to it that every worker lets go; the hints to the workers only stop their computing sooner.
    """

    def __init__(self, bus: Bus, clock: Clock, log: Log, tasks: BoundedTasks, *, timeout_s: float) -> None:
        self._bus = bus
        self._clock = clock
        self._log = log
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._closed = False

    def close(self) -> None:
        """Take nothing back any more: the process ends, and the broker cancels what a dead router leaves."""
        self._closed = True

    def cancel(
        self,
        attempt: Attempt,
        submission: Submission,
        *,
        reason: str,
        num_tokens: int = 0,
        finish_reason: FinishReason | None = None,
    ) -> None:
        """Begin to take an attempt back, and return at once. `num_tokens` had come; `finish_reason` says that these are all."""
        request = CancelRequest(
            handoff_id=attempt.handoff_id, reason=reason, num_tokens=num_tokens, finish_reason=finish_reason
        )
        started = not self._closed and self._tasks.try_start(lambda: self._cancel(attempt, submission, request))
        if not started:
            self._log.error("cancel_left_out", handoff_id=attempt.handoff_id, reason=reason)

    async def _cancel(self, attempt: Attempt, submission: Submission, request: CancelRequest) -> None:
        await self._hint(attempt)
        if submission is Submission.NONE:
            return
        deadline = Deadline.after(self._clock, self._timeout_s)
        while not deadline.passed:
            if await self._ask_broker(request, submission, deadline):
                return
            await self._clock.sleep(min(_CANCEL_PAUSE_S, deadline.remaining))
            await self._hint(attempt)
        self._log.error("cancel_not_heard", handoff_id=attempt.handoff_id, reason=request.reason)

    async def _ask_broker(self, request: CancelRequest, submission: Submission, deadline: Deadline) -> bool:
        """Say whether the broker has heard. If the submit may be on its way still, not to know of it is no answer."""
        subject = subjects.broker_rpc(BrokerVerb.CANCEL)
        try:
            reply = await self._bus.request(subject, encode(request), timeout=min(1.0, deadline.remaining))
            answer: Accepted | Refused = decode(reply.data, Answer)  # type: ignore[arg-type]  # a union is not a type
        except (BusError, CodecError):
            return False
        unknown = isinstance(answer, Refused) and answer.error.code is ErrorCode.UNKNOWN_HANDOFF
        return submission is Submission.ACCEPTED or not unknown

    async def _hint(self, attempt: Attempt) -> None:
        data = encode(CancelWork(handoff_id=attempt.handoff_id))
        for worker in workers_of(attempt.route):
            try:
                await self._bus.publish(subjects.cancel(worker.worker_id, attempt.job.request_id), data)
            except BusError:
                return
