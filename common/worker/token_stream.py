"""Tokens on their way from a worker to the router: the first at once, then some at a time, then an explicit end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from common.bus.errors import BusError
from common.bus.port import Bus
from common.runtime.clock import Clock, Deadline
from common.worker.core.sequence import Sequence
from contracts import subjects
from contracts.codec import encode
from contracts.errors import ErrorInfo
from contracts.requests import FinishReason, TokenFrame

MAX_FRAME_TOKENS: Final = 8
MAX_FRAME_WAIT_S: Final = 0.015
_RETRY_S: Final = 0.1


@dataclass(slots=True)
class _Stream:
    sent: int = 0
    waiting: list[int] = field(default_factory=list)
    last_sent_at: float = 0.0


class TokenStream:
    """Frames for every sequence of one worker.

    A frame that could not be sent stays in line and goes with the next: while the bus is away tokens wait here, bounded
    by what a sequence may generate.
    """

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._streams: dict[str, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    async def add(self, sequence: Sequence, token: int) -> None:
        """Take a token of a sequence that goes on, and send what is due."""
        stream = self._streams.setdefault(sequence.handoff_id, _Stream())
        stream.waiting.append(token)
        now = self._clock.monotonic()
        due = (
            stream.sent == 0 or len(stream.waiting) >= MAX_FRAME_TOKENS or now - stream.last_sent_at >= MAX_FRAME_WAIT_S
        )
        if due and await self._send(_frame(sequence, stream), sequence):
            stream.sent += len(stream.waiting)
            stream.waiting.clear()
            stream.last_sent_at = now

    async def end(
        self,
        sequence: Sequence,
        deadline: Deadline,
        *,
        token: int | None = None,
        finish_reason: FinishReason | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        """Send what waits, the last token, and the end. Tries again until the deadline."""
        stream = self._streams.pop(sequence.handoff_id, None) or _Stream()
        if token is not None:
            stream.waiting.append(token)
        num_tokens = stream.sent + len(stream.waiting)
        frame = _frame(sequence, stream, final=True, num_tokens=num_tokens, finish_reason=finish_reason, error=error)
        while not await self._send(frame, sequence) and not deadline.passed:
            await self._clock.sleep(_RETRY_S)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that nobody listens to."""
        self._streams.pop(sequence.handoff_id, None)

    async def _send(self, frame: TokenFrame, sequence: Sequence) -> bool:
        try:
            await self._bus.publish(subjects.tokens(sequence.router_id, sequence.request_id), encode(frame))
        except BusError:
            return False
        return True


def _frame(
    sequence: Sequence,
    stream: _Stream,
    *,
    final: bool = False,
    num_tokens: int = 0,
    finish_reason: FinishReason | None = None,
    error: ErrorInfo | None = None,
) -> TokenFrame:
    return TokenFrame(
        handoff_id=sequence.handoff_id,
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        index=stream.sent,
        token_ids=tuple(stream.waiting),
        final=final,
        num_tokens=num_tokens,
        finish_reason=finish_reason,
        error=error,
        num_cached_tokens=sequence.num_cached_tokens,
    )
