"""Performs the effects of handoffs, and feeds their outcomes back as events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias, assert_never

import msgspec

from common.bus.errors import BusError
from common.bus.port import Bus
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from contracts import subjects
from contracts.codec import encode
from contracts.errors import ErrorInfo, PdmeshError
from contracts.handoff import (
    CommitHandoff,
    PartsAnswer,
    PullHandoff,
    Released,
    Reserved,
    ReserveDecode,
    RunMixed,
    RunPrefill,
)
from contracts.requests import Accepted, Refused, WorkerRef
from contracts.subjects import WorkerVerb
from contracts.workers import WorkerRole
from services.broker.calls import CallAbandonedError, Calls
from services.broker.core.effects import (
    AnswerRouter,
    AskCommit,
    AskParts,
    AskPlan,
    AskPull,
    AskRelease,
    AskReserve,
    AskRun,
    CheckParts,
    HintCancel,
    StoreRecord,
)
from services.broker.core.events import (
    Ask,
    AskRefused,
    CommitAccepted,
    DecodeReserved,
    Event,
    PartsOverdue,
    PartsReported,
    PartsUnanswered,
    PlanFound,
    PrefillEnded,
    PullAccepted,
    PullOver,
    ReleaseSettled,
    RunAccepted,
)
from services.broker.plans import Plans
from services.broker.records import Records

_ANSWER_PAUSE_S: Final = 0.05
_ANSWER_S: Final = 5.0
_QUERY_S: Final = 3.0
"""More than the time after which a worker that nobody answers for counts as lost: that is an answer, too."""

Timed: TypeAlias = ReserveDecode | RunPrefill | RunMixed | PullHandoff | CommitHandoff
Job: TypeAlias = (
    StoreRecord
    | AskPlan
    | AskReserve
    | AskRun
    | AskPull
    | AskCommit
    | AskRelease
    | AskParts
    | CheckParts
    | HintCancel
    | AnswerRouter
)


class Target(Protocol):
    """The handoff that an effect belongs to."""

    @property
    def deadline(self) -> Deadline:
        """Until when the request is worth anything."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the handoff is terminal: then nothing new is asked for it."""
        ...

    def tell(self, event: Event) -> None:
        """Take an event, at the end of an effect."""
        ...


