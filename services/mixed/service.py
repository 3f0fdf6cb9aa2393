"""The mixed worker: prefill and decode in one engine, nothing to hand over. The baseline that a pair is compared with."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from common.bus.rpc import Handler, RefusedError
from common.worker.core.admission import same_work
from common.worker.core.sequence import Sequence
from common.worker.engine_loop import StepOutcome
from common.worker.generation import GeneratingService
from common.worker.service import WorkerParts
from contracts.codec import decode
from contracts.errors import ErrorCode
from contracts.events import EventName
from contracts.handoff import RunMixed
from contracts.requests import Accepted
from contracts.subjects import WorkerVerb
from contracts.workers import WorkerRole


class MixedService(GeneratingService):
    """Runs a request from its prompt to its end."""

    role = WorkerRole.MIXED

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._runs: dict[str, RunMixed] = {}

    def handlers(self) -> Mapping[str, Handler]:
        """`prompt` and `run`, beside what every worker can be asked."""
        return {**super().handlers(), WorkerVerb.PROMPT: self.intake.take, WorkerVerb.RUN: self._run}

    async def _run(self, data: bytes) -> msgspec.Struct:
        command = decode(data, RunMixed)
        await self.check_command(command)
        known = self._runs.get(command.handoff_id)
        if known is not None and not same_work(known, command):
            text = f"{command.handoff_id} is being computed with another prompt or other sampling"
            raise RefusedError(command.handoff_id, ErrorCode.DUPLICATE, text)
        if known is None:
            need = self.replicas.growth.first_need(command.num_prompt_tokens, command.sampling.max_tokens)
            self.check_new(command, need.limit_tokens)
            prompt_ids = self.intake.prompt_of(command)
            replica = self.replicas.for_prompt(need.num_tokens)
            sequence = self.new_sequence(command, replica)
            sequence.prompt_ids = prompt_ids
            self._runs[command.handoff_id] = command
            replica.scheduler.enqueue(sequence)
            replica.loop.wake()
        return Accepted(handoff_id=command.handoff_id)

    def leaves(self, sequence: Sequence) -> None:
        """See `WorkerService.leaves`."""
        super().leaves(sequence)
        self._runs.pop(sequence.handoff_id, None)

    async def bound(self, sequence: Sequence) -> None:
        """Say that the prompt begins; not when it is computed again."""
        if sequence.num_preemptions:
            return
        now_ns = self.clock.monotonic_ns()
        sequence.bound_ns = now_ns
        self.work.bound(sequence, now_ns)
        self.events.publish(
            EventName.PREFILL_STARTED,
            handoff_id=sequence.handoff_id,
            request_id=sequence.request_id,
            phase="prefill",
            at_ns=now_ns,
            prepare_ms=(now_ns - sequence.accepted_ns) / 1e6,
            num_tokens=sequence.num_prompt_tokens,
            source_dp_rank=sequence.dp_rank,
        )

    async def token_produced(self, sequence: Sequence, outcome: StepOutcome) -> None:
        """Say when the prompt has been computed."""
        if len(sequence.output_ids) == 1:
            sequence.computed_ns = outcome.result.ended_ns
            times = sequence.prompt_times
            self.events.publish(
                EventName.PREFILL_FINISHED,
                handoff_id=sequence.handoff_id,
                request_id=sequence.request_id,
                phase="prefill",
                at_ns=outcome.result.ended_ns,
                prepare_ms=None if times is None else times.queue_ms,
                duration_ms=None if times is None else times.compute_ms,
                num_tokens=sequence.num_prompt_tokens,
                source_dp_rank=sequence.dp_rank,
            )
