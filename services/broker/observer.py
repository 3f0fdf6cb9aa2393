"""What people see of handoffs: events, metrics, and one line in the log when a request ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from common.bus.handoff_events import HandoffEvents
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics
from contracts.events import EventName
from contracts.handoff import HandoffState
from services.broker.core.effects import Publish
from services.broker.core.handoff import Handoff

_ENDS: Final = {
    EventName.REQUEST_FINISHED: HandoffState.FINISHED,
    EventName.REQUEST_CANCELLED: HandoffState.CANCELLED,
    EventName.REQUEST_FAILED: HandoffState.FAILED,
}
_STEPS: Final = {
    EventName.DECODE_RESERVED: ("reserve", "rpc_ms"),
    EventName.PREFILL_ACCEPTED: ("run", "rpc_ms"),
    EventName.RANK_PUSHED: ("push", "duration_ms"),
    EventName.PREFILL_FINISHED: ("prefill", "duration_ms"),
    EventName.LEDGER_CLOSED: ("ledger", "duration_ms"),
    EventName.HANDOFF_COMMITTED: ("commit", "rpc_ms"),
    EventName.TAKEN_OVER: ("takeover", "total_ms"),
}


class Observer:
    """Turns a `Publish` into everything that people look at. Never waits, never fails."""

    def __init__(self, events: HandoffEvents, metrics: Metrics, log: Log, *, in_flight: Callable[[], int]) -> None:
        self._events = events
        self._log = log
        gauge = metrics.gauge("broker_handoffs_in_flight", "Handoffs that have not ended and been released everywhere")
        gauge.set_function(in_flight)
        self._ended = metrics.counter("broker_handoffs_total", "Handoffs that ended, by how", ["state"])
        for state in _ENDS.values():
            self._ended.labels(state)
        self._refused = metrics.counter("broker_submits_refused_total", "Submits that were refused", ["code"])
        self._bytes = metrics.counter("broker_pushed_bytes_total", "Bytes that source ranks reported as written")
        self._steps = metrics.histogram("broker_step_seconds", "How long a part of a handoff took", ["step"])
        self._total = metrics.histogram("broker_handoff_seconds", "From the submit to the end", ["state"])

    def refused(self, code: str) -> None:
        """Count a submit that was not accepted."""
        self._refused.labels(code).inc()

    def saw(self, handoff: Handoff, effect: Publish) -> None:
        """Publish and count one event."""
        record, fields = handoff.record, effect.fields
        self._events.publish(
            effect.name, handoff_id=record.handoff_id, request_id=record.request_id, at_ns=effect.at_ns, **fields
        )
        if effect.name in _STEPS:
            step, field = _STEPS[effect.name]
            if field in fields:
                self._steps.labels(step).observe(fields[field] / 1e3)
        if effect.name is EventName.RANK_PUSHED:
            self._bytes.inc(fields["num_bytes"])
        state = _ENDS.get(effect.name)
        if state is not None:
            self._ended.labels(state).inc()
            self._total.labels(state).observe(fields["total_ms"] / 1e3)
            self._log.info(
                "handoff_ended",
                handoff_id=record.handoff_id,
                request_id=record.request_id,
                attempt=record.attempt,
                phase=str(state),
                num_prompt_tokens=record.num_prompt_tokens,
                num_tokens=record.num_tokens,
                duration_ms=fields["total_ms"],
                error_code=None if record.error is None else str(record.error.code),
                error_message=None if record.error is None else record.error.message,
            )