class Performer:
    """Does what takes time, an effect at a time. `on_unheard` hears of each worker that did not answer a release."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        log: Log,
        *,
        calls: Calls,
        records: Records,
        plans: Plans,
        release_timeout_s: float,
        is_gone: Callable[[WorkerRef], bool],
        on_unheard: Callable[[WorkerRef], None],
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._log = log
        self._calls = calls
        self._records = records
        self._plans = plans
        self._release_timeout_s = release_timeout_s
        self._is_gone = is_gone
        self._on_unheard = on_unheard

    async def perform(self, target: Target, effect: Job) -> None:
        """Perform one effect to its end, which is bounded."""
        match effect:
            case StoreRecord():
                target.tell(await self._records.store(effect))
            case AskPlan():
                await self._plan(target, effect)
            case AskReserve(worker=worker, message=message):
                await self._ask(target, Ask.RESERVE, WorkerRole.DECODE, worker, message)
            case AskRun(role=role, worker=worker, message=run):
                await self._ask(target, Ask.RUN, role, worker, run)
            case AskPull(worker=worker, message=pull):
                await self._ask(target, Ask.PULL, WorkerRole.DECODE, worker, pull)
            case AskCommit(worker=worker, message=commit):
                await self._ask(target, Ask.COMMIT, WorkerRole.DECODE, worker, commit)
            case AskRelease():
                await self._release(target, effect)
            case AskParts():
                await self._query(target, effect)
            case CheckParts(after_ms=after_ms):
                await self._clock.sleep(after_ms / 1000)
                target.tell(PartsOverdue(at_ns=self._now_ns))
            case HintCancel():
                await self._hint(effect)
            case AnswerRouter():
                await self._answer(effect)
            case _:
                assert_never(effect)

    @property
    def _now_ns(self) -> int:
        return self._clock.monotonic_ns()

    async def _ask(self, target: Target, ask: Ask, role: WorkerRole, worker: WorkerRef, message: Timed) -> None:
        subject = subjects.worker_rpc(role, worker.worker_id, WorkerVerb(ask.value))
        kind = Reserved | Refused if ask is Ask.RESERVE else Accepted | Refused
        began_ns = self._now_ns

        def fresh() -> msgspec.Struct:
            return msgspec.structs.replace(message, timeout_ms=target.deadline.remaining_ms)

        try:
            answer = await self._calls.ask(subject, fresh, kind, target.deadline, wanted=lambda: not target.ended)
        except CallAbandonedError:
            return
        except PdmeshError as error:
            answer = Refused(handoff_id=message.handoff_id, error=error.info)
        target.tell(_outcome(ask, answer, at_ns=self._now_ns, rpc_ms=(self._now_ns - began_ns) / 1e6))

    async def _plan(self, target: Target, effect: AskPlan) -> None:
        try:
            plan = await self._plans.for_route(effect.route, target.deadline, under_way=True)
        except PdmeshError as error:
            target.tell(AskRefused(at_ns=self._now_ns, ask=Ask.PLAN, error=_named(Ask.PLAN, error.info)))
            return
        target.tell(PlanFound(at_ns=self._now_ns, planned=plan.planned, block_size=plan.block_size))

    async def _release(self, target: Target, effect: AskRelease) -> None:
        worker = effect.worker
        subject = subjects.worker_rpc(effect.role, worker.worker_id, WorkerVerb.RELEASE)
        began_ns = self._now_ns
        answer: Accepted | Released | None = None
        try:
            said = await self._calls.ask(
                subject,
                lambda: effect.message,
                Accepted | Released | Refused,
                Deadline.after(self._clock, self._release_timeout_s),
                wanted=lambda: not self._is_gone(worker),
                patient=True,
            )
            if isinstance(said, Refused):  # its engine is lost, and it will be soon
                raise PdmeshError.from_info(said.error)
            answer = said
        except CallAbandonedError:
            self._log.info("release_moot", handoff_id=effect.message.handoff_id, worker_id=worker.worker_id)
        except PdmeshError as error:
            self._log.error(
                "release_unheard",
                handoff_id=effect.message.handoff_id,
                worker_id=worker.worker_id,
                error_code=str(error.code),
                error_message=error.message,
            )
        if answer is None:  # should it be heard of again it is asked; at the deadline it ends the handoff by itself
            self._on_unheard(worker)
        now_ns = self._now_ns
        target.tell(
            ReleaseSettled(
                at_ns=now_ns,
                role=effect.role,
                acknowledged=answer is not None,
                rpc_ms=(now_ns - began_ns) / 1e6,
                response_rpc_ms=answer.response_rpc_ms if isinstance(answer, Released) else None,
                prompt=answer.prompt if isinstance(answer, Released) else None,
                guesses=answer.guesses if isinstance(answer, Released) else None,
                quarantined=isinstance(answer, Released) and answer.quarantined,
            )
        )

    async def _query(self, target: Target, effect: AskParts) -> None:
        subject = subjects.worker_rpc(effect.role, effect.worker.worker_id, WorkerVerb.PARTS)
        deadline = target.deadline.capped(_QUERY_S)
        try:
            answer = await self._calls.ask(
                subject, lambda: effect.message, PartsAnswer | Refused, deadline, wanted=lambda: not target.ended
            )
        except PdmeshError as error:
            answer = Refused(handoff_id=effect.message.handoff_id, error=error.info)
        if isinstance(answer, Refused):
            code = str(answer.error.code)
            self._log.info("parts_unanswered", handoff_id=effect.message.handoff_id, role=effect.role, error_code=code)
            target.tell(PartsUnanswered(at_ns=self._now_ns, role=effect.role, error=answer.error))
            return
        for report in answer.reports:
            target.tell(PartsReported(at_ns=self._now_ns, report=report))
        if effect.role is WorkerRole.PREFILL and answer.finished is not None:
            target.tell(PrefillEnded(at_ns=self._now_ns, message=answer.finished))
        if effect.role is WorkerRole.DECODE and answer.pull_ended is not None:
            target.tell(PullOver(at_ns=self._now_ns, message=answer.pull_ended))

    async def _hint(self, effect: HintCancel) -> None:
        subject = subjects.cancel(effect.worker.worker_id, effect.request_id)
        try:
            await self._bus.publish(subject, encode(effect.message))
        except BusError as error:  # the release, which follows, is what counts
            self._log.info("cancel_hint_lost", handoff_id=effect.message.handoff_id, error_code=str(error.code))

    async def _answer(self, effect: AnswerRouter) -> None:
        frame = effect.frame
        subject, data = subjects.tokens(effect.router_id, frame.request_id), encode(frame)
        deadline = Deadline.after(self._clock, _ANSWER_S)
        while True:
            try:
                await self._bus.publish(subject, data)
            except BusError as error:
                if deadline.passed:  # the router has the same deadline as the request
                    self._log.error("answer_unheard", handoff_id=frame.handoff_id, error_code=str(error.code))
                    return
                await self._clock.sleep(_ANSWER_PAUSE_S)
            else:
                return


def _outcome(ask: Ask, answer: Reserved | Accepted | Refused, *, at_ns: int, rpc_ms: float) -> Event:
    match answer:
        case Refused(error=error):
            return AskRefused(at_ns=at_ns, ask=ask, error=_named(ask, error))
        case Reserved():
            return DecodeReserved(at_ns=at_ns, answer=answer, rpc_ms=rpc_ms)
        case Accepted():
            if ask is Ask.COMMIT:
                return CommitAccepted(at_ns=at_ns, rpc_ms=rpc_ms)
            if ask is Ask.PULL:
                return PullAccepted(at_ns=at_ns, rpc_ms=rpc_ms)
            return RunAccepted(at_ns=at_ns, rpc_ms=rpc_ms)


def _named(ask: Ask, error: ErrorInfo) -> ErrorInfo:
    """Say which question failed; code and parameter stay."""
    return msgspec.structs.replace(error, message=f"{ask}: {error.message}")
