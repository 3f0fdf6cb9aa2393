"""What people see of handoffs: events, metrics, and one line in the log when a request is over."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

import msgspec

from common.bus.handoff_events import HandoffEvents
from common.runtime.lifecycle import Log
from common.runtime.metrics import PHASE_BUCKETS, Metrics
from contracts.events import EventName
from contracts.handoff import HandoffState
from contracts.phases import Phase, phases_of, phases_of_prompt
from services.broker.core.effects import Measured, Publish
from services.broker.core.handoff import Handoff

_ENDS: Final = {
    EventName.REQUEST_FINISHED: HandoffState.FINISHED,
    EventName.REQUEST_CANCELLED: HandoffState.CANCELLED,
    EventName.REQUEST_FAILED: HandoffState.FAILED,
}
_RELEASING: Final = "releasing"
_STAGES: Final = (*(str(state) for state in HandoffState if not state.terminal), _RELEASING)


class _Story(msgspec.Struct, kw_only=True):
    """What has been told of one handoff. `phases` are in ms, those of single source ranks under `push_rank_N`.

    `num_tokens` is None where nobody could say how many there were.
    """

    phases: dict[str, float] = {}
    num_bytes: int = 0
    num_parts: int = 0
    num_tokens: int | None = None
    ended: bool = False


class Observer:
    """Turns what happens to handoffs into everything that people look at. Never waits, never fails.

    The caller has set the handoff's trace.
    """

    def __init__(
        self, events: HandoffEvents, metrics: Metrics, log: Log, *, limit: int, num_tasks: Callable[[], int]
    ) -> None:
        self._events = events
        self._log = log
        self._stories: dict[str, _Story] = {}
        stages = metrics.gauge(
            "broker_handoffs_in_flight", "Handoffs that have not ended and been released everywhere.", ["state"]
        )
        self._stage_series = {stage: stages.labels(stage) for stage in _STAGES}
        for series in self._stage_series.values():
            series.set(0)  # a term of leadership begins with none
        metrics.gauge("broker_handoffs_in_flight_limit", "Handoffs that may be in flight.").set(limit)
        metrics.gauge("broker_effects_running", "Calls, writes and waits under way.").set_function(num_tasks)
        ended = metrics.counter(
            "broker_handoffs_total",
            "Handoffs that ended, by how; the reason is the finish reason or the code of the error.",
            ["state", "reason"],
        )
        self._refused = metrics.counter("broker_submits_refused_total", "Submits that were refused.", ["code"])
        self._bytes = metrics.counter("broker_pushed_bytes_total", "Bytes that source ranks reported as written.")
        self._pulled = metrics.counter("broker_pulled_bytes_total", "Bytes that decode workers reported as read.")
        self._parts = metrics.counter("broker_parts_total", "Parts of caches that arrived in full.")
        self._missing = metrics.counter(
            "broker_missing_parts_total", "Parts that had not arrived when a handoff failed."
        )
        phases = metrics.histogram(
            "handoff_phase_seconds",
            "How long a phase of a handoff took; of a push, one source rank's.",
            ["phase", "source_rank"],
            buckets=PHASE_BUCKETS,
        )
        total = metrics.histogram(
            "broker_handoff_seconds", "From the submit to the end.", ["state"], buckets=PHASE_BUCKETS
        )
        # To look a series up by its labels costs more than to count.
        self._series, self._ended, self._total = cache(phases.labels), cache(ended.labels), cache(total.labels)

    def refused(self, code: str) -> None:
        """Count a submit that was not accepted."""
        self._refused.labels(code).inc()

    def moved(self, before: Handoff | None, after: Handoff) -> None:
        """Count a handoff in its new place; None before the first."""
        if before is not None and before.record.state is after.record.state and before.forgotten is after.forgotten:
            return
        left, entered = None if before is None else _stage(before), _stage(after)
        if left == entered:
            return
        if left is not None:
            self._stage_series[left].dec()
        if entered is not None:
            self._stage_series[entered].inc()

    def saw(self, handoff: Handoff, effect: Publish) -> None:
        """Publish and count one event."""
        record = handoff.record
        event = self._events.publish(
            effect.name, handoff_id=record.handoff_id, request_id=record.request_id, at_ns=effect.at_ns, **effect.fields
        )
        story = self._stories.get(record.handoff_id)
        if story is None:
            story = _Story()
            if not handoff.forgotten or effect.name in _ENDS:  # what comes after the end is told, not remembered
                self._stories[record.handoff_id] = story
        rank = "" if event.source_rank is None else str(event.source_rank)
        for phase, milliseconds in phases_of(event):
            self._note(story, phase, milliseconds, rank)
        if effect.name is EventName.RANK_PUSHED:
            story.num_bytes += event.num_bytes or 0
            story.num_parts += event.num_parts or 0
            self._bytes.inc(event.num_bytes or 0)
            self._parts.inc(event.num_parts or 0)
        elif effect.name is EventName.REQUEST_UNLOCKED:
            story.num_bytes += event.num_bytes or 0
            story.num_parts += event.num_parts or 0
            self._pulled.inc(event.num_bytes or 0)
            self._parts.inc(event.num_parts or 0)
        state = _ENDS.get(effect.name)
        if state is not None:
            story.ended = True
            story.num_tokens = event.num_tokens
            self._missing.inc(event.num_missing_parts or 0)
            reason = event.finish_reason or ("" if event.error is None else str(event.error.code))
            self._ended(state, reason).inc()
            self._total(state).observe((event.total_ms or 0.0) / 1e3)

    def measured(self, handoff: Handoff, effect: Measured) -> None:
        """Count what a mixed worker has measured; it has published it itself."""
        story = self._stories.setdefault(handoff.handoff_id, _Story())
        for phase, milliseconds in phases_of_prompt(effect.prompt):
            self._note(story, phase, milliseconds)

    def _note(self, story: _Story, phase: Phase, milliseconds: float, rank: str = "") -> None:
        self._series(phase, rank).observe(milliseconds / 1e3)
        story.phases[f"push_rank_{rank}" if phase is Phase.PUSH else str(phase)] = milliseconds

    def over(self, handoff: Handoff) -> None:
        """Write the one line about a handoff of which nothing is left to happen."""
        story = self._stories.pop(handoff.handoff_id, None)
        if story is None or not story.ended:
            return  # it made way for another request's record, and nothing happened
        record = handoff.record
        workers = {f"{role}_worker": worker.worker_id for role, worker in handoff.workers.items()}
        self._log.info(
            "handoff_finished",
            handoff_id=record.handoff_id,
            request_id=record.request_id,
            attempt=record.attempt,
            state=str(record.state),
            **workers,
            num_prompt_tokens=record.num_prompt_tokens,
            num_cached_tokens=record.num_cached_tokens,
            num_tokens=story.num_tokens,
            finish_reason=None if record.finish_reason is None else str(record.finish_reason),
            error_code=None if record.error is None else str(record.error.code),
            error_message=None if record.error is None else record.error.message,
            bytes=story.num_bytes,
            num_parts=story.num_parts,
            duration_ms=story.phases.get(Phase.TOTAL),
            phases_ms=dict(story.phases),
        )


def _stage(handoff: Handoff) -> str | None:
    """What a handoff in flight waits for; None for one that is over."""
    if handoff.forgotten:
        return None
    return _RELEASING if handoff.terminal else str(handoff.state)
