"""Tells an observer how each request ended."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from common.bus.errors import BusTimeout, BusUnavailable, NoResponders
from common.bus.observer import BusObserver, RequestKind, RequestOutcome


@contextmanager
def observed(observer: BusObserver, kind: RequestKind) -> Iterator[None]:
    """A context in which one request is made: its outcome is what leaves the block. Errors pass through."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    outcome = RequestOutcome.CANCELLED
    try:
        yield
        outcome = RequestOutcome.ANSWERED
    except BusTimeout:
        outcome = RequestOutcome.TIMED_OUT
        raise
    except NoResponders:
        outcome = RequestOutcome.NO_RESPONDERS
        raise
    except BusUnavailable:
        outcome = RequestOutcome.UNAVAILABLE
        raise
    finally:
        observer.request_ended(kind, outcome, loop.time() - began)
