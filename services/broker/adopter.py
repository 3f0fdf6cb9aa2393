"""Going on with handoffs of a broker that is gone: from their records, in the order in which they were written last."""

from __future__ import annotations

from typing import Protocol

from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from common.runtime.trace import next_hop, within
from contracts.errors import CodecError
from contracts.handoff import HandoffRecord
from contracts.trace import TRACEPARENT, TraceContext, read_trace
from services.broker.core.deadline_text import seconds_left, seconds_until
from services.broker.core.effects import Effect
from services.broker.core.events import Adopted, CancelRequested
from services.broker.core.handoff import Handoff, Policy
from services.broker.core.step import adopt
from services.broker.live import Live
from services.broker.records import Records


class Keep(Protocol):
    """Lets a handoff live from now on, and does what its first step wants."""

    def __call__(
        self, handoff: Handoff, effects: tuple[Effect, ...], deadline: Deadline, trace: TraceContext | None
    ) -> Live:
        """Keep it."""
        ...


class Adopter:
    """Adopts records for the broker whose `policy` this is."""

    def __init__(self, records: Records, clock: Clock, log: Log, *, policy: Policy, keep: Keep) -> None:
        self._records = records
        self._clock = clock
        self._log = log
        self._policy = policy
        self._keep = keep

    async def recover(self) -> int:
        """Take over what an earlier broker left behind; return how much that is. Raises `BusError`."""
        left_over = await self._records.left_over(self._unreadable)
        for record, revision in left_over:
            self._adopt(record, revision)
        return len(left_over)

    def take_left(self, record: HandoffRecord, revision: int) -> Live | None:
        """Go on with what a broker of an earlier term wrote when this one had looked already; None for any other record.

        It only stood still, and told somebody that it had taken the request on before it noticed that its term was over.
        """
        if record.state.terminal or record.fence >= self._policy.fence:
            return None
        return self._adopt(record, revision)

    def take_stray(self, record: HandoffRecord, revision: int) -> None:
        """End what nobody goes on with: whoever asked for it was refused, or has asked again."""
        now_ns = self._clock.monotonic_ns()
        self._adopt(record, revision).tell(CancelRequested(at_ns=now_ns, reason="it was left behind by its broker"))

    def _adopt(self, record: HandoffRecord, revision: int) -> Live:
        now_ns = self._clock.monotonic_ns()
        deadline = Deadline.after(self._clock, seconds_left(record.deadline_at, self._clock.wall_time()))
        event = Adopted(
            at_ns=now_ns,
            record=record,
            revision=revision,
            deadline_ns=now_ns + round(deadline.remaining * 1e9),
            begun_ns=self._submitted_ns(record, now_ns),
        )
        handoff, effects = adopt(event, self._policy)
        trace = next_hop(read_trace({TRACEPARENT: record.traceparent}))
        with within(trace):
            self._log.info("handoff_adopted", handoff_id=record.handoff_id, phase=str(record.state))
        return self._keep(handoff, effects, deadline, trace)

    def _submitted_ns(self, record: HandoffRecord, now_ns: int) -> int:
        """When it was submitted, by this process's clock; now if its record does not say, or says a moment that is to come."""
        if not record.submitted_at:
            return now_ns
        return now_ns + min(0, round(seconds_until(record.submitted_at, self._clock.wall_time()) * 1e9))

    def _unreadable(self, key: str, error: CodecError) -> None:
        self._log.error("handoff_record_unreadable", handoff_id=key, error_code=error.code, reason=error.message)
