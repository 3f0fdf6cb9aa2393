"""Publishes the events that people read, off the critical path."""

from __future__ import annotations

import datetime as dt
from functools import lru_cache
from typing import Any, Final

from common.bus.port import Bus
from common.runtime.clock import Clock
from common.runtime.trace import current_trace
from contracts import subjects
from contracts.codec import encode
from contracts.events import EventName, HandoffEvent

_NO_TRACE: Final = ("", "", "")
_MICROSECONDS: Final = 1_000_000


class HandoffEvents:
    """Events of one service instance. Publishing never waits and never fails the caller: what is dropped is counted."""

    def __init__(self, bus: Bus, clock: Clock, *, service: str, instance: str) -> None:
        self._bus = bus
        self._clock = clock
        self._service = service
        self._instance = instance
        # A repeat is dropped by its id: two starts of one instance must not share any.
        self._start = f"{int(clock.wall_time() * 1e6):x}"
        self._count = 0

    def publish(
        self, event: EventName, *, handoff_id: str, request_id: str, at_ns: int | None = None, **fields: Any
    ) -> HandoffEvent:
        """Say that `event` happened, now or at the host's monotonic `at_ns`. `fields` are those of `HandoffEvent`.

        The event belongs to the current trace. Returns it as it was told.
        """
        trace = current_trace()
        now_ns = self._clock.monotonic_ns()
        wall = self._clock.wall_time() - (0 if at_ns is None else (now_ns - at_ns) / 1e9)
        trace_id, span_id, parent_span_id = (
            _NO_TRACE if trace is None else (trace.trace_id, trace.span_id, trace.parent_span_id)
        )
        message = HandoffEvent(
            event=event,
            service=self._service,
            instance=self._instance,
            handoff_id=handoff_id,
            request_id=request_id,
            at=_written(wall),
            at_ns=now_ns if at_ns is None else at_ns,
            trace_id=trace_id,
            span_id=span_id,
            parent_span_id=parent_span_id,
            **fields,
        )
        self._count += 1
        subject = subjects.event(self._service, handoff_id, event)
        self._bus.publish_event(subject, encode(message), message_id=f"{self._instance}-{self._start}-{self._count}")
        return message


def _written(wall: float) -> str:
    """A moment in RFC 3339, UTC, to the microsecond."""
    seconds, microseconds = divmod(round(wall * _MICROSECONDS), _MICROSECONDS)
    return f"{_second(seconds)}.{microseconds:06d}+00:00"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    """A whole second; many events fall into the same one."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S")
