"""The router's port: takes connections, a bounded number of them, each with the deadlines that a careless client lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from common.runtime.lifecycle import Log
from common.runtime.trace import new_trace
from contracts.errors import ErrorCode, ErrorInfo
from contracts.trace import TRACEPARENT
from services.router.answer_headers import REQUEST_ID, new_request_id, request_id_of, trace_of
from services.router.connection import Connection, ConnectionEvents
from services.router.core.answers import body, error_body
from services.router.http_errors import translated
from services.router.metrics import RouterMetrics
from services.router.settings import RouterSettings

LINGERING_S: Final = 1.0
_BACKLOG: Final = 1024

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Listener:
    """Serves an application that a runner has set up, on one port.

    At most `max_connections` are open; one more is told so and closed. A connection on which no whole request head arrives
    for `idle_timeout_s` is closed, be it silent or slow.
    """

    def __init__(self, server: web.Server, settings: RouterSettings, metrics: RouterMetrics, log: Log) -> None:
        self._server = server
        self._settings = settings
        self._metrics = metrics
        self._log = log
        self._open: set[Connection] = set()
        self._listening: asyncio.Server | None = None
        self._full = False
        # aiohttp answers some requests before any middleware sees them, in a form of its own.
        server.request_handler = _in_our_form(server.request_handler)
        metrics.connections.set_function(lambda: len(self._open))
        metrics.unsent_bytes.set_function(lambda: sum(each.num_unsent_bytes for each in self._open))

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._open)

    async def open(self) -> int:
        """Listen, and return the port. Raises OSError if it is taken."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(
            self._connect, self._settings.host, self._settings.port, backlog=_BACKLOG
        )
        return int(self._listening.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Take no more connections; those that are open stay. Twice is fine."""
        if self._listening is not None:
            self._listening.close()

    def _connect(self) -> asyncio.BaseProtocol:
        full = len(self._open) >= self._settings.max_connections
        if full != self._full:
            self._full = full
            if full:
                self._log.error("connections_exhausted", max_connections=self._settings.max_connections)
        if full:
            self._metrics.connections_refused.inc()
            return _TooMany(self._settings.max_connections, self._settings.retry_after_s)
        connection = Connection(
            self._server,
            loop=asyncio.get_running_loop(),
            stall_s=2 * self._settings.slow_reader_s,  # a stream loses its own patience before
            events=ConnectionEvents(
                lost=self._open.discard,
                malformed=self._metrics.malformed_requests.inc,
                stalled=self._metrics.slow_readers.inc,
            ),
            keepalive_timeout=self._settings.idle_timeout_s,
            lingering_time=LINGERING_S,
            access_log=None,
        )
        self._open.add(connection)
        return connection


class _TooMany(asyncio.Protocol):
    """Says that there is no room, and hangs up."""

    def __init__(self, limit: int, retry_after_s: int) -> None:
        message = f"{limit} connections are open; the rule is: at most {limit}"
        request_id = new_request_id()
        answer = body(error_body(ErrorInfo(code=ErrorCode.OVERLOADED, message=message), request_id))
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Retry-After: {retry_after_s}\r\nx-should-retry: true\r\nContent-Length: {len(answer)}\r\n"
            f"{REQUEST_ID}: {request_id}\r\n{TRACEPARENT}: {new_trace().traceparent}\r\n\r\n"
        )
        self._answer = head.encode() + answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer before the request has come: it would only have to be kept somewhere."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what a server's protocols are given
        transport.write(self._answer)
        transport.close()


def _in_our_form(handler: Handler) -> Handler:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            request_id = request_id_of(request)
            response = translated(request, error, request_id)
            response.headers[REQUEST_ID] = request_id
            response.headers[TRACEPARENT] = trace_of(request).traceparent
            return response

    return handle
