"""The trace of the request that the running task works for. Messages and log lines that it sends carry it.

A task inherits the trace of whoever started it. A loop that serves many requests says for each piece of work whose it is:
`with within(trace): ...`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Final

from contracts.trace import TRACEPARENT, TraceContext, read_trace

_SPAN_BYTES: Final = 8
_TRACE_BYTES: Final = 16
_NO_HEADERS: Final[Mapping[str, str]] = {}

_current: Final[ContextVar[TraceContext | None]] = ContextVar("pdmesh_trace", default=None)


def current_trace() -> TraceContext | None:
    """The trace that the running task works for, if it works for a request that has one."""
    return _current.get()


def new_trace() -> TraceContext:
    """The first hop of a request that came without a trace."""
    return TraceContext(trace_id=secrets.token_hex(_TRACE_BYTES), span_id=secrets.token_hex(_SPAN_BYTES))


def next_hop(trace: TraceContext | None) -> TraceContext | None:
    """A hop of its own after `trace`; none after none."""
    return None if trace is None else trace.child(secrets.token_hex(_SPAN_BYTES))


def received(headers: Mapping[str, str]) -> TraceContext | None:
    """The receiver's hop for a message with these headers; None for one that belongs to no request."""
    return next_hop(read_trace(headers)) if TRACEPARENT in headers else None


def traced(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    """`headers` with those of the current trace; what `headers` says itself stays."""
    trace = _current.get()
    if trace is None:
        return headers or _NO_HEADERS
    return {**trace.headers, **(headers or _NO_HEADERS)}


class within:  # noqa: N801 - read as a word: `with within(trace):`
    """A context in which `trace` is the current one; None means that the work is of no request."""

    __slots__ = ("_token", "_trace")

    def __init__(self, trace: TraceContext | None) -> None:
        self._trace = trace
        self._token: Token[TraceContext | None] | None = None

    def __enter__(self) -> TraceContext | None:
        self._token = _current.set(self._trace)
        return self._trace

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _current.reset(self._token)
