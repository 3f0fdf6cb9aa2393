"""Tells an observer how each request ended."""

import asyncio
from types import TracebackType

from common.bus.errors import BusTimeout, BusUnavailable, NoResponders
from common.bus.observer import BusObserver, RequestKind, RequestOutcome


class observed:  # noqa: N801 - read as a word: `with observed(...):`
    """A context in which one request is made: its outcome is what leaves the block. Errors pass through."""

    __slots__ = ("_began", "_kind", "_loop", "_observer")

    def __init__(self, observer: BusObserver, kind: RequestKind) -> None:
        self._observer = observer
        self._kind = kind
        self._loop = asyncio.get_running_loop()
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = self._loop.time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._observer.request_ended(self._kind, outcome_of(error), self._loop.time() - self._began)


def outcome_of(error: BaseException | None) -> RequestOutcome:
    """How a request ended that left with this error, or with none."""
    match error:
        case None:
            return RequestOutcome.ANSWERED
        case BusTimeout():
            return RequestOutcome.TIMED_OUT
        case NoResponders():
            return RequestOutcome.NO_RESPONDERS
        case BusUnavailable():
            return RequestOutcome.UNAVAILABLE
        case _:
            return RequestOutcome.CANCELLED
