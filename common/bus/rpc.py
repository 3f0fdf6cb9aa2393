"""The edge of a service: requests from the bus become calls, and what they return or raise becomes the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import cache
from typing import Any, Final

import msgspec
from prometheus_client import Histogram

from common.bus.errors import BusError
from common.bus.port import Bus, Message
from common.runtime.lifecycle import Log
from common.runtime.metrics import PHASE_BUCKETS, Metrics
from common.runtime.tasks import BoundedTasks
from common.runtime.trace import received, within
from contracts import subjects
from contracts.codec import encode
from contracts.errors import CodecError, ErrorCode, ErrorInfo, PdmeshError
from contracts.requests import Refused

Handler = Callable[[bytes], Awaitable[msgspec.Struct]]

MAX_HANDLERS: Final = 1024
NO_HANDOFF: Final = "unknown"
_OK: Final = "ok"
_UNANSWERED: Final = "unanswered"


class RefusedError(PdmeshError):
    """Raised by a handler to refuse one handoff."""

    def __init__(self, handoff_id: str, code: ErrorCode, message: str) -> None:
        super().__init__(message, code=code)
        self.handoff_id = handoff_id


class UnansweredError(PdmeshError):
    """Raised by a handler that has nothing to say, or not yet: whoever asked hears nothing, asks again, and reaches who has the say."""

    code = ErrorCode.STALE_FENCE


class RpcEdge:
    """Answers every request on one subject filter, by the verb that its subject ends with.

    Requests are handled side by side, at most `MAX_HANDLERS`; one more is refused with OVERLOADED. Each is handled within the
    trace that its headers name, as a hop of its own. With `metrics` the time that each took is shown there, by verb and outcome.
    """

    def __init__(self, bus: Bus, group: asyncio.TaskGroup, log: Log, metrics: Metrics | None = None) -> None:
        self._bus = bus
        self._log = log
        self._seconds: Callable[[str, str], Histogram] | None = None
        if metrics is not None:
            seconds = metrics.histogram(
                "rpc_handled_seconds",
                "Handling a request from the bus; the code is ok, or that of the refusal, or unanswered.",
                ("verb", "code"),
                buckets=PHASE_BUCKETS,
            )
            self._seconds = cache(seconds.labels)  # to look a series up by its labels costs more than to count
        self._tasks = BoundedTasks(group, name="rpc", limit=MAX_HANDLERS, on_error=self._failed)

    async def serve(
        self, subject_filter: str, handlers: Mapping[str, Handler]
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Subscribe, and return what reads the subscription: run it in a task. Peers can be told once this returns."""
        subscription = await self._bus.subscribe(subject_filter)
        await self._bus.flush()

        async def read() -> None:
            async with subscription:
                async for message in subscription:
                    with within(received(message.headers)):  # what is started for the message inherits it
                        await self._dispatch(message, handlers)

        return read

    async def _dispatch(self, message: Message, handlers: Mapping[str, Handler]) -> None:
        verb = subjects.verb_of(message.subject)
        handler = handlers.get(verb)
        if handler is None:
            await self._respond(message, _refusal(ErrorCode.PROTOCOL, f"no such verb: {verb}"))
        elif not self._tasks.try_start(lambda: self._handle(message, handler)):
            await self._respond(message, _refusal(ErrorCode.OVERLOADED, f"{MAX_HANDLERS} requests are being handled"))

    async def _handle(self, message: Message, handler: Handler) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await self._answer(message, handler)
        if self._seconds is not None:
            self._seconds(subjects.verb_of(message.subject), _code(answer)).observe(loop.time() - began)
        if answer is not None:
            await self._respond(message, answer)

    async def _answer(self, message: Message, handler: Handler) -> msgspec.Struct | None:
        try:
            return await handler(message.data)
        except UnansweredError as error:
            self._log.info("request_unanswered", subject=message.subject, reason=error.message)
            return None
        except RefusedError as error:
            return Refused(handoff_id=error.handoff_id, error=error.info)
        except PdmeshError as error:
            return Refused(handoff_id=NO_HANDOFF, error=error.info)
        except Exception as error:  # noqa: BLE001 - whoever asked is owed an answer, and the log has the rest
            self._log.error("request_failed", subject=message.subject, error=repr(error), exc_info=error)
            return _refusal(ErrorCode.INTERNAL, f"{type(error).__name__} while handling the request")

    async def _respond(self, message: Message, answer: msgspec.Struct) -> None:
        try:
            data = encode(answer)
        except CodecError as error:
            self._log.error("answer_too_large", subject=message.subject, error_message=error.message)
            data = encode(_refusal(ErrorCode.INTERNAL, error.message))
        try:
            await message.respond(data)
        except BusError as error:  # whoever asked will ask again, and get the answer from the record
            self._log.info("answer_lost", subject=message.subject, error_code=error.code)

    def _failed(self, name: str, error: Exception) -> None:
        self._log.error("task_failed", task=name, error=repr(error), exc_info=error)


def was_not_looked_at(answer: object) -> bool:
    """Whether an answer says that the service had no room for the message: nobody has looked at it, and it is as if it had not come.

    That holds for this delivery alone: an earlier one of the same message may have been taken on.
    """
    return isinstance(answer, Refused) and answer.error.code is ErrorCode.OVERLOADED


def _code(answer: msgspec.Struct | None) -> str:
    if answer is None:
        return _UNANSWERED
    return str(answer.error.code) if isinstance(answer, Refused) else _OK


def _refusal(code: ErrorCode, message: str) -> Refused:
    return Refused(handoff_id=NO_HANDOFF, error=ErrorInfo(code=code, message=message))
