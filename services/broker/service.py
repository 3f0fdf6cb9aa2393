"""The broker's shell: every handoff that it knows, and what feeds them."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections import deque
from typing import Final

from common.bus.handoff_events import HandoffEvents
from common.bus.port import Bus
from common.bus.rpc import RefusedError
from common.bus.storage import WORKER_TTL_S
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from common.runtime.tasks import BoundedTasks
from common.runtime.trace import current_trace, next_hop, within
from contracts import ids
from contracts.errors import CodecError, ErrorCode, ErrorInfo, InvalidValueError, PdmeshError
from contracts.handoff import HandoffRecord, PartsReport, PrefillFinished, RequestEnded, TakenOver
from contracts.links import LinkRecord
from contracts.requests import (
    Accepted,
    CancelRequest,
    DisaggregatedRoute,
    MixedRoute,
    SubmitRequest,
    TokenFrame,
    WorkerRef,
)
from contracts.trace import TRACEPARENT, TraceContext, read_trace
from services.broker.calls import Calls
from services.broker.core import messages
from services.broker.core.effects import AnswerSubmit, Effect, Forget, Measured, Publish
from services.broker.core.events import (
    Adopted,
    CancelRequested,
    DeadlinePassed,
    DecodeTookOver,
    Event,
    PartsReported,
    PrefillEnded,
    Submitted,
    WorkerEnded,
    WorkerGone,
)
from services.broker.core.handoff import Handoff, Policy, refusal, same_identity
from services.broker.core.leases import Leases
from services.broker.core.step import adopt, begin, step
from services.broker.live import Live
from services.broker.observer import Observer
from services.broker.performer import Job, Performer
from services.broker.plans import PairPlan, Plans
from services.broker.records import Records
from services.broker.settings import BrokerSettings

SWEEP_EVERY_S: Final = 0.1
_TASKS_A_HANDOFF: Final = 16
_MAX_REASON_CHARS: Final = 500
_NO_PLAN: Final = PairPlan(planned=(), block_size=1)


class Broker:
    """Owns the handoffs of one partition. Everything that happens to one goes through `feed`, in one order."""

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        bus: Bus,
        clock: Clock,
        log: Log,
        metrics: Metrics,
        group: asyncio.TaskGroup,
        records: Records,
        plans: Plans,
        calls: Calls,
        fence: int,
    ) -> None:
        self._settings = settings
        self.metrics = metrics
        self._bus = bus
        self._clock = clock
        self._log = log
        self._plans = plans
        self._records = records
        self._policy = Policy(
            fence=fence,
            tombstone_margin_ms=settings.tombstone_margin_ms,
            parts_query_ms=settings.parts_query_ms,
        )
        self._live: dict[str, Live] = {}
        self._ended: deque[tuple[float, str]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._reconnects = bus.reconnects
        self._leases = Leases(ttl_s=WORKER_TTL_S)
        self.draining = False
        self._tasks = BoundedTasks(
            group,
            name="effect",
            limit=settings.max_in_flight * _TASKS_A_HANDOFF,
            on_error=self._effect_failed,
        )
        self._performer = Performer(
            bus,
            clock,
            log,
            calls=calls,
            records=records,
            release_timeout_s=settings.release_timeout_s,
            is_gone=self._leases.is_gone,
        )
        events = HandoffEvents(bus, clock, service="broker", instance=settings.broker_id)
        self._observer = Observer(
            events, metrics, log, limit=settings.max_in_flight, num_tasks=lambda: self._tasks.running
        )

    @property
    def broker_id(self) -> str:
        """Which broker this is."""
        return self._settings.broker_id

    @property
    def num_in_flight(self) -> int:
        """Handoffs that have not ended, or whose memory is not back everywhere."""
        return len(self._live) - len(self._ended)

    def handoff(self, handoff_id: str) -> Handoff | None:
        """One handoff, as long as it is remembered."""
        live = self._live.get(handoff_id)
        return None if live is None else live.handoff

    # What the router asks.

    async def submit(self, submit: SubmitRequest) -> Accepted:
        """Accept a request once its record exists. Raises `RefusedError`."""
        try:
            error = await self._admit(submit)
        except PdmeshError as refused:
            error = refused.info
        if error is not None:
            self._observer.refused(str(error.code))
            raise RefusedError(submit.handoff_id, error.code, error.message)
        return Accepted(handoff_id=submit.handoff_id)

    async def _admit(self, submit: SubmitRequest) -> ErrorInfo | None:
        deadline = Deadline.from_remaining_ms(self._clock, submit.timeout_ms)
        if submit.handoff_id not in self._live:
            self._check(submit)
            plan = await self._plan(submit, deadline)
            if submit.handoff_id not in self._live:
                self._begin(submit, plan, deadline)
        live = self._live[submit.handoff_id]
        if not same_identity(live.handoff.record, submit):
            return ErrorInfo(code=ErrorCode.DUPLICATE, message=f"{submit.handoff_id} is taken by another request")
        return await asyncio.shield(live.admission)  # answered when the record is stored, at the deadline at the latest

    def _check(self, submit: SubmitRequest) -> None:
        if self.draining:
            raise PdmeshError("the broker is draining", code=ErrorCode.DRAINING)
        if self.num_in_flight >= self._settings.max_in_flight:
            raise PdmeshError(f"{self.num_in_flight} handoffs are in flight", code=ErrorCode.OVERLOADED)
        ids.check_token("router_id", submit.router_id)
        for worker in _workers_of(submit):
            ids.check_token("worker_id", worker.worker_id)
            if self._leases.is_replaced(worker):
                text = f"incarnation: {worker.incarnation!r} of {worker.worker_id} is gone"
                raise PdmeshError(text, code=ErrorCode.INCARNATION_CHANGED)
        expected = ids.handoff_id(submit.request_id, submit.attempt)
        if submit.handoff_id != expected:
            raise InvalidValueError(
                field="handoff_id", value=submit.handoff_id, rule=f"{expected}: request and attempt"
            )
        for field, value in (
            ("num_prompt_tokens", submit.num_prompt_tokens),
            ("timeout_ms", submit.timeout_ms),
            ("sampling.max_tokens", submit.sampling.max_tokens),
        ):
            if value < 1:
                raise InvalidValueError(field=field, value=value, rule="1 or more")

    async def _plan(self, submit: SubmitRequest, deadline: Deadline) -> PairPlan:
        match submit.route:
            case DisaggregatedRoute(prefill=prefill, decode=decode):
                return await self._plans.between(prefill, decode, deadline)
            case MixedRoute():
                return _NO_PLAN

    def _begin(self, submit: SubmitRequest, plan: PairPlan, deadline: Deadline) -> None:
        now_ns = self._clock.monotonic_ns()
        trace = current_trace()
        event = Submitted(
            at_ns=now_ns,
            submit=submit,
            deadline_ns=now_ns + round(deadline.remaining * 1e9),
            deadline_at=_wall(self._clock.wall_time() + deadline.remaining),
            traceparent="" if trace is None else trace.traceparent,
            planned=plan.planned,
            block_size=plan.block_size,
        )
        handoff, effects = begin(event, self._policy)
        self._keep(handoff, effects, deadline, trace)

    async def cancel(self, message: CancelRequest) -> Accepted:
        """Nobody waits any more. Raises `RefusedError` for an unknown handoff."""
        live = self._known(message.handoff_id)
        live.tell(
            CancelRequested(
                at_ns=self._clock.monotonic_ns(),
                reason=message.reason[:_MAX_REASON_CHARS],
                num_tokens=message.num_tokens,
                finish_reason=message.finish_reason,
            )
        )
        return Accepted(handoff_id=message.handoff_id)

    def end_of(self, handoff_id: str) -> TokenFrame | None:
        """The end of a handoff that is over, for a router that missed it; None while it is not. Raises `RefusedError` for an unknown one."""
        handoff = self._known(handoff_id).handoff
        return messages.final_frame(handoff) if handoff.terminal else None

    # What workers tell.

    async def take(self, message: PrefillFinished | TakenOver | RequestEnded) -> Accepted:
        """Take a worker's report over. Raises `RefusedError` for an unknown handoff, or for one of another start."""
        live = self._known(message.handoff_id)
        error = refusal(live.handoff, message)
        if error is not None:
            raise RefusedError(message.handoff_id, error.code, error.message)
        now_ns = self._clock.monotonic_ns()
        match message:
            case PrefillFinished():
                live.tell(PrefillEnded(at_ns=now_ns, message=message))
            case TakenOver():
                live.tell(DecodeTookOver(at_ns=now_ns, message=message))
            case RequestEnded():
                live.tell(WorkerEnded(at_ns=now_ns, message=message))
        return Accepted(handoff_id=message.handoff_id)

    def parts_reported(self, report: PartsReport) -> None:
        """Take a report of parts. One for an unknown handoff is late, and says nothing."""
        live = self._live.get(report.handoff_id)
        if live is not None:
            live.tell(PartsReported(at_ns=self._clock.monotonic_ns(), report=report))

    def worker_heard(self, worker: WorkerRef) -> None:
        """Note a worker's sign of life."""
        gone = self._leases.heard(worker, self._clock.monotonic())
        if gone is not None:
            self._worker_gone(gone)

    def worker_left(self, worker_id: str) -> None:
        """Note that a worker has signed off."""
        gone = self._leases.signed_off(worker_id)
        if gone is not None:
            self._worker_gone(gone)

    def link_heard(self, key: str, record: LinkRecord) -> None:
        """Note what a prefill worker says of a pair."""
        self._plans.verdicts.heard(key, record)

    def link_left(self, key: str) -> None:
        """Note that a pair is no more."""
        self._plans.verdicts.left(key)

    def _worker_gone(self, worker: WorkerRef) -> None:
        self._log.info("worker_gone", worker_id=worker.worker_id, incarnation=worker.incarnation)
        self._plans.drop(worker)
        event = WorkerGone(at_ns=self._clock.monotonic_ns(), worker=worker)
        for live in list(self._live.values()):
            live.tell(event)

    # Life.

    async def recover(self) -> int:
        """Take over what an earlier broker left unfinished; return how much that is. Raises `BusError`."""
        unfinished = await self._records.unfinished(self._unreadable)
        now_ns = self._clock.monotonic_ns()
        for record, revision in unfinished:
            deadline = Deadline.after(self._clock, _seconds_left(record, self._clock.wall_time()))
            deadline_ns = now_ns + round(deadline.remaining * 1e9)
            event = Adopted(at_ns=now_ns, record=record, revision=revision, deadline_ns=deadline_ns)
            handoff, effects = adopt(event, self._policy)
            trace = next_hop(read_trace({TRACEPARENT: record.traceparent}))
            with within(trace):
                self._log.info("handoff_adopted", handoff_id=record.handoff_id, phase=str(record.state))
            self._keep(handoff, effects, deadline, trace)
        return len(unfinished)

    def _unreadable(self, key: str, error: CodecError) -> None:
        self._log.error("handoff_record_unreadable", handoff_id=key, error_code=error.code, reason=error.message)

    async def run_sweeps(self) -> None:
        """Notice what silence tells: deadlines, workers that are gone, ended handoffs that nobody asks for any more."""
        while True:
            await self._clock.sleep(SWEEP_EVERY_S)
            now = self._clock.monotonic()
            self._judge_silence(now)
            grace = self._settings.deadline_grace_ms / 1e3
            for live in list(self._live.values()):
                if not live.ended and now >= live.deadline.at + grace:
                    live.tell(DeadlinePassed(at_ns=self._clock.monotonic_ns()))
            while self._ended and (
                now >= self._ended[0][0] + self._settings.keep_ended_s or len(self._ended) > self._settings.max_ended
            ):
                del self._live[self._ended.popleft()[1]]

    def _judge_silence(self, now: float) -> None:
        if not self._bus.is_connected or self._bus.reconnects != self._reconnects:
            self._reconnects = self._bus.reconnects
            self._leases.outage_until(now)
            return
        for worker in self._leases.expire(now):
            self._worker_gone(worker)

    async def drain(self) -> None:
        """Take nothing new, and wait until everything has ended and been released."""
        self.draining = True
        await self._idle.wait()

    # The core and its effects.

    def feed(self, live: Live, event: Event) -> None:
        """One step of one handoff."""
        before = live.handoff
        live.handoff, effects = step(before, event)
        self._observer.moved(before, live.handoff)
        self._perform(live, effects)

    def _keep(
        self, handoff: Handoff, effects: tuple[Effect, ...], deadline: Deadline, trace: TraceContext | None
    ) -> None:
        live = Live(self.feed, handoff, deadline, trace)
        self._observer.moved(None, handoff)
        if handoff.submit_answered:
            live.admission.set_result(None)
        self._live[handoff.handoff_id] = live
        self._idle.clear()
        self._perform(live, effects)

    def _perform(self, live: Live, effects: tuple[Effect, ...]) -> None:
        """Do what a step wants, in the handoff's own trace, whosever message made the step."""
        with within(live.trace):
            self._perform_each(live, effects)

    def _perform_each(self, live: Live, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case AnswerSubmit(error=error):
                    if not live.admission.done():
                        live.admission.set_result(error)
                case Publish():
                    self._observer.saw(live.handoff, effect)
                case Measured():
                    self._observer.measured(live.handoff, effect)
                case Forget():
                    self._observer.over(live.handoff)
                    self._ended.append((self._clock.monotonic(), live.handoff.handoff_id))
                    if not self.num_in_flight:
                        self._idle.set()
                case _:
                    self._start(live, effect)

    def _start(self, live: Live, effect: Job) -> None:
        if not self._tasks.try_start(lambda: self._performer.perform(live, effect)):
            # Each handoff has room for all of its effects: to be here is a mistake of ours, and must be heard of.
            self._log.error("effect_dropped", handoff_id=live.handoff.handoff_id, effect=type(effect).__name__)

    def _effect_failed(self, name: str, error: Exception) -> None:
        self._log.error("effect_failed", task=name, error=repr(error), exc_info=error)

    def _known(self, handoff_id: str) -> Live:
        live = self._live.get(handoff_id)
        if live is None:
            raise RefusedError(handoff_id, ErrorCode.UNKNOWN_HANDOFF, f"{handoff_id} is not known here")
        return live


def _workers_of(submit: SubmitRequest) -> tuple[WorkerRef, ...]:
    match submit.route:
        case DisaggregatedRoute(prefill=prefill, decode=decode):
            return prefill, decode
        case MixedRoute(mixed=mixed):
            return (mixed,)


def _wall(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="milliseconds")


def _seconds_left(record: HandoffRecord, wall_time: float) -> float:
    return max(0.0, dt.datetime.fromisoformat(record.deadline_at).timestamp() - wall_time)
