"""The broker's shell: every handoff that it knows, and what feeds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from common.bus.errors import BusError
from common.bus.handoff_events import HandoffEvents
from common.bus.port import Bus
from common.bus.rpc import RefusedError, UnansweredError
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from common.runtime.trace import current_trace
from contracts.errors import CodecError, ErrorCode, ErrorInfo, PdmeshError
from contracts.handoff import PartsReport, PrefillFinished, RequestEnded, TakenOver
from contracts.pull import PullEnded
from contracts.requests import (
    Accepted,
    CancelRequest,
    SubmitRequest,
    TokenFrame,
    WorkerRef,
)
from contracts.show import HandoffView
from contracts.trace import TraceContext
from services.broker.adopter import Adopter
from services.broker.calls import Calls
from services.broker.core import messages
from services.broker.core.deadline_text import write_deadline
from services.broker.core.effects import Effect
from services.broker.core.events import (
    CancelRequested,
    DeadlinePassed,
    DecodeTookOver,
    PartsReported,
    PrefillEnded,
    PullOver,
    RouterGone,
    Submitted,
    WorkerEnded,
    WorkerGone,
)
from services.broker.core.handoff import Handoff, Policy, refusal, same_identity
from services.broker.core.step import begin
from services.broker.core.submission import check_submit, workers_on
from services.broker.core.view import view, view_of_record
from services.broker.driver import Driver
from services.broker.live import Live, LiveHandoffs
from services.broker.observer import Observer
from services.broker.orphans import Orphans
from services.broker.performer import Performer
from services.broker.plans import PairPlan, Plans
from services.broker.presence import Presence
from services.broker.records import Records
from services.broker.router_presence import RouterPresence
from services.broker.settings import BrokerSettings
from services.broker.strays import Strays

SWEEP_EVERY_S: Final = 0.1
_TASKS_A_HANDOFF: Final = 16
_STRAYS_AFTER_S: Final = 30.0
"""How long after its broker has forgotten a handoff a record of it that has not ended is looked for."""
_MAX_REASON_CHARS: Final = 500


class Broker:
    """Owns the handoffs of one partition. Everything that happens to one goes through its `tell`, in one order."""

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
        is_mute: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self.metrics = metrics
        self._clock = clock
        self._is_mute = is_mute
        self._log = log
        self._plans = plans
        self._records = records
        self._policy = Policy(
            fence=fence,
            tombstone_margin_ms=settings.tombstone_margin_ms,
            parts_query_ms=settings.parts_query_ms,
        )
        self._handoffs = LiveHandoffs(keep_ended_s=settings.keep_ended_s, max_ended=settings.max_ended)
        self.workers = Presence(bus, clock, log, metrics=metrics, on_gone=self._worker_gone, is_mute=is_mute)
        """Which workers are there: who watches `PD_WORKERS` feeds this."""
        self.routers = RouterPresence(bus, clock, log, on_gone=self._router_gone, is_mute=is_mute)
        """Which routers are there: who watches `PD_ROUTERS` feeds this."""
        self._adopter = Adopter(records, clock, log, policy=self._policy, keep=self._keep)
        self.links = plans.verdicts
        """What prefill workers say of pairs: who watches `PD_LINKS` feeds this."""
        self.orphans = Orphans(
            calls,
            records,
            clock,
            log,
            metrics=metrics,
            group=group,
            fence=fence,
            tombstone_margin_ms=settings.tombstone_margin_ms,
            find=self.handoff,
            take_left=self._adopter.take_left,
        )
        """Takes back what workers hold for nobody: who watches `PD_WORKERS` feeds this."""
        self.strays = Strays(
            records,
            clock,
            log,
            fence=fence,
            pause_s=settings.keep_ended_s + _STRAYS_AFTER_S,
            is_known=lambda handoff_id: self._handoffs.get(handoff_id) is not None,
            take=self._adopter.take_stray,
        )
        """Ends records that nobody goes on with: its `run` is a task of the broker."""
        performer = Performer(
            bus,
            clock,
            log,
            calls=calls,
            records=records,
            plans=plans,
            release_timeout_s=settings.release_timeout_s,
            is_gone=self.workers.is_gone,
            on_unheard=self.orphans.expect,
        )
        events = HandoffEvents(bus, clock, service="broker", instance=settings.broker_id)
        self._observer = Observer(
            events, metrics, log, limit=settings.max_in_flight, num_tasks=lambda: self._driver.num_running
        )
        self._driver = Driver(
            self._handoffs,
            performer,
            self._observer,
            clock,
            log,
            group=group,
            max_tasks=settings.max_in_flight * _TASKS_A_HANDOFF,
            on_unwritten=self.strays.expect,
        )

    @property
    def broker_id(self) -> str:
        """Which broker this is."""
        return self._settings.broker_id

    @property
    def max_timeout_ms(self) -> int:
        """How long a request may last at most: no request outlives its record."""
        return round(self._settings.record_ttl_s * 1e3)

    @property
    def num_in_flight(self) -> int:
        """Handoffs that have not ended, or whose memory is not back everywhere."""
        return self._handoffs.num_in_flight

    def handoff(self, handoff_id: str) -> Handoff | None:
        """One handoff, as long as it is remembered."""
        live = self._handoffs.get(handoff_id)
        return None if live is None else live.handoff

    # What the router asks.

    async def submit(self, submit: SubmitRequest) -> Accepted:
        """Accept a request once its record exists. Raises `RefusedError`, and `UnansweredError` while another broker may lead."""
        if self._is_mute():  # what it knows may be of a term that is over: whoever leads hears the same question
            raise UnansweredError(f"{submit.handoff_id} may be another broker's")
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
        live = self._handoffs.get(submit.handoff_id)
        if live is None:
            self._check(submit)
            plan = await self._plans.for_route(submit.route, deadline)
            live = self._handoffs.get(submit.handoff_id) or self._begin(submit, plan, deadline)
        if not same_identity(live.handoff.record, submit):
            return ErrorInfo(code=ErrorCode.DUPLICATE, message=f"{submit.handoff_id} is taken by another request")
        return await asyncio.shield(live.admission)  # answered when the record is stored, at the deadline at the latest

    def _check(self, submit: SubmitRequest) -> None:
        if self.num_in_flight >= self._settings.max_in_flight:
            raise PdmeshError(f"{self.num_in_flight} handoffs are in flight", code=ErrorCode.OVERLOADED)
        latest = self._handoffs.latest(submit.request_id)
        if latest is not None and latest.handoff.record.attempt > submit.attempt:
            text = f"{submit.handoff_id} comes late: {latest.handoff.handoff_id} is known"
            raise PdmeshError(text, code=ErrorCode.CANCELLED)
        check_submit(
            submit,
            is_replaced=self.workers.is_replaced,
            is_gone=self.workers.is_gone,
            max_timeout_ms=self.max_timeout_ms,
        )

    def _begin(self, submit: SubmitRequest, plan: PairPlan, deadline: Deadline) -> Live:
        now_ns = self._clock.monotonic_ns()
        trace = current_trace()
        event = Submitted(
            at_ns=now_ns,
            submit=submit,
            deadline_ns=now_ns + round(deadline.remaining * 1e9),
            deadline_at=write_deadline(self._clock.wall_time() + deadline.remaining),
            traceparent="" if trace is None else trace.traceparent,
            planned=plan.planned,
            block_size=plan.block_size,
        )
        handoff, effects = begin(event, self._policy)
        return self._keep(handoff, effects, deadline, trace, previous_error=submit.previous_error)

    async def cancel(self, message: CancelRequest) -> Accepted:
        """Nobody waits any more: accepted once the record says so, unanswered while it cannot be written. Raises as `take` does."""
        live = await self._here(message.handoff_id)
        live.tell(
            CancelRequested(
                at_ns=self._clock.monotonic_ns(),
                reason=message.reason[:_MAX_REASON_CHARS],
                num_tokens=message.num_tokens,
                finish_reason=message.finish_reason,
            )
        )
        return await self._written(live)

    async def end_of(self, handoff_id: str) -> TokenFrame | None:
        """The end of a handoff that is over, for a router that missed it; None while it is not. Raises as `take` does."""
        handoff = (await self._here(handoff_id)).handoff
        return messages.final_frame(handoff) if handoff.terminal else None

    async def show(self, handoff_id: str) -> HandoffView:
        """All that is known of a handoff, or what its record says. Raises `RefusedError` for an unknown one, and `BusError`."""
        live = self._handoffs.get(handoff_id)
        if live is not None:
            return view(live.handoff)
        kept = await self._records.find(handoff_id)
        if kept is None:
            raise RefusedError(handoff_id, ErrorCode.UNKNOWN_HANDOFF, f"{handoff_id} is not known here")
        return view_of_record(kept[0])

    # What workers tell.

    async def take(self, message: PrefillFinished | PullEnded | TakenOver | RequestEnded) -> Accepted:
        """Take a worker's report over. Raises `RefusedError` for an unknown handoff, or for one of another start.

        A takeover and an end are accepted once the record says so: no worker tells another broker of them again. Raises
        `UnansweredError` when the record could not be written, and when another broker goes on with the handoff: it is the one to be told.
        """
        live = await self._here(message.handoff_id)
        if (
            live.handoff.is_claiming or live.handoff.stored is None
        ):  # the bucket's answer may be what this message speaks of
            await live.wait_written()
            self._accepted(live)
        error = refusal(live.handoff, message)
        if error is not None:
            raise RefusedError(message.handoff_id, error.code, error.message)
        now_ns = self._clock.monotonic_ns()
        match message:
            case PrefillFinished():
                live.tell(PrefillEnded(at_ns=now_ns, message=message))
            case PullEnded():
                live.tell(PullOver(at_ns=now_ns, message=message))
            case TakenOver():
                live.tell(DecodeTookOver(at_ns=now_ns, message=message))
                return await self._written(live)
            case RequestEnded():
                live.tell(WorkerEnded(at_ns=now_ns, message=message))
                return await self._written(live)
        return self._accepted(live)

    def parts_reported(self, report: PartsReport) -> None:
        """Take a report of parts. One that is late, or comes twice, says nothing.

        Raises `PdmeshError` for one that no worker can have sent: of a handoff that nobody here has heard of, or by another start. An
        ended handoff is heard of for `keep_ended_s`, and an unknown one may be another broker's while one may lead.
        """
        live = self._handoffs.get(report.handoff_id)
        if live is None:
            if self._is_mute():
                return
            raise PdmeshError(f"{report.handoff_id} is not known here", code=ErrorCode.UNKNOWN_HANDOFF)
        error = refusal(live.handoff, report)
        if error is not None:
            raise PdmeshError.from_info(error)
        live.tell(PartsReported(at_ns=self._clock.monotonic_ns(), report=report))

    def _worker_gone(self, worker: WorkerRef) -> None:
        self._plans.drop(worker)
        event = WorkerGone(at_ns=self._clock.monotonic_ns(), worker=worker)
        for live in self._handoffs:
            live.tell(event)

    def _router_gone(self, router_id: str, incarnation: str) -> None:
        event = RouterGone(at_ns=self._clock.monotonic_ns(), router_id=router_id, incarnation=incarnation)
        for live in self._handoffs:
            live.tell(event)

    # Life.

    async def recover(self) -> int:
        """See `Adopter.recover`."""
        num_adopted = await self._adopter.recover()
        self.strays.expect()  # whoever led before may only stand still
        return num_adopted

    async def run_sweeps(self) -> None:
        """Notice what silence tells: deadlines, workers that are gone, ended handoffs that nobody asks for any more."""
        while True:
            await self._clock.sleep(SWEEP_EVERY_S)
            self.workers.judge_silence()
            self.routers.judge_silence()
            now = self._clock.monotonic()
            grace = self._settings.deadline_grace_ms / 1e3
            for live in self._handoffs:
                if not live.ended and now >= live.deadline.at + grace:
                    live.tell(DeadlinePassed(at_ns=self._clock.monotonic_ns()))
            self._handoffs.expire(now)

    async def drain(self) -> None:
        """Wait until everything that is in flight now has ended and been released.

        What comes meanwhile is taken: nobody else may take it before the lease is given back, and whoever leads then goes on with it.
        It is not waited for: under load there would always be something.
        """
        await self._handoffs.wait_ended()

    def _keep(
        self,
        handoff: Handoff,
        effects: tuple[Effect, ...],
        deadline: Deadline,
        trace: TraceContext | None,
        *,
        previous_error: ErrorInfo | None = None,
    ) -> Live:
        live = Live(self._driver.feed, handoff, deadline, trace)
        self._observer.moved(None, handoff)
        if handoff.submit_answered:
            live.admission.set_result(None)
        before = self._handoffs.latest(handoff.record.request_id)
        self._handoffs.add(live)
        if handoff.record.router_incarnation is not None:
            self.routers.expect(handoff.record.router_id, handoff.record.router_incarnation)
        self._driver.begin(live, effects)
        if not handoff.terminal:
            self._expect_workers(live)
        if before is not None:
            self._supersede(before, live, previous_error)
        return live

    def _expect_workers(self, live: Live) -> None:
        """See to it that a handoff hears of its workers' ends: of those before it began, and of whom this broker never hears."""
        for worker in workers_on(live.handoff.record.route):
            if self.workers.is_gone(worker):
                live.tell(WorkerGone(at_ns=self._clock.monotonic_ns(), worker=worker))
            else:
                self.workers.expect(worker)

    def _supersede(self, one: Live, other: Live, previous_error: ErrorInfo | None) -> None:
        """Of two attempts of a request the later one goes on: the router has given the other one up, and may have said for which error.

        The worker's own word of that error may be under way still: whichever comes first, the attempt ends alike.
        """
        earlier, later = sorted((one, other), key=lambda live: live.handoff.record.attempt)
        event = CancelRequested(
            at_ns=self._clock.monotonic_ns(),
            reason=f"{later.handoff.handoff_id} has taken its place",
            num_tokens=later.handoff.record.num_delivered_tokens,
            error=previous_error if later is other else None,
        )
        earlier.tell(event)

    async def _here(self, handoff_id: str) -> Live:
        """A handoff of this broker's. Raises `RefusedError` for one that nobody knows, `UnansweredError` for another broker's."""
        live = self._handoffs.get(handoff_id) or await self._found(handoff_id)
        self._accepted(live)
        return live

    async def _found(self, handoff_id: str) -> Live:
        """A handoff that is not in memory: left by a broker of an earlier term, it goes on here. Raises as `_here` does.

        One of a later term may go on with it, and while the bucket does not answer, one may.
        """
        kept, is_unsure = None, self._is_mute()
        try:
            kept = None if is_unsure else await self._records.find(handoff_id)
        except CodecError:
            pass
        except BusError:
            is_unsure = True
        live = self._handoffs.get(handoff_id)  # it may have been submitted meanwhile, or found
        if live is not None:
            return live
        if is_unsure or (kept is not None and kept[0].fence > self._policy.fence):
            raise UnansweredError(f"{handoff_id} may be another broker's")
        live = None if kept is None else self._adopter.take_left(*kept)
        if live is None:
            raise RefusedError(handoff_id, ErrorCode.UNKNOWN_HANDOFF, f"{handoff_id} is not known here")
        return live

    async def _written(self, live: Live) -> Accepted:
        """What was told counts once the bucket holds it: whoever leads next must not have to be told by somebody who has forgotten."""
        await live.wait_written()
        if live.handoff.is_behind:
            raise UnansweredError(f"what became of {live.handoff.handoff_id} could not be written yet")
        return self._accepted(live)

    def _accepted(self, live: Live) -> Accepted:
        """What was told counts, unless another broker has taken the handoff over, now or before."""
        handoff = live.handoff
        if handoff.is_elsewhere:
            raise UnansweredError(f"another broker goes on with {handoff.handoff_id}")
        return Accepted(handoff_id=handoff.handoff_id)
