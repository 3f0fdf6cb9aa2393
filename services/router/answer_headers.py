"""What every answer names, early refusals included: its request, by an id, and its trace."""

import re
import secrets
from typing import Final

from aiohttp import web

from common.runtime.trace import new_trace, received
from contracts.trace import TRACEPARENT, TRACESTATE, TraceContext

REQUEST_ID: Final = "x-request-id"

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._:/+=-]")
_MAX_REQUEST_ID_CHARS: Final = 128
_REQUEST_ID_BYTES: Final = 8


def new_request_id() -> str:
    """Return an id for a request that brings none."""
    return secrets.token_hex(_REQUEST_ID_BYTES)


def request_id_of(request: web.BaseRequest) -> str:
    """Return the client's own id of a request, made safe to be echoed and logged, or a new one.

    It is an attribute and nothing more: ids that the mesh uses are always ours.
    """
    return _UNSAFE.sub("", request.headers.get(REQUEST_ID, ""))[:_MAX_REQUEST_ID_CHARS] or new_request_id()


def trace_of(request: web.BaseRequest) -> TraceContext:
    """Return the router's hop in the client's trace, or in a new one. Each call is a hop of its own."""
    return received({name: _all_of(name, request) for name in (TRACEPARENT, TRACESTATE)}) or new_trace()


def _all_of(name: str, request: web.BaseRequest) -> str:
    """The values of a header as one. What never became a request has a plain dictionary for headers."""
    return ",".join(value for each, value in request.headers.items() if each.lower() == name)
