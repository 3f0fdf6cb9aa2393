"""Requests to workers: the same message again until it is answered, which is delivery and never a second request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from common.bus.errors import BusError, NoResponders, PayloadTooLarge
from common.bus.port import Bus
from common.bus.rpc import was_not_looked_at
from common.runtime.clock import Clock, Deadline
from common.runtime.pauses import pauses
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, PdmeshError

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0

T = TypeVar("T")


class CallAbandonedError(PdmeshError):
    """Nobody wants the answer any more."""

    code = ErrorCode.CANCELLED


class Calls:
    """Asks workers. `call_timeout_s` is how long one delivery may take."""

    def __init__(self, bus: Bus, clock: Clock, *, call_timeout_s: float, lost_after_s: float) -> None:
        self._bus = bus
        self._clock = clock
        self._call_timeout_s = call_timeout_s
        self._lost_after_s = lost_after_s

    async def ask(
        self,
        subject: str,
        message: Callable[[], msgspec.Struct],
        kind: Any,
        deadline: Deadline,
        *,
        wanted: Callable[[], bool] = lambda: True,
        patient: bool = False,
    ) -> Any:
        """The answer to `message()`, decoded as `kind`; `message` is built anew for each delivery, with the time that is left.

        Raises WORKER_LOST when nobody has listened for `lost_after_s`, DEADLINE_EXCEEDED when no answer came in time,
        `CallAbandonedError` once `wanted` says no before a repeat, and `CodecError` for an answer that is none. A `patient` call
        goes on to its deadline, also when nobody listens, and when the worker is too busy to look at it.
        """
        waits = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        lost: Deadline | None = None
        reason = "no answer"
        while not deadline.passed:
            try:
                timeout = min(self._call_timeout_s, deadline.remaining)
                reply = await self._bus.request(subject, encode(message()), timeout=timeout)
                answer = decode(reply.data, kind)
            except PayloadTooLarge:
                raise
            except NoResponders as error:
                # A worker that has just come back from an outage of the bus may not listen yet.
                lost = lost or Deadline.after(self._clock, self._lost_after_s)
                if lost.passed and not patient:
                    raise
                reason = error.message
            except BusError as error:
                lost = None
                reason = error.message
            else:
                if not (patient and was_not_looked_at(answer)):
                    return answer
                reason = answer.error.message
            if not wanted():
                raise CallAbandonedError(f"{subject} is not wanted any more")
            await self._clock.sleep(min(next(waits), deadline.remaining))
        raise PdmeshError(f"{subject}: {reason}", code=ErrorCode.DEADLINE_EXCEEDED)
