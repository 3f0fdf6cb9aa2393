"""What the three worker roles share: sequences in an engine, known by their handoff, released exactly when they should be."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import msgspec

from common.bus.handoff_events import HandoffEvents
from common.bus.port import Bucket, Bus, Subscription
from common.bus.rpc import Handler, RefusedError
from common.engine.port import Engine, EngineInfo
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from common.runtime.tasks import BoundedTasks
from common.worker.broker_client import BrokerClient, Report
from common.worker.core.admission import Command, NewWork, Room, refuse_command, refuse_new
from common.worker.core.blocks import BlockPool
from common.worker.core.prompts import PromptBuffer
from common.worker.core.scheduler import Scheduler, StepLimits
from common.worker.core.sequence import Sequence
from common.worker.core.table import HandoffTable
from common.worker.engine_loop import EngineLoop, StepOutcome
from common.worker.inspection import Inspection
from common.worker.settings import WorkerSettings
from common.worker.token_stream import TokenStream
from contracts.codec import decode
from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.handoff import ReleaseHandoff, RunMixed, RunPrefill
from contracts.requests import Accepted, CancelWork, PromptFrame
from contracts.subjects import WorkerVerb
from contracts.workers import (
    Link,
    WorkerLoad,
    WorkerRecord,
    WorkerRole,
    WorkerState,
)

_SWEEP_EVERY_S: Final = 1.0
_MAX_REPORTS: Final = 4096


class WorkerParts(msgspec.Struct, frozen=True, kw_only=True):
    """What a composition root gives a service."""

    settings: WorkerSettings
    incarnation: str
    engine: Engine
    info: EngineInfo
    bus: Bus
    clock: Clock
    log: Log
    metrics: Metrics
    group: asyncio.TaskGroup


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
        self.info = parts.info
        self.bus = parts.bus
        self.clock = parts.clock
        self.log = parts.log
        self.pool = BlockPool(
            num_blocks=parts.info.num_blocks, num_slots=parts.info.num_slots, block_size=parts.info.block_size
        )
        limits = StepLimits(
            max_step_tokens=settings.max_step_tokens,
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            mix_batch=settings.mix_batch,
        )
        self.scheduler = Scheduler(self.pool, limits)
        self.loop = EngineLoop(
            parts.engine, self.pool, self.scheduler, self, release_timeout_ms=settings.release_timeout_ms
        )
        self.prompts = PromptBuffer(max_tokens=settings.prompt_buffer_tokens, vocab_size=parts.info.vocab_size)
        self.table = HandoffTable()
        self.tokens = TokenStream(parts.bus, parts.clock)
        self.broker = BrokerClient(parts.bus, parts.clock)
        self.events = HandoffEvents(parts.bus, parts.clock, service=self.role, instance=settings.worker_id)
        self.reports = BoundedTasks(parts.group, name="report", limit=_MAX_REPORTS, on_error=self._report_failed)
        self._inspection = Inspection(
            settings.worker_id,
            parts.incarnation,
            parts.info.ranks,
            loop=self.loop,
            pool=self.pool,
            table=self.table,
            prompts=self.prompts,
            num_prefilled_tokens=lambda: self.num_prefilled_tokens,
        )
        self.draining = False
        self._deadlines: dict[str, Deadline] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_prefilled_tokens = 0
        self._prefilled = parts.metrics.counter("prefilled_tokens_total", "Prompt tokens computed.")
        self._decoded = parts.metrics.counter(
            "decoded_tokens_total", "Tokens computed one at a time, after the prompt."
        )
        self._step_seconds = parts.metrics.histogram("step_seconds", "Duration of one step on the sampling rank.")
        parts.metrics.gauge("free_blocks", "Cache blocks that nobody holds.").set_function(
            lambda: self.pool.num_free_blocks
        )
        parts.metrics.gauge("free_slots", "State slots that nobody holds.").set_function(
            lambda: self.pool.num_free_slots
        )
        parts.metrics.gauge("running_sequences", "Sequences that take part in steps.").set_function(
            lambda: self.scheduler.num_running
        )
        parts.metrics.gauge("waiting_sequences", "Sequences that wait for memory.").set_function(
            lambda: self.scheduler.num_waiting
        )

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence, prompt and output, that the model and the empty pool can hold."""
        return min(self.info.max_position, self.info.num_blocks * self.info.block_size)

    @property
    def links(self) -> tuple[Link, ...]:
        """What became of each meeting with a peer; only prefill workers meet any."""
        return ()

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
            dp=1,
            dcp=1,
            block_size=self.info.block_size,
            num_blocks=self.info.num_blocks,
            num_slots=self.info.num_slots,
            max_sequence_tokens=self.max_sequence_tokens,
            load=WorkerLoad(
                num_free_blocks=self.pool.num_free_blocks,
                num_free_slots=self.pool.num_free_slots,
                num_waiting=self.scheduler.num_waiting,
                num_running=self.scheduler.num_running,
            ),
            links=self.links,
        )

    def handlers(self) -> Mapping[str, Handler]:
        """What the worker can be asked, by verb. Roles add theirs."""
        return {
            WorkerVerb.RELEASE: self._release_asked,
            WorkerVerb.DESCRIBE: self._inspection.describe,
            WorkerVerb.SCAN: self._inspection.scan,
        }

    def role_tasks(self, bucket: Bucket, announce: Callable[[], None]) -> dict[str, Coroutine[Any, Any, None]]:
        """What a role does beside answering and computing, by task name. `announce` spreads a change of the record."""
        del bucket, announce
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

    def check_command(self, command: Command) -> None:
        """Refuse a command for another start of this worker, from a deposed broker, or for a handoff that is over."""
        _refuse(command.handoff_id, refuse_command(command, incarnation=self.incarnation, table=self.table))

    def check_new(self, command: NewWork, num_tokens: int) -> None:
        """Refuse new work of `num_tokens` while draining, when too many wait, or when it could never fit."""
        room = Room(
            worker_id=self.settings.worker_id,
            draining=self.draining,
            max_sequence_tokens=self.max_sequence_tokens,
            num_waiting=self.scheduler.num_waiting,
            max_waiting=self.settings.max_waiting,
        )
        _refuse(command.handoff_id, refuse_new(num_tokens, room))

    def new_sequence(self, command: NewWork) -> Sequence:
        """Let a handoff live here, and start its deadline."""
        sequence = Sequence(
            seq=self.table.next_seq(),
            handoff_id=command.handoff_id,
            request_id=command.request_id,
            attempt=command.attempt,
            router_id=command.router_id,
            num_prompt_tokens=command.num_prompt_tokens,
            sampling=command.sampling,
        )
        self.table.add(sequence)
        self._deadlines[sequence.handoff_id] = Deadline.from_remaining_ms(self.clock, command.timeout_ms)
        self._idle.clear()
        return sequence

    def deadline_of(self, sequence: Sequence) -> Deadline:
        """Until when the request is worth anything; now, if the handoff is over."""
        return self._deadlines.get(sequence.handoff_id) or Deadline.after(self.clock, 0)

    def count(self, outcome: StepOutcome) -> None:
        """Add a step to the counters."""
        num_prefilled = 0
        for item in outcome.plan.items:
            sequence = self.table.by_seq(item.seq)
            if sequence is not None and item.start < sequence.num_prompt_tokens:
                num_prefilled += item.num_tokens
        self.num_prefilled_tokens += num_prefilled
        self._prefilled.inc(num_prefilled)
        self._decoded.inc(sum(item.num_tokens for item in outcome.plan.items) - num_prefilled)
        self._step_seconds.observe((outcome.result.ended_ns - outcome.result.started_ns) / 1e9)

    def report(self, report: Report, deadline: Deadline) -> None:
        """Deliver a report to the broker in the background."""

        async def deliver() -> None:
            await self.broker.deliver(report, deadline)

        if not self.reports.try_start(deliver):
            self.log.error("report_dropped", handoff_id=report.handoff_id, report=type(report).__name__)

    async def end(self, handoff_id: str, *, tombstone: Deadline | None = None) -> None:
        """End a handoff here, known or not: stop it, take its memory back, and refuse it until the tombstone's moment."""
        until = (tombstone or self._deadlines.get(handoff_id) or Deadline.after(self.clock, 0)).at
        sequence = self.table.remove(handoff_id, until=until)
        self.prompts.drop(handoff_id)
        self._deadlines.pop(handoff_id, None)
        if sequence is None:
            return
        self.tokens.drop(sequence)
        await self.loop.release(sequence)
        if not len(self.table):
            self._idle.set()

    async def take_prompt(self, data: bytes) -> msgspec.Struct:
        """Keep a frame of a prompt."""
        frame = decode(data, PromptFrame)
        if self.draining:
            raise RefusedError(frame.handoff_id, ErrorCode.DRAINING, f"{self.settings.worker_id} is draining")
        if not self.table.is_buried(frame.handoff_id) and self.table.get(frame.handoff_id) is None:
            try:
                self.prompts.add(frame, self.clock.monotonic())
            except PdmeshError as error:
                raise RefusedError(frame.handoff_id, error.code, error.message) from error
        return Accepted(handoff_id=frame.handoff_id)

    def take_prompt_of(self, command: RunPrefill | RunMixed) -> tuple[int, ...]:
        """The token ids of a prompt that has arrived and is now asked to run. Refuses one that is not as announced."""
        try:
            prompt_ids = self.prompts.take(command.handoff_id, command.prompt_hash)
        except PdmeshError as error:
            raise RefusedError(command.handoff_id, error.code, error.message) from error
        if len(prompt_ids) != command.num_prompt_tokens:
            raise RefusedError(
                command.handoff_id,
                ErrorCode.PROTOCOL,
                f"num_prompt_tokens: {command.num_prompt_tokens} is not allowed; the rule is: {len(prompt_ids)}, as sent",
            )
        return prompt_ids

    async def run_cancels(self, subscription: Subscription) -> None:
        """Obey hints to stop computing. Memory stays where it is until the broker says so.

        A prompt that nobody has asked to run is dropped: the broker may never hear of it. Frames of it may still be on
        their way, so it stays refused for a while.
        """
        async with subscription:
            async for message in subscription:
                try:
                    cancel = decode(message.data, CancelWork)
                except PdmeshError as error:
                    self.log.info("message_refused", subject=message.subject, error=error.message)
                    continue
                sequence = self.table.get(cancel.handoff_id)
                if sequence is not None:
                    self.scheduler.hold(sequence)
                else:
                    grace = Deadline.after(self.clock, self.settings.deadline_grace_s)
                    await self.end(cancel.handoff_id, tombstone=grace)

    async def run_sweeps(self) -> None:
        """Once a second: end what is past its deadline and its grace, expire what is remembered, look at quarantine."""
        while True:
            await self.clock.sleep(_SWEEP_EVERY_S)
            now = self.clock.monotonic()
            self.prompts.expire(now)
            self.table.expire(now)
            for handoff_id, deadline in tuple(self._deadlines.items()):
                if now >= deadline.at + self.settings.deadline_grace_s:
                    self.log.info("handoff_expired", handoff_id=handoff_id)
                    await self.end(handoff_id)
            await self.loop.retry_quarantine()
            if not len(self.table) and not self.pool.num_quarantined_blocks:
                self.pool.check_integrity()

    async def drain(self) -> None:
        """Take nothing new, and wait until every handoff has ended here and every report is delivered."""
        self.draining = True
        await self._idle.wait()
        await self.reports.wait_idle(Deadline.after(self.clock, self.settings.drain_timeout_s))

    async def _release_asked(self, data: bytes) -> msgspec.Struct:
        command = decode(data, ReleaseHandoff)
        await self.end(command.handoff_id, tombstone=Deadline.from_remaining_ms(self.clock, command.tombstone_ms))
        return Accepted(handoff_id=command.handoff_id)

    def _report_failed(self, name: str, error: Exception) -> None:
        self.log.error("report_failed", task=name, error=repr(error))


def _refuse(handoff_id: str, error: ErrorInfo | None) -> None:
    if error is not None:
        raise RefusedError(handoff_id, error.code, error.message)
