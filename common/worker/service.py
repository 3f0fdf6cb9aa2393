"""What the three worker roles share: sequences in an engine, known by their handoff, released exactly when they should be."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from common.bus.handoff_events import HandoffEvents
from common.bus.port import Bucket, Bus, Subscription
from common.bus.refusals import Refusals
from common.bus.rpc import NO_HANDOFF, Handler, RefusedError, UnansweredError
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.logging import set_level
from common.runtime.metrics import Metrics
from common.runtime.offload import Offload
from common.runtime.tasks import BoundedTasks
from common.runtime.trace import current_trace, within
from common.worker.broker_client import BrokerClient, Report
from common.worker.core.admission import Command, NewWork, Room, refuse_command, refuse_new
from common.worker.core.blocks import Reservation
from common.worker.core.effective import effective_of
from common.worker.core.growth import Growth
from common.worker.core.prompts import PromptBuffer
from common.worker.core.scheduler import StepLimits
from common.worker.core.sequence import Sequence
from common.worker.core.step_mode import modes_of
from common.worker.core.table import HandoffTable
from common.worker.deserted import Deserted
from common.worker.engine_loop import StepOutcome
from common.worker.fences import Fences
from common.worker.inspection import Inspection
from common.worker.live_settings import LiveSettings
from common.worker.prompt_intake import PromptIntake
from common.worker.refused_transfers import RefusedTransfers
from common.worker.replay import Replay
from common.worker.replica import Replica, StartedEngine
from common.worker.replica_set import ReplicaSet
from common.worker.router_watch import RouterWatch
from common.worker.settings import WorkerSettings
from common.worker.shared_calls import SharedCalls
from common.worker.token_stream import TokenStream
from common.worker.unclaimed_prompts import UnclaimedPrompts
from common.worker.work_metrics import WorkMetrics
from contracts.codec import decode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import HandoffList, ListHandoffs, Released, ReleaseHandoff, max_granted_blocks
from contracts.rank import MAX_BOUND_BLOCKS
from contracts.requests import CancelWork, WorkerRef
from contracts.subjects import WorkerVerb
from contracts.workers import (
    WorkerRecord,
    WorkerRole,
    WorkerState,
)

SWEEP_EVERY_S: Final = 1.0
"""How often a worker looks at what its time takes away."""
_MAX_REPORTS: Final = 4096
_REPEAT_WAITS_S: Final = 2.0
"""How long a repeated release waits for the first one, which may take as long as a rank stands still: repeats must not pile up."""


class WorkerParts(msgspec.Struct, frozen=True, kw_only=True):
    """What a composition root gives a service. `engines` are its replicas, in the order of their dp rank."""

    settings: WorkerSettings
    incarnation: str
    engines: tuple[StartedEngine, ...]
    bus: Bus
    clock: Clock
    log: Log
    metrics: Metrics
    group: asyncio.TaskGroup
    offload: Offload = asyncio.to_thread
    set_log_level: Callable[[str], None] = set_level


class WorkerService(ABC):
    """The shell of a worker, without what its role adds.

    A handoff lives here from its first command until its release, and its memory goes back only by `release`, by its
    end, or by its deadline plus a grace. Everything is idempotent by handoff id.
    """

    role: WorkerRole

    def __init__(self, parts: WorkerParts) -> None:
        settings = parts.settings
        self.settings = settings
        self.incarnation = parts.incarnation
        self.metrics = parts.metrics
        self.refusals = Refusals(parts.log, parts.clock, parts.metrics)
        self.bus = parts.bus
        self.clock = parts.clock
        self.log = parts.log
        self.effective = effective_of(settings, self.role)
        limits = StepLimits(
            max_step_tokens=settings.max_step_tokens,
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            mix_batch=self.effective.mix_batch,
            chunked=self.effective.chunked_prefill,
            num_speculative_tokens=self.effective.num_speculative_tokens,
        )
        growth = Growth(reserve_output_tokens=settings.reserve_output_tokens)
        self.replicas = ReplicaSet(
            parts.engines, limits, self, release_timeout_ms=settings.release_timeout_ms, growth=growth
        )
        self.info = self.replicas.info
        self.prompts = PromptBuffer(max_tokens=settings.prompt_buffer_tokens, vocab_size=self.info.vocab_size)
        self.table = HandoffTable()
        self._fences = Fences(parts.bus, parts.clock, parts.log, parts.metrics, self.table)
        self.intake = PromptIntake(
            settings.worker_id, self.prompts, self.table, parts.clock, is_draining=lambda: self.draining
        )
        self.tokens = TokenStream(parts.bus, parts.clock)
        self._replay = Replay(self.tokens, self.table)
        self.broker = BrokerClient(parts.bus, parts.clock)
        self._unclaimed = UnclaimedPrompts(
            self.broker,
            self.prompts,
            self.table,
            parts.clock,
            parts.log,
            metrics=parts.metrics,
            group=parts.group,
            end=lambda handoff_id, tombstone: self.end(handoff_id, tombstone=tombstone),
        )
        self.events = HandoffEvents(parts.bus, parts.clock, service=self.role, instance=settings.worker_id)
        self.reports = BoundedTasks(parts.group, name="report", limit=_MAX_REPORTS, on_error=self._report_failed)
        self._ends = BoundedTasks(parts.group, name="expired", limit=_MAX_REPORTS)
        self._ending: SharedCalls[Released] = SharedCalls()
        self._retries = [
            BoundedTasks(parts.group, name=f"quarantine-{replica.dp_rank}", limit=1) for replica in self.replicas
        ]
        self.work = WorkMetrics(
            parts.metrics,
            self.table,
            self.replicas,
            self.prompts,
            limits=settings,
            modes=modes_of(self.effective, self.role),
            num_reports=lambda: self.reports.running,
        )
        self._refused = RefusedTransfers(
            parts.metrics, parts.log, parts.clock, (started.engine for started in parts.engines)
        )
        self._inspection = Inspection(
            settings.worker_id,
            parts.incarnation,
            self.replicas,
            table=self.table,
            prompts=self.prompts,
            num_prefilled_tokens=lambda: self.work.num_prefilled_tokens,
        )
        deserted = Deserted(settings.worker_id, self.table, self.replicas, self.failed)
        self.routers = RouterWatch(
            parts.bus,
            parts.clock,
            parts.log,
            self.refusals,
            on_gone=deserted.router_gone,
            on_heard=deserted.router_heard,
        )
        self.live = LiveSettings(
            settings,
            self.role,
            parts.incarnation,
            bus=parts.bus,
            clock=parts.clock,
            log=parts.log,
            set_log_level=parts.set_log_level,
        )
        self.draining = False
        self._deadlines: dict[str, Deadline] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ref(self) -> WorkerRef:
        """This start of this worker."""
        return WorkerRef(worker_id=self.settings.worker_id, incarnation=self.incarnation)

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence, prompt and output, that the model and one empty replica can hold, and whose blocks messages can name."""
        granted = max_granted_blocks(self.info.num_blocks)
        most = MAX_BOUND_BLOCKS if self.role is WorkerRole.MIXED else granted  # who does both grants nothing
        return min(self.info.max_position, min(self.info.num_blocks, most) * self.info.block_tokens)

    def record(self) -> WorkerRecord:
        """What the worker says of itself in `PD_WORKERS`."""
        return WorkerRecord(
            worker_id=self.settings.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            state=WorkerState.DRAINING if self.draining else WorkerState.READY,
            model=self.settings.model_name,
            model_fingerprint=self.info.model_fingerprint,
            tp=self.settings.tp,
            dp=len(self.replicas),
            dcp=self.info.dcp,
            block_size=self.info.block_size,
            num_blocks=self.replicas.num_blocks,
            num_slots=self.replicas.num_slots,
            max_sequence_tokens=self.max_sequence_tokens,
            max_prompt_tokens=self.effective.max_prompt_tokens,
            load=self.replicas.load,
        )

    def handlers(self) -> Mapping[str, Handler]:
        """What the worker can be asked, by verb. Roles add theirs."""
        return {
            WorkerVerb.RELEASE: self._release_asked,
            WorkerVerb.REPLAY: self._replay.answer,
            WorkerVerb.DESCRIBE: self._inspection.describe,
            WorkerVerb.SCAN: self._inspection.scan,
            WorkerVerb.SET: self.live.answer,
            WorkerVerb.HANDOFFS: self._handoffs_asked,
        }

    def role_tasks(self, bucket: Bucket) -> dict[str, Coroutine[Any, Any, None]]:
        """What a role does beside answering and computing, by task name. `bucket` is `PD_WORKERS`."""
        del bucket
        return {}

    @abstractmethod
    async def bound(self, sequence: Sequence) -> None:
        """See `StepObserver.bound`."""

    @abstractmethod
    async def stepped(self, outcome: StepOutcome) -> None:
        """See `StepObserver.stepped`."""

    @abstractmethod
    async def failed(self, sequences: tuple[Sequence, ...], error: ErrorInfo) -> None:
        """See `StepObserver.failed`."""

    async def preempted(self, sequence: Sequence) -> None:
        """See `StepObserver.preempted`."""
        self.work.preempted()
        self.events.publish(
            EventName.PREEMPTED,
            handoff_id=sequence.handoff_id,
            request_id=sequence.request_id,
            phase="decode",
            num_tokens=sequence.num_generated_tokens,
            source_dp_rank=0 if self.role is WorkerRole.DECODE else sequence.dp_rank,
            destination_dp_rank=sequence.dp_rank if self.role is WorkerRole.DECODE else 0,
        )
        self.log.info(
            "sequence_preempted",
            handoff_id=sequence.handoff_id,
            num_tokens=sequence.num_generated_tokens,
            num_preemptions=sequence.num_preemptions,
            is_recomputed=sequence.can_recompute,
        )

    def released(self, *, quarantined: bool) -> None:
        """See `StepObserver.released`."""
        self.work.released(quarantined=quarantined)

    def quarantined(self, sequence: Sequence, memory: Reservation) -> None:
        """See `StepObserver.quarantined`."""
        self.log.info("memory_quarantined", **_told_of(sequence.handoff_id, memory))

    def quarantine_ended(self, handoff_id: str, memory: Reservation) -> None:
        """See `StepObserver.quarantine_ended`."""
        self.log.info("quarantine_ended", **_told_of(handoff_id, memory))

    def release_failed(self, sequence: Sequence, error: ErrorInfo) -> None:
        """See `StepObserver.release_failed`."""
        self.log.error(
            "release_failed", handoff_id=sequence.handoff_id, error_code=error.code, error_message=error.message
        )

    async def check_command(self, command: Command) -> None:
        """Refuse a command for another start of this worker, from whoever does not lead, or for a handoff that is over.

        It waits only for a fence that is new; nothing can come between its return and what the caller does next.
        """
        if command.incarnation == self.incarnation:
            await self._fences.settle(command.handoff_id, command.fence)
        _refuse(command.handoff_id, refuse_command(command, incarnation=self.incarnation, table=self.table))

    def check_new(self, command: NewWork, num_tokens: int) -> None:
        """Refuse new work of `num_tokens` while draining, when too many wait, or when it could never fit."""
        room = Room(
            worker_id=self.settings.worker_id,
            draining=self.draining,
            max_sequence_tokens=self.max_sequence_tokens,
            max_prompt_tokens=self.effective.max_prompt_tokens,
            num_waiting=self.replicas.load.num_waiting,
            max_waiting=self.settings.max_waiting,
        )
        _refuse(command.handoff_id, refuse_new(command, num_tokens, room))

    def new_sequence(self, command: NewWork, replica: Replica) -> Sequence:
        """Let a handoff live in one replica, and start its deadline."""
        sequence = Sequence(
            seq=self.table.next_seq(),
            dp_rank=replica.dp_rank,
            handoff_id=command.handoff_id,
            request_id=command.request_id,
            attempt=command.attempt,
            router_id=command.router_id,
            num_prompt_tokens=command.num_prompt_tokens,
            sampling=command.sampling,
            num_delivered_tokens=command.num_delivered_tokens,
            trace=current_trace(),
            accepted_ns=self.clock.monotonic_ns(),
        )
        self.table.add(sequence)
        self._deadlines[sequence.handoff_id] = Deadline.from_remaining_ms(self.clock, command.timeout_ms)
        self._idle.clear()
        return sequence

    def deadline_of(self, sequence: Sequence) -> Deadline:
        """Until when the request is worth anything; now, if the handoff is over."""
        return self._deadlines.get(sequence.handoff_id) or Deadline.after(self.clock, 0)

    def report(self, report: Report, deadline: Deadline, *, answered: Callable[[float], None] | None = None) -> None:
        """Deliver a report to the broker in the background; `answered` hears how many ms it took."""

        async def deliver() -> None:
            began_ns = self.clock.monotonic_ns()
            await self.broker.deliver(report, deadline)
            if answered is not None:
                answered((self.clock.monotonic_ns() - began_ns) / 1e6)

        if not self.reports.try_start(deliver):
            self.log.error("report_dropped", handoff_id=report.handoff_id, report=type(report).__name__)

    async def end(self, handoff_id: str, *, tombstone: Deadline | None = None) -> Released:
        """End a handoff here, known or not: stop it, take its memory back, and refuse it until the tombstone's moment.

        Returns what a release is answered with. Whoever asks while the handoff is being ended gets the same answer, and not before
        its memory is back: that may take as long as a step, or as a rank that stands still.
        """
        until = (tombstone or self._deadlines.get(handoff_id) or Deadline.after(self.clock, 0)).at
        answer = self.release_answer(handoff_id)
        sequence = self.table.remove(handoff_id, until=until)
        self.prompts.drop(handoff_id)
        self._deadlines.pop(handoff_id, None)
        answer = await self._ending.join(handoff_id, partial(self._end_once, handoff_id, sequence, answer))
        if not len(self.table) and not len(self._ending):
            self._idle.set()
        return answer

    async def _end_once(self, handoff_id: str, sequence: Sequence | None, answer: Released) -> Released:
        if sequence is not None:
            self.work.ended(sequence)
            self.leaves(sequence)
            self.tokens.drop(sequence)
            await self.replicas.of(sequence).loop.release(sequence)
        self.left(handoff_id)
        return msgspec.structs.replace(answer, quarantined=self.replicas.has_quarantined(handoff_id))

    def leaves(self, sequence: Sequence) -> None:
        """A sequence lives here no more; its memory is about to be taken back. Roles forget here what its next step would need."""
        del sequence

    def left(self, handoff_id: str) -> None:
        """Nothing is held for a handoff any more, if anything ever was. Roles forget here whatever else they keep for it."""
        del handoff_id

    async def run_cancels(self, subscription: Subscription) -> None:
        """Obey hints to stop computing. Memory stays where it is until the broker says so.

        A prompt that nobody has asked to run is dropped: the broker may never hear of it. Frames of it may still be on
        their way, so it stays refused for a while.
        """
        async with subscription:
            async for message in subscription:
                cancel = self.refusals.message("cancel", message.data, CancelWork, subject=message.subject)
                if cancel is None:
                    continue
                sequence = self.table.get(cancel.handoff_id)
                if sequence is not None:
                    self.replicas.of(sequence).scheduler.hold(sequence)
                elif cancel.handoff_id not in self._ending:  # other hints do not wait until its memory is back
                    grace = Deadline.after(self.clock, self.settings.deadline_grace_s)
                    await self.end(cancel.handoff_id, tombstone=grace)

    async def run_sweeps(self) -> None:
        """Once a second: end what is past its deadline and its grace, expire what is remembered, look at unclaimed prompts and quarantine.

        It waits for no engine and no broker: one that does not answer must not cost the other replicas anything.
        """
        while True:
            await self.clock.sleep(SWEEP_EVERY_S)
            now = self.clock.monotonic()
            self.prompts.expire(now)
            self._unclaimed.look()
            self.table.expire(now, but=self._ending)
            self.tokens.expire(now)
            for handoff_id, deadline in tuple(self._deadlines.items()):
                if now >= deadline.at + self.settings.deadline_grace_s:
                    sequence = self.table.get(handoff_id)
                    with within(None if sequence is None else sequence.trace):
                        self.log.info("handoff_expired", handoff_id=handoff_id)
                        self._ends.try_start(partial(self._expire, handoff_id))
            for retries, replica in zip(self._retries, self.replicas, strict=True):
                retries.try_start(partial(self.replicas.retry_quarantine, replica))
            if not len(self.table):
                self.replicas.check_integrity()

    async def _expire(self, handoff_id: str) -> None:
        await self.end(handoff_id)

    async def drain(self) -> None:
        """Take nothing new, and wait until every handoff has ended here and every report is delivered."""
        self.draining = True
        await self._idle.wait()
        await self.reports.wait_idle(Deadline.after(self.clock, self.settings.drain_timeout_s))

    async def _release_asked(self, data: bytes) -> msgspec.Struct:
        command = decode(data, ReleaseHandoff)
        tombstone = Deadline.from_remaining_ms(self.clock, command.tombstone_ms)
        if command.handoff_id not in self._ending:
            return await self.end(command.handoff_id, tombstone=tombstone)
        try:
            async with Deadline.after(self.clock, _REPEAT_WAITS_S).timeout():
                return await self.end(command.handoff_id, tombstone=tombstone)
        except TimeoutError as error:
            raise UnansweredError(f"the memory of {command.handoff_id} is not back yet") from error

    async def _handoffs_asked(self, data: bytes) -> msgspec.Struct:
        fence = decode(data, ListHandoffs).fence
        # From here on the broker before is refused, so that all that it has brought here is in the answer.
        await self._fences.settle(NO_HANDOFF, fence)
        if self.table.is_deposed(fence):
            raise RefusedError(NO_HANDOFF, ErrorCode.STALE_FENCE, f"fence: {fence} is below the highest one seen")
        return HandoffList(incarnation=self.incarnation, handoff_ids=tuple(sorted(self.held_handoffs())))

    def held_handoffs(self) -> frozenset[str]:
        """Handoffs that a command has brought here and that are not over.

        A prompt that nobody has asked to run is none: its router may be about to submit it.
        """
        return frozenset(sequence.handoff_id for sequence in self.table.sequences)

    def release_answer(self, handoff_id: str) -> Released:
        """What a release will be answered with. Roles add what they have measured."""
        return Released(handoff_id=handoff_id)

    def _report_failed(self, name: str, error: Exception) -> None:
        self.log.error("report_failed", task=name, error=repr(error))


def _told_of(handoff_id: str, memory: Reservation) -> dict[str, Any]:
    """Memory in the log: what the grant called it."""
    return {
        "handoff_id": handoff_id,
        "num_blocks": len(memory.block_ids),
        "slot": memory.slot,
        "generation": memory.generation,
    }


def _refuse(handoff_id: str, error: ErrorInfo | None) -> None:
    if error is not None:
        raise RefusedError(handoff_id, error.code, error.message)
