"""The one deadline of a request, which others may bring forward, with a reason."""

import asyncio
from types import TracebackType
from typing import Self

from common.runtime.clock import Deadline
from contracts.errors import ErrorCode, PdmeshError


class SlowReaderError(PdmeshError):
    """The client does not read its answer: what waits for it has reached its bound, or has waited too long."""

    code = ErrorCode.CANCELLED


class Interruptible:
    """An async context that ends by its deadline with `PdmeshError` (`deadline_exceeded`), or at once when interrupted."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._timeout: asyncio.Timeout | None = None
        self.reason: PdmeshError | None = None
        """Why it was interrupted, if it was."""

    def interrupt(self, reason: PdmeshError) -> None:
        """End the work inside with `reason`. The first reason counts; after the end this does nothing."""
        if self._timeout is None or self._timeout.expired() or self.reason is not None:
            return
        self.reason = reason
        self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> Self:
        self._timeout = self._deadline.timeout()
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout, self._timeout = self._timeout, None
        if timeout is None:
            return
        try:
            await timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if not timeout.expired():
                raise
            reason = self.reason or PdmeshError(
                "the answer was not complete by the request's deadline", code=ErrorCode.DEADLINE_EXCEEDED
            )
            raise reason from None
