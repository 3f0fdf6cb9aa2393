"""One answer to one prompt: attempts are sent out until the answer is whole, and their tokens become text."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.trace import current_trace, next_hop, within
from contracts import ids
from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.requests import FinishReason, WorkerRef
from services.router.canceller import Canceller
from services.router.core.course import Course
from services.router.core.placement import Loads, Placing, place, workers_of
from services.router.core.retry import RetryPolicy, is_free, may_take_reserve
from services.router.core.retry_budget import RetryBudget
from services.router.core.text_stream import TextPiece, TextStream
from services.router.core.token_order import TokenOrder
from services.router.core.vocabulary import Vocabulary
from services.router.dispatch import Attempt, Dispatcher, Job, NotTakenError, Submission
from services.router.fleet import Fleet
from services.router.interruption import Interruptible, SlowReaderError
from services.router.metrics import RouterMetrics
from services.router.replaying import FrameSource, Replayer
from services.router.token_inbox import Mailbox, TokenInbox

_LOOK_AGAIN_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is new of an answer. The last one has a finish reason, and always comes."""

    text: str
    token_ids: Sequence[int]
    num_cached_tokens: int
    finish_reason: FinishReason | None


Sink = Callable[[Progress], Awaitable[None]]


class _Holds:
    """The workers on which one attempt counts."""

    def __init__(self, loads: Loads, workers: Sequence[WorkerRef]) -> None:
        self._loads = loads
        self._workers = list(workers)
        for worker in workers:
            loads.add(worker)

    def prefilled(self) -> None:
        """Let go of the prefill worker: it has done its part."""
        while len(self._workers) > 1:
            self._loads.remove(self._workers.pop(0))

    def release(self) -> None:
        """Let go of all."""
        while self._workers:
            self._loads.remove(self._workers.pop())


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Serves jobs. `rng` only spreads retries; `reroute_wait_s` is how long one that has lost its workers waits for others."""

    model: str
    vocabulary: Vocabulary
    eos_token_ids: Collection[int]
    fleet: Fleet
    inbox: TokenInbox
    dispatcher: Dispatcher
    canceller: Canceller
    replayer: Replayer
    policy: RetryPolicy
    budget: RetryBudget
    reroute_wait_s: float
    loads: Loads
    metrics: RouterMetrics
    clock: Clock
    log: Log
    rng: random.Random

    async def run(self, job: Job, deadline: Deadline, sink: Sink, scope: Interruptible) -> None:
        """Deliver the whole answer to `sink`, in order. The caller's `scope` ends it, at the deadline or before.

        An attempt that fails behind delivered tokens is followed by one that goes on behind them: nothing comes twice, nothing is
        left out, and sampled answers go on as they would have. Raises `PdmeshError` if the answer cannot be had: nothing was
        delivered then, or it breaks off. Whatever way it ends, all who were told of the request are told that it is over. A sink
        that is too slow interrupts the scope.
        """
        stream = TextStream(self.vocabulary, stops=job.stops, min_tokens=job.whole.sampling.min_tokens)
        course = Course(job.whole, stream, eos_token_ids=self.eos_token_ids, redispatch=job.redispatch)
        self.budget.note_request()
        with self.inbox.mailbox(job.request_id, scope.interrupt) as mailbox:
            while True:
                attempt = await self._place(job, course)
                mailbox.begin(attempt.number)
                with within(next_hop(current_trace())):
                    try:
                        await self._serve(attempt, course, mailbox, sink, deadline=deadline, scope=scope)
                    except SlowReaderError:
                        raise  # no attempt has failed: what the client did not take is not brought to it again
                    except PdmeshError as error:
                        failure = error
                    else:
                        return
                    if await self._ended_silently(course, sink):
                        return
                    self._prepare_retry(attempt, course, failure)
                await self.clock.sleep(self.policy.delay_s(failure, course.failures, chance=self.rng.random()))

    async def _place(self, job: Job, course: Course) -> Attempt:
        """Choose where the next attempt goes. After a failure a way may be missing for a while: a worker starts again."""
        asked = course.remainder
        patience = Deadline.after(self.clock, self.reroute_wait_s)
        while True:
            placing = Placing(
                model=self.model,
                num_prompt_tokens=asked.num_prompt_tokens,
                max_tokens=asked.sampling.max_tokens,
                blame=course.blamed,
                turn=self.loads.next_turn(),
            )
            try:
                route = place(self.fleet.view(), self.loads, placing)
            except PdmeshError as error:
                if course.failure is None:
                    raise
                if error.code is not ErrorCode.NO_ROUTE or patience.passed:
                    raise _stuck(course.failure, error) from error
                await self.clock.sleep(_LOOK_AGAIN_S)
            else:
                break
        self.metrics.attempts.inc()
        if asked.num_delivered_tokens and course.failure is not None:
            self.metrics.redispatches.labels(code=course.failure.code).inc()
        handoff_id = ids.handoff_id(job.request_id, course.attempt)
        return Attempt(
            job=job,
            remainder=asked,
            number=course.attempt,
            handoff_id=handoff_id,
            route=route,
            previous_error=None if course.failure is None else course.failure.info,
        )

    async def _serve(
        self,
        attempt: Attempt,
        course: Course,
        mailbox: Mailbox,
        sink: Sink,
        *,
        deadline: Deadline,
        scope: Interruptible,
    ) -> None:
        """Carry one attempt from its first message to the end of the answer, or take it back."""
        holds = _Holds(self.loads, workers_of(attempt.route))
        start = attempt.remainder.num_delivered_tokens
        order = TokenOrder(attempt=attempt.number, start=start)
        submission = Submission.NONE
        reason = ""
        finish_reason: FinishReason | None = None
        sent_at = self.clock.monotonic()
        try:
            await self.dispatcher.send_prompt(attempt, deadline)
            submission = Submission.MAYBE
            try:
                await self.dispatcher.submit(attempt, deadline)
            except NotTakenError:
                submission = Submission.NONE
                raise
            submission = Submission.ACCEPTED
            self.metrics.submit.observe(self.clock.monotonic() - sent_at)
            finished = False
            frames = FrameSource(self.replayer, attempt, mailbox, order)
            while not finished:
                token_ids = order.accept(await frames.next())
                if token_ids and course.num_tokens == start:
                    holds.prefilled()
                if not start:
                    course.num_cached_tokens = order.num_cached_tokens
                finished = await self._deliver(order, course.push(token_ids), course, sink)
            reason, finish_reason = "a stop string was met", FinishReason.STOP
        except PdmeshError as error:
            reason = error.message
            raise
        finally:
            holds.release()
            if order.end is None:
                self.metrics.cancels.inc()
                self.canceller.cancel(
                    attempt,
                    submission,
                    deadline,
                    reason=reason or _why_given_up(scope, deadline),
                    num_tokens=course.num_tokens,
                    finish_reason=finish_reason,
                )
            else:
                self.replayer.acknowledge(attempt, order.next_index)

    async def _deliver(self, order: TokenOrder, piece: TextPiece, course: Course, sink: Sink) -> bool:
        """Hand on what a frame gave; say whether that was the end. Raises the error that the attempt ended with."""
        text, end = piece.text, order.end
        finish_reason: FinishReason | None = None
        if piece.stopped:
            finish_reason = FinishReason.STOP
        elif end is not None and end.finish_reason is not None:
            rest = course.finish()
            text += rest.text
            finish_reason = FinishReason.STOP if rest.stopped else end.finish_reason
        if piece.token_ids or finish_reason is not None:
            await sink(_progress(course, text, piece.token_ids, finish_reason))
        if end is not None and end.error is not None and finish_reason is None:
            raise _failure(end.error)
        return finish_reason is not None

    async def _ended_silently(self, course: Course, sink: Sink) -> bool:
        """Whether the answer was complete when its attempt failed: only its end was lost, and is delivered here."""
        finish_reason = course.end
        if finish_reason is None:
            return False
        rest = course.finish()
        await sink(_progress(course, rest.text, (), FinishReason.STOP if rest.stopped else finish_reason))
        return True

    def _prepare_retry(self, attempt: Attempt, course: Course, error: PdmeshError) -> None:
        """Note a failure. Raises it if no other attempt may follow."""
        delivered = course.num_tokens > attempt.remainder.num_delivered_tokens
        course.failed(error, workers_of(attempt.route), delivered=delivered)
        if not course.may_go_on or not self.policy.may_retry(error, course.failures):
            raise error
        from_reserve = may_take_reserve(error, begun=course.num_tokens > 0)
        if not is_free(error) and not self.budget.take(self.clock.monotonic(), from_reserve=from_reserve):
            self.metrics.retries_refused.inc()
            raise error
        self.metrics.retries.labels(code=error.code).inc()
        self.log.info(
            "attempt_failed",
            request_id=attempt.job.request_id,
            handoff_id=attempt.handoff_id,
            attempt=attempt.number,
            num_tokens=course.num_tokens,
            error_code=error.code,
            reason=error.message,
        )


def _progress(course: Course, text: str, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Progress:
    return Progress(
        text=text, token_ids=token_ids, num_cached_tokens=course.num_cached_tokens, finish_reason=finish_reason
    )


def _failure(error: ErrorInfo) -> PdmeshError:
    """The exception for the error of an attempt.

    To be cancelled is to be lost: whoever waits here has cancelled nothing. The mesh does so when it takes this router for dead.
    """
    if error.code is ErrorCode.CANCELLED:
        return PdmeshError(f"taken back by the mesh: {error.message}", code=ErrorCode.WORKER_LOST)
    return PdmeshError.from_info(error)


def _stuck(failure: PdmeshError, why: PdmeshError) -> PdmeshError:
    """Say what went wrong, and why it could not be made good; what the client may do about it follows from the former."""
    return PdmeshError(f"{failure.message}; it cannot go on elsewhere: {why.message}", code=failure.code)


def _why_given_up(scope: Interruptible, deadline: Deadline) -> str:
    """Say why an attempt was cancelled from outside."""
    if scope.reason is not None:
        return scope.reason.message
    return "the deadline has passed" if deadline.passed else "nobody waits for the answer any more"
