"""Where an answer goes while it is generated: into a stream of events, or into one body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from aiohttp import web
from msgspec import UNSET, UnsetType

from common.runtime.trace import current_trace
from contracts.errors import ErrorInfo
from contracts.openai import Usage
from contracts.trace import TRACEPARENT
from services.router.answer_headers import REQUEST_ID
from services.router.connection import Connection
from services.router.core.answers import DONE, AnswerWriter, ChoicePiece, error_body, event
from services.router.core.parameters import Ask
from services.router.core.usage import UsageMeter
from services.router.generation import Progress
from services.router.http_errors import REQUEST_ID_KEY
from services.router.interruption import SlowReaderError

_LAST_WORD_S: Final = 2.0


class Answer(Protocol):
    """Takes the progress of all choices of one HTTP request."""

    @property
    def begun(self) -> bool:
        """Whether the client has been sent something: then an error can only be told inside the stream."""
        ...

    async def take(self, choice: int, progress: Progress) -> None:
        """Take what is new of one choice. May wait for a slow client."""
        ...

    async def finish(self) -> web.StreamResponse:
        """Complete the answer."""
        ...

    def give_up(self) -> None:
        """Count the client as one that does not read."""
        ...

    async def fail(self, error: ErrorInfo) -> web.StreamResponse:
        """Break a begun answer off, with the error for all to see."""
        ...


class StreamedAnswer:
    """Server-sent events. Nothing is sent before the first token, so that a refusal still has a status of its own.

    A write that waits `slow_reader_s` for the client raises `SlowReaderError`.
    """

    def __init__(
        self, request: web.Request, writer: AnswerWriter, ask: Ask, meter: UsageMeter, *, slow_reader_s: float
    ) -> None:
        self._request = request
        self._writer = writer
        self._ask = ask
        self._meter = meter
        self._slow_reader_s = slow_reader_s
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                REQUEST_ID: request[REQUEST_ID_KEY],
                **_trace_header(),
            }
        )
        self._begun: set[int] = set()
        self._writing = asyncio.Lock()

    @property
    def begun(self) -> bool:
        """See `Answer.begun`."""
        return self._response.prepared

    async def take(self, choice: int, progress: Progress) -> None:
        """See `Answer.take`."""
        piece = ChoicePiece(
            index=choice,
            text=progress.text,
            token_ids=progress.token_ids,
            finish_reason=progress.finish_reason,
            first=choice not in self._begun,
        )
        self._begun.add(choice)
        await self._write(self._writer.chunk(piece, self._usage()))

    async def finish(self) -> web.StreamResponse:
        """See `Answer.finish`."""
        try:
            if self._ask.include_usage:
                await self._write(self._writer.usage_chunk(self._meter.usage))
            await self._write(DONE)
            async with self._patience():
                await self._response.write_eof()
        except SlowReaderError:
            self._cut()
            raise
        return self._response

    def give_up(self) -> None:
        """See `Answer.give_up`."""
        connection = self._request.protocol
        if isinstance(connection, Connection):
            connection.give_up()

    async def fail(self, error: ErrorInfo) -> web.StreamResponse:
        """See `Answer.fail`. A client that does not read is cut off."""
        self._response.force_close()
        try:
            async with asyncio.timeout(min(_LAST_WORD_S, self._slow_reader_s / 2)):
                await self._response.write(event(error_body(error, self._request[REQUEST_ID_KEY])) + DONE)
                await self._response.write_eof()
        except TimeoutError:
            self._cut()
        return self._response

    def _cut(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._slow_reader_s):
                yield
        except TimeoutError:
            text = f"the client does not read: its answer has waited for {self._slow_reader_s:g} s"
            raise SlowReaderError(text) from None

    def _usage(self) -> Usage | UnsetType | None:
        if self._ask.continuous_usage:
            return self._meter.usage
        return None if self._ask.include_usage else UNSET

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            if not self._response.prepared:
                await self._response.prepare(self._request)
            async with self._patience():
                await self._response.write(data)


def _trace_header() -> Mapping[str, str]:
    trace = current_trace()
    return {} if trace is None else {TRACEPARENT: trace.traceparent}


@dataclass(slots=True)
class _Collected:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class CollectedAnswer:
    """One JSON body at the end."""

    begun: Final = False

    def __init__(self, writer: AnswerWriter, meter: UsageMeter, *, num_choices: int) -> None:
        self._writer = writer
        self._meter = meter
        self._choices = [_Collected() for _ in range(num_choices)]

    async def take(self, choice: int, progress: Progress) -> None:
        """See `Answer.take`."""
        collected = self._choices[choice]
        collected.texts.append(progress.text)
        collected.token_ids.extend(progress.token_ids)
        collected.finish_reason = progress.finish_reason

    async def finish(self) -> web.StreamResponse:
        """See `Answer.finish`."""
        pieces = [
            ChoicePiece(
                index=index, text="".join(each.texts), token_ids=each.token_ids, finish_reason=each.finish_reason
            )
            for index, each in enumerate(self._choices)
        ]
        return web.Response(body=self._writer.whole(pieces, self._meter.usage), content_type="application/json")

    def give_up(self) -> None:
        """See `Answer.give_up`. It is written at once, at the end."""

    async def fail(self, error: ErrorInfo) -> web.StreamResponse:
        """See `Answer.fail`. It never begins, so there is nothing to break off."""
        raise AssertionError(f"an answer that has not begun is refused, not broken off: {error.message}")
