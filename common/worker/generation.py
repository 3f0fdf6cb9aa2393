"""What a worker that generates text adds: tokens to the router as they come, and an end that gives everything back."""

from __future__ import annotations

from common.runtime.trace import within
from common.worker.core.scheduler import Produced
from common.worker.core.sequence import Sequence
from common.worker.engine_loop import StepOutcome
from common.worker.guess_metrics import GuessMetrics
from common.worker.service import WorkerParts, WorkerService
from contracts.errors import ErrorInfo
from contracts.handoff import Released, RequestEnded
from contracts.requests import FinishReason


class GeneratingService(WorkerService):
    """Base of the decode and the mixed worker."""

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._guesses = GuessMetrics(parts.metrics, depth=self.effective.num_speculative_tokens)

    async def stepped(self, outcome: StepOutcome) -> None:
        """Stream the step's tokens, and end the sequences that they finish."""
        self.work.count(outcome)
        self._guesses.count(outcome)
        num_drafts = outcome.num_drafts
        for produced in outcome.produced:
            sequence = self.table.by_seq(produced.seq)
            if sequence is None:
                continue
            sequence.guesses.add(
                num_drafts[produced.seq],
                len(produced.token_ids) - 1,
                draft_ns=outcome.result.draft_ns,
                verify_ns=outcome.result.verify_ns,
            )
            with within(sequence.trace):
                await self.token_produced(sequence, outcome)
                await self._stream(sequence, produced)

    async def _stream(self, sequence: Sequence, produced: Produced) -> None:
        """Send a step's tokens on, up to the one that ends the sequence: what was computed behind it is forgotten."""
        for count, token in enumerate(produced.token_ids, 1):
            num_output_tokens = produced.num_output_tokens + count
            reason = sequence.finish_reason(token, num_output_tokens, self.info.eos_token_ids)
            if reason is not None:
                del sequence.output_ids[num_output_tokens:]
                await self.finish(sequence, token_ids=produced.token_ids[:count], finish_reason=reason)
                return
        await self.tokens.add(sequence, produced.token_ids)

    def release_answer(self, handoff_id: str) -> Released:
        """See `WorkerService.release_answer`."""
        sequence = self.table.get(handoff_id)
        if sequence is None:
            return Released(handoff_id=handoff_id)
        return Released(handoff_id=handoff_id, prompt=sequence.prompt_times, guesses=sequence.guesses.told)

    async def token_produced(self, sequence: Sequence, outcome: StepOutcome) -> None:
        """Roles note here what they measure; called before the token is streamed."""

    async def failed(self, sequences: tuple[Sequence, ...], error: ErrorInfo) -> None:
        """End every sequence with the error."""
        for sequence in sequences:
            with within(sequence.trace):
                self.log.error(
                    "sequence_failed",
                    handoff_id=sequence.handoff_id,
                    error_code=error.code,
                    error_message=error.message,
                )
                await self.finish(sequence, error=error)

    async def finish(
        self,
        sequence: Sequence,
        *,
        token_ids: tuple[int, ...] = (),
        finish_reason: FinishReason | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        """Take a sequence out of the steps now; in the background send its end, give back its memory, tell the broker."""
        self.replicas.of(sequence).scheduler.leave(sequence)
        deadline = self.deadline_of(sequence)
        sequence.outcome = str(finish_reason if error is None else error.code)

        async def wind_up() -> None:
            await self.tokens.end(sequence, deadline, token_ids=token_ids, finish_reason=finish_reason, error=error)
            released = await self.end(sequence.handoff_id)
            ended = RequestEnded(
                handoff_id=sequence.handoff_id,
                incarnation=self.incarnation,
                num_tokens=sequence.num_generated_tokens,
                finish_reason=finish_reason,
                error=error,
                prompt=sequence.prompt_times,
                guesses=sequence.guesses.told,
                quarantined=released.quarantined,
            )
            await self.broker.deliver(ended, deadline)
            self._tell_end("request_ended", sequence, finish_reason=finish_reason, error=error)

        await self.reports.start(wind_up)

    def leaves(self, sequence: Sequence) -> None:
        """See `WorkerService.leaves`. One that has not ended by itself is released: a stop string was met, or nobody waits any more."""
        super().leaves(sequence)
        if not sequence.outcome:
            with within(sequence.trace):
                self._tell_end("request_released", sequence)

    def _tell_end(
        self,
        event: str,
        sequence: Sequence,
        *,
        finish_reason: FinishReason | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        """The one line of a request here, in the log."""
        guesses = sequence.guesses
        self.log.info(
            event,
            request_id=sequence.request_id,
            handoff_id=sequence.handoff_id,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_tokens=sequence.num_generated_tokens,
            finish_reason=finish_reason,
            error_code=None if error is None else error.code,
            num_steps=guesses.num_steps,
            num_drafted=guesses.num_drafted,
            num_accepted=guesses.num_accepted,
            accepted_at=guesses.accepted_at,
            draft_ms=round(guesses.draft_ns / 1e6, 3),
            verify_ms=round(guesses.verify_ns / 1e6, 3),
        )
