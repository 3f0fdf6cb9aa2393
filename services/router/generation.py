"""One answer to one prompt: attempts are sent out until one delivers, and its tokens become text."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.trace import current_trace, next_hop, within
from contracts import ids
from contracts.errors import PdmeshError
from contracts.requests import FinishReason, WorkerRef
from services.router.core.placement import Loads, Placing, place, workers_of
from services.router.core.retry import RetryPolicy, blame
from services.router.core.text_stream import TextPiece, TextStream
from services.router.core.token_order import TokenOrder
from services.router.core.vocabulary import Vocabulary
from services.router.dispatch import Attempt, Canceller, Dispatcher, ExplicitRefusal, Job, Submission
from services.router.fleet import Fleet
from services.router.interruption import Interruptible
from services.router.metrics import RouterMetrics
from services.router.replaying import FrameSource, Replayer
from services.router.token_inbox import Mailbox, TokenInbox


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
    """Serves jobs. `rng` only spreads retries."""

    model: str
    vocabulary: Vocabulary
    fleet: Fleet
    inbox: TokenInbox
    dispatcher: Dispatcher
    canceller: Canceller
    replayer: Replayer
    policy: RetryPolicy
    loads: Loads
    metrics: RouterMetrics
    clock: Clock
    log: Log
    rng: random.Random

    async def run(self, job: Job, deadline: Deadline, sink: Sink, scope: Interruptible) -> None:
        """Deliver the whole answer to `sink`, in order. The caller's `scope` ends it, at the deadline or before.

        Raises `PdmeshError` if it cannot be had: nothing was delivered then, or the answer breaks off. Whatever way it
        ends, all who were told of the request are told that it is over. A sink that is too slow interrupts the scope.
        """
        stream = TextStream(self.vocabulary, stops=job.stops, min_tokens=job.sampling.min_tokens)
        blamed: Counter[str] = Counter()
        number = 0
        with self.inbox.mailbox(job.request_id, scope.interrupt) as mailbox:
            while True:
                attempt = self._place(job, number, blamed)
                with within(next_hop(current_trace())):
                    try:
                        await self._serve(attempt, stream, mailbox, sink, deadline=deadline, scope=scope)
                    except PdmeshError as error:
                        if not self.policy.may_retry(error, attempt=number, num_delivered_tokens=stream.num_tokens):
                            raise
                        self._note_retry(attempt, error)
                        blamed.update({worker.worker_id: blame(error) for worker in workers_of(attempt.route)})
                    else:
                        return
                await self.clock.sleep(self.policy.delay_s(attempt=number, chance=self.rng.random()))
                number += 1

    def _place(self, job: Job, number: int, blamed: Mapping[str, int]) -> Attempt:
        self.metrics.attempts.inc()
        placing = Placing(
            model=self.model,
            num_prompt_tokens=job.num_prompt_tokens,
            max_tokens=job.sampling.max_tokens,
            blame=blamed,
            turn=self.loads.next_turn(),
        )
        route = place(self.fleet.view(), self.loads, placing)
        handoff_id = ids.handoff_id(job.request_id, number)
        return Attempt(job=job, number=number, handoff_id=handoff_id, route=route)

    async def _serve(
        self,
        attempt: Attempt,
        stream: TextStream,
        mailbox: Mailbox,
        sink: Sink,
        *,
        deadline: Deadline,
        scope: Interruptible,
    ) -> None:
        """Carry one attempt from its first message to the end of the answer, or take it back."""
        holds = _Holds(self.loads, workers_of(attempt.route))
        order = TokenOrder(attempt=attempt.number, start=stream.num_tokens)
        submission = Submission.NONE
        reason = ""
        finish_reason: FinishReason | None = None
        sent_at = self.clock.monotonic()
        try:
            await self.dispatcher.send_prompt(attempt, deadline)
            submission = Submission.MAYBE
            try:
                await self.dispatcher.submit(attempt, deadline)
            except ExplicitRefusal:
                submission = Submission.NONE
                raise
            submission = Submission.ACCEPTED
            self.metrics.submit.observe(self.clock.monotonic() - sent_at)
            finished = False
            frames = FrameSource(self.replayer, attempt, mailbox, order)
            while not finished:
                token_ids = order.accept(await frames.next())
                if token_ids and stream.num_tokens == 0:
                    holds.prefilled()
                finished = await self._deliver(order, stream.push(token_ids), stream, sink)
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
                    reason=reason or _why_given_up(scope, deadline),
                    num_tokens=stream.num_tokens,
                    finish_reason=finish_reason,
                )
            else:
                self.replayer.acknowledge(attempt, order.next_index)

    async def _deliver(self, order: TokenOrder, piece: TextPiece, stream: TextStream, sink: Sink) -> bool:
        """Hand on what a frame gave; say whether that was the end. Raises the error that the attempt ended with."""
        text, end = piece.text, order.end
        finish_reason: FinishReason | None = None
        if piece.stopped:
            finish_reason = FinishReason.STOP
        elif end is not None and end.error is None:
            text += stream.finish().text
            finish_reason = FinishReason.STOP if stream.stopped else end.finish_reason
        if piece.token_ids or finish_reason is not None:
            await sink(
                Progress(
                    text=text,
                    token_ids=piece.token_ids,
                    num_cached_tokens=order.num_cached_tokens,
                    finish_reason=finish_reason,
                )
            )
        if end is not None and end.error is not None and finish_reason is None:
            raise PdmeshError.from_info(end.error)
        return finish_reason is not None

    def _note_retry(self, attempt: Attempt, error: PdmeshError) -> None:
        self.metrics.retries.labels(code=error.code).inc()
        self.log.info(
            "attempt_failed",
            request_id=attempt.job.request_id,
            handoff_id=attempt.handoff_id,
            attempt=attempt.number,
            error_code=error.code,
            reason=error.message,
        )


def _why_given_up(scope: Interruptible, deadline: Deadline) -> str:
    """Say why an attempt was cancelled from outside."""
    if scope.reason is not None:
        return scope.reason.message
    return "the deadline has passed" if deadline.passed else "nobody waits for the answer any more"
