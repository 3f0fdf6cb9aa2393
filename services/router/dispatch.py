"""One attempt of a request on its way out: the prompt to the worker, and the request to the broker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from common.bus.errors import BusTimeout, BusUnavailable, NoResponders
from common.bus.port import Bus
from common.runtime.clock import Clock, Deadline
from common.runtime.pauses import pauses
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.requests import (
    Accepted,
    Answer,
    DisaggregatedRoute,
    MixedRoute,
    PromptFrame,
    Refused,
    Route,
    SubmitRequest,
)
from contracts.subjects import BrokerVerb, WorkerVerb
from contracts.workers import WorkerRole
from services.router.core.prompt_frames import prompt_frames
from services.router.core.remainder import Remainder

_DELIVERIES: Final = 3
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 1.0


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
    names the time that is left then. The default outlasts a takeover on one NATS server, not one on a cluster: there an attempt may
    fail as not taken, and the router's next one waits as long again.
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
