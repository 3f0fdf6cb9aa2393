"""One client's connection: bounded buffers, no patience with a client that does not read, refusals in OpenAI's form."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from aiohttp import web

from contracts.errors import ErrorCode, ErrorInfo
from contracts.trace import TRACEPARENT
from services.router.answer_headers import REQUEST_ID, request_id_of, trace_of
from services.router.core.answers import body, error_body

SEND_BUFFER_BYTES: Final = 128 * 1024
WRITE_BUFFER_BYTES: Final = 64 * 1024
_MAX_REASON_CHARS: Final = 200
_QUOTED: Final = re.compile(r":\s*(bytearray\()?b['\"].*|:$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionEvents:
    """Who hears of what becomes of connections. `lost` gets each one that was opened, once."""

    lost: Callable[[Connection], None]
    malformed: Callable[[], None]
    stalled: Callable[[], None]


class Connection(web.RequestHandler):
    """What aiohttp makes of a connection, with bounds.

    What is written and not yet taken by the client fills the kernel's buffer (`SEND_BUFFER_BYTES`), then ours
    (`WRITE_BUFFER_BYTES`, and as much again before a writer waits). If it has not drained `stall_s` after that, the
    connection is cut: answers that stream end themselves before.
    """

    def __init__(self, server: web.Server, *, stall_s: float, events: ConnectionEvents, **options: Any) -> None:
        super().__init__(server, **options)
        self._stall_s = stall_s
        self._events = events
        self._stall: asyncio.TimerHandle | None = None
        self._given_up = False

    def give_up(self) -> None:
        """Count a client that does not read, once, whoever loses patience first: an answer that streams, or the connection."""
        self._disarm()
        if not self._given_up:
            self._given_up = True
            self._events.stalled()

    @property
    def num_unsent_bytes(self) -> int:
        """What was written and is not in the kernel's hands yet."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the bounds."""
        made = cast("asyncio.Transport", transport)
        made.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        peer = made.get_extra_info("socket")
        if peer is not None:  # without this the kernel's buffer grows to megabytes, which the client never reads
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget it."""
        self._disarm()
        super().connection_lost(exc)
        self._events.lost(self)

    def pause_writing(self) -> None:
        """The buffers are full: begin to lose patience."""
        super().pause_writing()
        self._disarm()
        self._stall = self._loop.call_later(self._stall_s, self._cut)

    def resume_writing(self) -> None:
        """The client reads."""
        self._disarm()
        super().resume_writing()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Refuse what never became a request (or what crashed outside of our handlers) as everything else is refused."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client has gone: nobody reads an answer
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: it can only be broken off")
        if status < 500:
            self._events.malformed()
            info = ErrorInfo(code=ErrorCode.INVALID_REQUEST, message=f"HTTP request: {_reason(message)}")
        else:
            self.log_exception("Error handling request", exc_info=exc)
            info = ErrorInfo(code=ErrorCode.INTERNAL, message="something went wrong inside the server")
        request_id = request_id_of(request)
        headers = {
            "x-should-retry": "false",
            REQUEST_ID: request_id,
            TRACEPARENT: trace_of(request).traceparent,
        }
        response = web.Response(
            status=status, body=body(error_body(info, request_id)), headers=headers, content_type="application/json"
        )
        response.force_close()
        return response

    def _cut(self) -> None:
        self._stall = None
        if self.transport is not None:
            self.give_up()
            self.transport.abort()

    def _disarm(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def _reason(message: str | None) -> str:
    """What the parser says, without the bytes that it quotes."""
    first_line = (message or "it cannot be read").strip().split("\n", maxsplit=1)[0]
    return _QUOTED.sub("", first_line)[:_MAX_REASON_CHARS]
