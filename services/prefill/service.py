"""The prefill worker: computes prompts, and pushes their cache into granted memory while it computes."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from common.bus.errors import BusError
from common.bus.port import Bucket
from common.bus.rpc import Handler, RefusedError
from common.engine.port import EngineDeadError, EngineError
from common.runtime.clock import Deadline
from common.runtime.trace import within
from common.worker.core.admission import same_work
from common.worker.core.parts import PushedParts
from common.worker.core.sequence import Sequence
from common.worker.engine_loop import StepOutcome
from common.worker.replica import Replica
from common.worker.service import WorkerParts, WorkerService
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import (
    GRANT_SECRET_BYTES,
    Grant,
    PartDigest,
    PartsAnswer,
    PrefillFinished,
    QueryParts,
    Released,
    RunPrefill,
)
from contracts.rank import PeerSide, PushOutcome, PushTarget
from contracts.requests import Accepted, WorkerRef
from contracts.subjects import WorkerVerb
from contracts.workers import WorkerRole
from services.prefill.core.grant_check import refuse_grant
from services.prefill.core.owed_ranges import owed_ranges
from services.prefill.links import LinkPorts, Links
from services.prefill.push_metrics import PushMetrics
from services.prefill.telling import Prefill, Telling

_REPORT_EVERY_S: Final = 0.005
_TELL_AFTER_S: Final = 1.0
_HANDED_OVER: Final = "handed_over"
_UNLINK_TIMEOUT_S: Final = 5.0


class PrefillService(WorkerService):
    """Computes prompts for decode workers that it is linked with."""

    role = WorkerRole.PREFILL

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._prefills: dict[str, Prefill] = {}
        self._unreported: dict[tuple[str, int], None] = {}
        self._has_unreported = asyncio.Event()
        self._pushes = PushMetrics(parts.metrics)
        self._telling = Telling(self.events, parts.log)
        self.links = Links(
            LinkPorts(
                own=WorkerRef(worker_id=parts.settings.worker_id, incarnation=parts.incarnation),
                bus=parts.bus,
                clock=parts.clock,
                log=parts.log,
                metrics=parts.metrics,
                refusals=self.refusals,
                group=parts.group,
                replicas=self.replicas,
                offload=parts.offload,
            )
        )

    def handlers(self) -> Mapping[str, Handler]:
        """`prompt`, `run` and `parts`, beside what every worker can be asked."""
        return {
            **super().handlers(),
            WorkerVerb.PROMPT: self.intake.take,
            WorkerVerb.RUN: self._run,
            WorkerVerb.PARTS: self._parts,
        }

    def role_tasks(self, bucket: Bucket) -> dict[str, Coroutine[Any, Any, None]]:
        """Meet decode workers; note what was pushed, and report it."""
        return {
            "links": self.links.run(bucket),
            "link_ticks": self.links.run_ticks(bucket),
            "link_table": self.links.run_table(),
            **{f"pushes-{replica.dp_rank}": self.run_pushes(replica) for replica in self.replicas},
            "reports": self.run_reports(),
            "events": self.run_events(),
        }

    async def _run(self, data: bytes) -> msgspec.Struct:
        command = decode(data, RunPrefill)
        await self.check_command(command)
        known = self.table.get(command.handoff_id)
        if known is not None:
            prefill = self._prefills.get(command.handoff_id)
            if prefill is None or not same_work(prefill.command, command):
                text = f"{command.handoff_id} is being computed with another prompt, other sampling or another grant"
                raise RefusedError(command.handoff_id, ErrorCode.DUPLICATE, text)
            return Accepted(handoff_id=command.handoff_id)
        self.check_new(command, command.num_prompt_tokens)
        grant = command.grant
        met = self.links.met(grant.worker_id, grant.incarnation)
        if met is None:
            raise RefusedError(
                command.handoff_id,
                ErrorCode.INCOMPATIBLE_WORKERS,
                f"{self.settings.worker_id} is not linked with {grant.worker_id} {grant.incarnation}: "
                f"{self.links.why_no_plan(grant.worker_id)}",
            )
        broken = refuse_grant(command, met.ranks[0].manifest)
        if broken is not None:
            raise RefusedError(command.handoff_id, ErrorCode.PROTOCOL, broken)
        prompt_ids = self.intake.prompt_of(command)
        replica = self.replicas.for_prompt(command.num_prompt_tokens)
        sequence = self.new_sequence(command, replica)
        sequence.prompt_ids = prompt_ids
        sequence.push = PushTarget(grant=grant, num_cached_tokens=command.num_cached_tokens, pulled=command.pulled)
        if command.pulled:
            sequence.secret = secrets.token_hex(GRANT_SECRET_BYTES)
        pushed = (part for part in met.plan.parts if part.role not in command.pulled)
        owed = owed_ranges(pushed, command.num_cached_tokens, command.num_prompt_tokens, self.info.block_size)
        self.links.transfer_begins(
            sequence.handoff_id, WorkerRef(worker_id=grant.worker_id, incarnation=grant.incarnation), grant.dp_rank
        )
        self._prefills[sequence.handoff_id] = Prefill(
            command=command,
            sequence=sequence,
            parts=PushedParts(sequence.handoff_id, self.incarnation, replica.dp_rank),
            owed=owed,
            parts_left=Counter(source_rank for source_rank, *_ in owed),
            accepted_ns=sequence.accepted_ns,
        )
        replica.scheduler.enqueue(sequence)
        replica.loop.wake()
        return Accepted(handoff_id=command.handoff_id)

    async def _parts(self, data: bytes) -> msgspec.Struct:
        handoff_id = decode(data, QueryParts).handoff_id
        prefill = self._prefills.get(handoff_id)
        if prefill is None:
            raise RefusedError(handoff_id, ErrorCode.UNKNOWN_HANDOFF, f"{handoff_id} is not known here")
        return PartsAnswer(handoff_id=handoff_id, reports=prefill.parts.reports(), finished=prefill.finished)

    async def bound(self, sequence: Sequence) -> None:
        """Say that the prompt begins."""
        self.links.transfer_bound(sequence.handoff_id)
        prefill = self._prefills.get(sequence.handoff_id)
        if prefill is None:
            return
        prefill.started_ns = self.clock.monotonic_ns()
        self.work.bound(sequence, prefill.started_ns)
        self._telling.started(prefill)

    async def stepped(self, outcome: StepOutcome) -> None:
        """Report every prompt that ended with this step."""
        self.work.count(outcome)
        for produced in outcome.produced:
            sequence = self.table.by_seq(produced.seq)
            prefill = None if sequence is None else self._prefills.get(sequence.handoff_id)
            if sequence is not None and prefill is not None:
                with within(sequence.trace):
                    await self._computed(sequence, prefill, produced.token_ids[-1], outcome.result.ended_ns)
        for item in outcome.plan.items:
            sequence = self.table.by_seq(item.seq)
            prefill = None if sequence is None else self._prefills.get(sequence.handoff_id)
            if prefill is not None:
                prefill.layers.add(outcome.result)
                if item.last_chunk:
                    self._telling.layers_computed(prefill)

    async def _computed(self, sequence: Sequence, prefill: Prefill, token: int, ended_ns: int) -> None:
        self.replicas.of(sequence).scheduler.hold(sequence)
        reason = sequence.finish_reason(token, len(sequence.output_ids), self.info.eos_token_ids)
        sequence.outcome = str(reason or _HANDED_OVER)
        deadline = self.deadline_of(sequence)
        prefill.computed_ns = ended_ns

        def answered(rpc_ms: float) -> None:
            prefill.response_rpc_ms = rpc_ms

        try:
            digests = await self._digests(sequence, prefill) if reason is None else ()
        except EngineDeadError:
            raise
        except EngineError as error:
            self._fail(sequence, error.info)
            return
        prefill.response_prepare_ms = (self.clock.monotonic_ns() - ended_ns) / 1e6
        prefill.finished = PrefillFinished(
            handoff_id=sequence.handoff_id,
            incarnation=self.incarnation,
            first_token=token,
            finish_reason=reason,
            queue_ms=prefill.queue_ms,
            compute_ms=prefill.compute_ms,
            response_prepare_ms=prefill.response_prepare_ms,
            source=self._source(sequence),
            digests=digests,
        )
        self.report(prefill.finished, deadline, answered=answered)
        if reason is not None:
            end = partial(self.tokens.end, sequence, deadline, token_ids=(token,), finish_reason=reason)
            await self.reports.start(end)

    async def _digests(self, sequence: Sequence, prefill: Prefill) -> tuple[PartDigest, ...]:
        """What the whole cache adds up to, where decode wants to verify it."""
        if sequence.push is None or not prefill.command.verify:
            return ()
        loop = self.replicas.of(sequence).loop
        return await loop.digest(sequence, PeerSide.SOURCE, sequence.push.num_cached_tokens)

    def _source(self, sequence: Sequence) -> Grant | None:
        """The right to read a sequence's cache, where its decode worker pulls some of it."""
        memory = sequence.memory
        if sequence.push is None or not sequence.push.pulled or memory is None:
            return None
        return Grant(
            worker_id=self.settings.worker_id,
            incarnation=self.incarnation,
            dp_rank=sequence.dp_rank,
            generation=memory.generation,
            block_ids=memory.block_ids,
            slot=memory.slot,
            secret=sequence.secret,
        )

    async def failed(self, sequences: tuple[Sequence, ...], error: ErrorInfo) -> None:
        """Tell the broker that these prompts will not be computed."""
        for sequence in sequences:
            self._fail(sequence, error)

    def release_answer(self, handoff_id: str) -> Released:
        """See `WorkerService.release_answer`."""
        prefill = self._prefills.get(handoff_id)
        return Released(handoff_id=handoff_id, response_rpc_ms=None if prefill is None else prefill.response_rpc_ms)

    def left(self, handoff_id: str) -> None:
        """See `WorkerService.left`."""
        super().left(handoff_id)
        self.links.transfer_ends(handoff_id)
        prefill = self._prefills.pop(handoff_id, None)
        if prefill is not None:
            self._telling.ended(prefill)

    async def drain(self) -> None:
        """See `WorkerService.drain`. Links go when their last transfer has ended, and so does their record."""
        self.links.close()
        await super().drain()
        await self.links.wait_closed(Deadline.after(self.clock, _UNLINK_TIMEOUT_S))

    async def run_pushes(self, replica: Replica) -> None:
        """Note what the ranks of one replica have pushed, as they say it."""
        while True:
            push = await replica.engine.next_push()
            self._pushes.count(push)
            self.links.note_push(replica.dp_rank, push)
            sequence = self.table.get(push.handoff_id)
            prefill = self._prefills.get(push.handoff_id)
            if sequence is None or sequence.push is None or prefill is None:
                continue
            if push.outcome is not PushOutcome.DONE:
                text = f"rank {push.rank} could not push {push.role} of layer {push.layer}: {push.reason}"
                self._fail(sequence, ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message=text))
                continue
            part = prefill.parts.add(push)
            self._unreported[push.handoff_id, push.rank] = None
            key = push.rank, push.namespace, push.role, push.layer, push.destination_rank
            if part.ranges == prefill.owed.get(key):
                prefill.parts_left[push.rank] -= 1
                self._telling.part_pushed(prefill, push, part)
                if prefill.parts_left[push.rank] == 0:
                    await self._report_parts(push.handoff_id, push.rank)
            self._has_unreported.set()

    async def run_reports(self) -> None:
        """Send what the ranks have pushed, a little at a time. What completes a rank has been sent at once."""
        while True:
            await self._has_unreported.wait()
            self._has_unreported.clear()
            for handoff_id, rank in tuple(self._unreported):
                await self._report_parts(handoff_id, rank)
            await self.clock.sleep(_REPORT_EVERY_S)

    async def run_events(self) -> None:
        """Publish the events of prefills that take long, so that a handoff that is stuck can be seen."""
        while True:
            await self.clock.sleep(_TELL_AFTER_S)
            old_ns = self.clock.monotonic_ns() - int(_TELL_AFTER_S * 1e9)
            for prefill in self._prefills.values():
                if prefill.accepted_ns < old_ns:
                    self._telling.tell(prefill)

    async def _report_parts(self, handoff_id: str, rank: int) -> None:
        self._unreported.pop((handoff_id, rank), None)
        prefill = self._prefills.get(handoff_id)
        if prefill is None:
            return
        with within(prefill.sequence.trace):
            try:
                await self.bus.publish(subjects.parts(handoff_id), encode(prefill.parts.report(rank)))
            except BusError as error:  # the broker asks for the parts when it misses some
                self.log.info("parts_report_lost", handoff_id=handoff_id, error_code=error.code)

    def _fail(self, sequence: Sequence, error: ErrorInfo) -> None:
        self.replicas.of(sequence).scheduler.hold(sequence)
        prefill = self._prefills.get(sequence.handoff_id)
        if prefill is None or prefill.failed:
            return  # with one part of a transfer fail all that were in it: once is enough to say so
        prefill.failed = True
        sequence.outcome = str(error.code)
        with within(sequence.trace):
            self.log.error(
                "prefill_failed", handoff_id=sequence.handoff_id, error_code=error.code, error_message=error.message
            )
            prefill.finished = PrefillFinished(
                handoff_id=sequence.handoff_id, incarnation=self.incarnation, error=error
            )
            self.report(prefill.finished, self.deadline_of(sequence))
