"""Tokens on their way from a worker to the router: the first at once, then some at a time, then an explicit end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from common.bus.errors import BusError
from common.bus.port import Bus
from common.runtime.clock import Clock, Deadline
from common.worker.core.ended_streams import EndedStreams
from common.worker.core.sent_tokens import SentTokens
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
    tokens: SentTokens
    last_sent_at: float = 0.0


class TokenStream:
    """Frames for every sequence of one worker.

    A frame that could not be sent stays in line and goes with the next: while the bus is away tokens wait here, bounded
    by what a sequence may generate. What was sent may be lost on its way, so all of it is kept for `replay`: until the router
    says that it has the end, or the request's deadline.
    """

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._ended = EndedStreams()

    def __len__(self) -> int:
        """Streams that go on."""
        return len(self._streams)

    @property
    def num_kept(self) -> int:
        """Streams that have ended, and whose router has not said that it has their end."""
        return len(self._ended)

    async def add(self, sequence: Sequence, token_ids: Iterable[int]) -> None:
        """Take the tokens that a step gave a sequence that goes on, and send what is due. They leave together."""
        stream = self._streams.setdefault(sequence.handoff_id, _Stream(_tokens_of(sequence)))
        tokens = stream.tokens
        tokens.num_cached_tokens = sequence.num_cached_tokens
        tokens.add(token_ids)
        now = self._clock.monotonic()
        due = (
            tokens.is_silent or tokens.num_waiting >= MAX_FRAME_TOKENS or now - stream.last_sent_at >= MAX_FRAME_WAIT_S
        )
        if due and await self._send(tokens, sequence):
            stream.last_sent_at = now

    async def end(
        self,
        sequence: Sequence,
        deadline: Deadline,
        *,
        token_ids: Iterable[int] = (),
        finish_reason: FinishReason | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        """Send what waits, the last tokens, and the end. Tries again until the deadline."""
        stream = self._streams.pop(sequence.handoff_id, None)
        tokens = _tokens_of(sequence) if stream is None else stream.tokens
        tokens.num_cached_tokens = sequence.num_cached_tokens
        tokens.add(token_ids)
        tokens.end(finish_reason, error)
        self._ended.keep(sequence.handoff_id, tokens, until=deadline.at)
        while (sent := await self._send(tokens, sequence)) is None or not sent.final:
            if deadline.passed:
                return
            if sent is None:
                await self._clock.sleep(_RETRY_S)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that goes on here and that nobody listens to."""
        self._streams.pop(sequence.handoff_id, None)

    def replay(self, handoff_id: str, index: int) -> TokenFrame | None:
        """What was told or is to be told of a handoff, from a token on; None when nothing is known of it.

        Raises `InvalidValueError` for a token that there is not yet.
        """
        stream = self._streams.get(handoff_id)
        tokens = self._ended.get(handoff_id) if stream is None else stream.tokens
        return None if tokens is None else tokens.frame(index)

    def forget(self, handoff_id: str) -> None:
        """The router has the end of a stream. Twice is fine."""
        self._ended.forget(handoff_id)

    def expire(self, now: float) -> None:
        """Forget ended streams whose deadline has passed."""
        self._ended.expire(now)

    async def _send(self, tokens: SentTokens, sequence: Sequence) -> TokenFrame | None:
        """Send what waits, or as much of it as goes into one frame, and return that; None when it cannot be sent."""
        frame = tokens.frame(tokens.num_sent)
        try:
            await self._bus.publish(subjects.tokens(sequence.router_id, sequence.request_id), encode(frame))
        except BusError:
            return None
        tokens.num_sent = frame.index + len(frame.token_ids)
        return frame


def _tokens_of(sequence: Sequence) -> SentTokens:
    return SentTokens(
        handoff_id=sequence.handoff_id,
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        num_delivered_tokens=sequence.num_delivered_tokens,
    )
