"""One step under way: the handoff as it becomes, the effects so far, and what every step may do."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import (
    HandoffRecord,
    HandoffState,
    PromptTimes,
    QueryParts,
)
from contracts.requests import MixedRoute
from contracts.workers import WorkerRole
from services.broker.core import messages
from services.broker.core.effects import (
    AnswerRouter,
    AnswerSubmit,
    AskCommit,
    AskParts,
    AskRelease,
    AskReserve,
    AskRun,
    Effect,
    Measured,
)
from services.broker.core.handoff import Handoff, Verdict

MAX_NAMED_PARTS: Final = 8

Outcome = tuple[Handoff, tuple[Effect, ...]]


class Turn:
    """One step under way: the handoff as it becomes, and the effects so far."""

    def __init__(self, handoff: Handoff, at_ns: int) -> None:
        self.handoff = handoff
        self.at_ns = at_ns
        self.effects: list[Effect] = []

    @property
    def outcome(self) -> Outcome:
        """What `step` returns."""
        return self.handoff, tuple(self.effects)

    @property
    def state(self) -> HandoffState:
        """Where the handoff is."""
        return self.handoff.record.state

    @property
    def open(self) -> bool:
        """Whether the handoff has neither ended nor been judged."""
        return not self.handoff.terminal and self.handoff.verdict is None

    @property
    def is_mixed(self) -> bool:
        """Whether one worker does everything."""
        return isinstance(self.handoff.record.route, MixedRoute)

    def set(self, **changes: Any) -> None:
        """Change fields of the handoff."""
        self.handoff = msgspec.structs.replace(self.handoff, **changes)

    def amend(self, **changes: Any) -> None:
        """Change fields of its record: the bucket is written behind."""
        self.set(record=msgspec.structs.replace(self.handoff.record, **changes))

    def publish(self, name: EventName, **fields: Any) -> None:
        """Tell people."""
        self.effects.append(messages.happened(self.handoff, name, self.at_ns, fields))

    def measured(self, prompt: PromptTimes | None) -> None:
        """Count what a mixed worker says of its prompt, if it says anything."""
        if prompt is not None:
            self.effects.append(Measured(prompt=prompt))

    def since(self, began_ns: int) -> float:
        """Milliseconds from then to now."""
        return (self.at_ns - began_ns) / 1e6

    # On the way.

    def admit(self) -> None:
        """The record exists: the request is accepted, and the first worker is asked."""
        self.set(submit_answered=True)
        self.effects.append(AnswerSubmit(error=None))
        self.publish(EventName.REQUEST_SUBMITTED, num_tokens=self.handoff.record.num_prompt_tokens)
        if not self.open:
            return
        if self.is_mixed:
            self.ask_run(WorkerRole.MIXED)
            return
        self.tell(WorkerRole.DECODE)
        self.tell(WorkerRole.PREFILL)  # of nothing yet, but it has the prompt from the router
        self.ask_reserve()

    def ask_reserve(self) -> None:
        """Ask decode for memory."""
        self.set(asked_ns=self.at_ns)
        message = messages.reserve(self.handoff, self.at_ns)
        self.effects.append(AskReserve(worker=self.handoff.workers[WorkerRole.DECODE], message=message))

    def tell(self, role: WorkerRole) -> None:
        """Note that a worker may hold something from now on."""
        self.set(told=self.handoff.told | {role})

    def ask_run(self, role: WorkerRole) -> None:
        """Ask the worker that computes the prompt."""
        self.tell(role)
        self.set(asked_ns=self.at_ns)
        message = messages.run(self.handoff, self.at_ns)
        self.effects.append(AskRun(role=role, worker=self.handoff.workers[role], message=message))

    def ask_parts(self, role: WorkerRole) -> None:
        """Ask a worker what it has reported."""
        query = QueryParts(handoff_id=self.handoff.handoff_id)
        self.effects.append(AskParts(role=role, worker=self.handoff.workers[role], message=query))

    def ask_commit(self) -> None:
        """Decode may have it: the bucket says so."""
        handoff = self.handoff
        if handoff.record.first_token is None:
            self.fail(messages.protocol("a committed record has a first token"))
            return
        self.set(commit_asked=True, asked_ns=self.at_ns)
        message = messages.commit(handoff, handoff.record.first_token, self.at_ns)
        self.effects.append(AskCommit(worker=handoff.workers[WorkerRole.DECODE], message=message))

    # The end.

    def judge(self, verdict: Verdict) -> None:
        """Decide how to end, unless that is decided already."""
        if self.open:
            self.set(verdict=verdict)

    def fail(self, error: ErrorInfo) -> None:
        """End in failure, unless the end is decided already.

        What a worker calls cancelled has been cancelled: the router tells workers directly too, so they may know before the broker.
        """
        cancelled = error.code is ErrorCode.CANCELLED
        self.judge(Verdict(state=HandoffState.CANCELLED if cancelled else HandoffState.FAILED, error=error))

    def conclude(self, record: HandoffRecord) -> None:
        """Enter a terminal state: memory back everywhere, one last word to whoever waits."""
        owed = self._owed() if record.state is HandoffState.FAILED else {}
        num_tokens = record.num_tokens if self._knows_tokens(record) else None
        self.unlock(error=record.error)
        self.set(record=record)
        handoff = self.handoff
        self.part()
        name = {
            HandoffState.FINISHED: EventName.REQUEST_FINISHED,
            HandoffState.CANCELLED: EventName.REQUEST_CANCELLED,
        }.get(record.state, EventName.REQUEST_FAILED)
        self.publish(
            name,
            total_ms=self.since(handoff.begun_ns),
            num_tokens=num_tokens,
            finish_reason=None if record.finish_reason is None else str(record.finish_reason),
            error=record.error,
            **owed,
        )

    def _knows_tokens(self, record: HandoffRecord) -> bool:
        """Whether the tokens that a record counts are those that there were: a worker that was lost has told nobody of its own."""
        mixed = isinstance(record.route, MixedRoute)
        generating = self.handoff.run_accepted if mixed else self.handoff.commit_asked
        counted = record.state is not HandoffState.FAILED or record.num_tokens > record.num_delivered_tokens
        return counted or not generating

    def unlock(self, **fields: Any) -> None:
        """Nobody moves the request's bytes by pulling any more. Nothing happens where nobody did."""
        lock = self.handoff.record.lock
        if lock is None:
            return
        self.amend(lock=None)
        self.publish(EventName.REQUEST_UNLOCKED, lock=lock.number, lock_holder=lock.holder.worker_id, **fields)

    def part(self) -> None:
        """Let go of whoever has to do with a handoff that has ended. They may have heard it before: nothing changes then."""
        handoff = self.handoff
        record = handoff.record
        reason = record.error.message if record.error is not None else str(record.state)
        for role in sorted(handoff.told):
            self.release(role, reason)
        if not handoff.submit_answered:
            self.effects.append(AnswerSubmit(error=record.error))
        elif record.state is not HandoffState.FINISHED and not handoff.router_answered:
            self.effects.append(AnswerRouter(router_id=record.router_id, frame=messages.final_frame(handoff)))
        self.set(submit_answered=True, router_answered=True)

    def _owed(self) -> dict[str, Any]:
        """Which parts of the cache had not arrived."""
        count, ledger = self.handoff.num_missing_parts, self.handoff.ledger
        if not count or ledger is None:
            return {}
        return {"missing_parts": ledger.missing(MAX_NAMED_PARTS), "num_missing_parts": count}

    def release(self, role: WorkerRole, reason: str) -> None:
        """Take a worker's memory back, once."""
        handoff = self.handoff
        if role not in handoff.told or role in handoff.settled or role in handoff.release_asked:
            return
        self.set(release_asked=handoff.release_asked | {role})
        message = messages.release(handoff, reason, self.at_ns)
        self.effects.append(AskRelease(role=role, worker=handoff.workers[role], message=message))

    def release_again(self, role: WorkerRole) -> None:
        """A worker took something over after the end: it may have done so after the release."""
        handoff = self.handoff
        if role in handoff.told and role in handoff.release_asked:
            message = messages.release(handoff, "the handoff has ended", self.at_ns)
            self.effects.append(AskRelease(role=role, worker=handoff.workers[role], message=message))
