"""Streams of tokens that have ended, kept for a router that may have missed some of them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from common.worker.core.sent_tokens import SentTokens

MAX_STREAMS: Final = 4096
MAX_TOKENS: Final = 1 << 20


class EndedStreams:
    """By handoff, each until it is forgotten or its own moment has come; beyond the bounds the oldest go first."""

    def __init__(self, *, max_streams: int = MAX_STREAMS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_streams = max_streams
        self._max_tokens = max_tokens
        self._streams: OrderedDict[str, tuple[SentTokens, float]] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._streams)

    def keep(self, handoff_id: str, stream: SentTokens, *, until: float) -> None:
        """Keep a stream, in place of another of its handoff. One that is too long for all the room there is stays alone."""
        self.forget(handoff_id)
        self._streams[handoff_id] = (stream, until)
        self._num_tokens += len(stream)
        while len(self._streams) > self._max_streams or (
            len(self._streams) > 1 and self._num_tokens > self._max_tokens
        ):
            self.forget(next(iter(self._streams)))

    def get(self, handoff_id: str) -> SentTokens | None:
        """The stream of a handoff, while it is kept."""
        kept = self._streams.get(handoff_id)
        return None if kept is None else kept[0]

    def forget(self, handoff_id: str) -> None:
        """Let a stream go. Unknown ones are no error."""
        kept = self._streams.pop(handoff_id, None)
        if kept is not None:
            self._num_tokens -= len(kept[0])

    def expire(self, now: float) -> None:
        """Let those go whose moment has come."""
        for handoff_id in [key for key, (_, until) in self._streams.items() if until <= now]:
            self.forget(handoff_id)
