"""The frames of one attempt, which may repeat, overlap and come out of order, made into one contiguous run of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from contracts.errors import ErrorCode, ErrorInfo, PdmeshError
from contracts.requests import FinishReason, TokenFrame

MAX_WAITING_FRAMES: Final = 256
"""Frames that may wait for an earlier one. More is no reordering but a loss."""


@dataclass(frozen=True, slots=True)
class End:
    """How the attempt ended: with a reason, or with an error."""

    finish_reason: FinishReason | None
    error: ErrorInfo | None


class TokenOrder:
    """Keeps the tokens of one attempt contiguous from `start`.

    Frames of other attempts are ignored: what a superseded one still sends is not wanted. Raises `PdmeshError`
    (`protocol_error`) for frames that contradict each other or that can never fit together.
    """

    def __init__(self, *, attempt: int, start: int = 0) -> None:
        self._attempt = attempt
        self._start = start
        self._tokens: list[int] = []
        self._waiting: dict[int, tuple[int, ...]] = {}
        self._final: TokenFrame | None = None
        self.num_cached_tokens = 0
        """Prompt tokens that the worker says it had cached."""

    @property
    def next_index(self) -> int:
        """Index of the first token that has not come yet."""
        return self._start + len(self._tokens)

    @property
    def end(self) -> End | None:
        """How it ended, once everything before the end has come. An error counts at once: nothing else may come."""
        final = self._final
        if final is None or (final.error is None and self.next_index < final.num_tokens):
            return None
        return End(final.finish_reason, final.error)

    @property
    def gap(self) -> bool:
        """Whether a token is missing that others have overtaken."""
        return bool(self._waiting) or (self._final is not None and self.end is None)

    def advances(self, frame: TokenFrame) -> bool:
        """Whether the frame has the next token, or ends what has come, so that `accept` changes more than what waits."""
        if frame.attempt != self._attempt:
            return False
        if frame.index <= self.next_index < frame.index + len(frame.token_ids):
            return True
        if not frame.final or self.end is not None:
            return False
        return frame.error is not None or (self._final is None and frame.num_tokens <= self.next_index)

    def accept(self, frame: TokenFrame) -> Sequence[int]:
        """Take a frame in, and return the tokens that are next in the stream now."""
        if frame.attempt != self._attempt:
            return ()
        self.num_cached_tokens = max(self.num_cached_tokens, frame.num_cached_tokens)
        before = len(self._tokens)
        if frame.index < self._start and frame.token_ids:
            raise _broken(f"a frame begins at token {frame.index}; this attempt began at {self._start}")
        self._take(frame.index, frame.token_ids)
        while (ready := [index for index in self._waiting if index <= self.next_index]) != []:
            for index in sorted(ready):
                self._take(index, self._waiting.pop(index))
        if frame.final:
            self._close(frame)
        if self._final is not None and self._final.error is None and self._reach() > self._final.num_tokens:
            raise _broken(f"{self._reach()} tokens came, but the final frame counts {self._final.num_tokens}")
        return self._tokens[before:]

    def _take(self, index: int, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            return
        if index > self.next_index:
            if len(token_ids) > len(self._waiting.get(index, ())):
                self._waiting[index] = token_ids
            if len(self._waiting) > MAX_WAITING_FRAMES:
                raise _broken(f"token {self.next_index} is missing while {len(self._waiting)} later frames wait")
            return
        place = index - self._start
        known = self._tokens[place : place + len(token_ids)]
        if tuple(known) != token_ids[: len(known)]:
            raise _broken(f"tokens from {index} on came twice and differ")
        self._tokens.extend(token_ids[len(known) :])

    def _close(self, frame: TokenFrame) -> None:
        if (frame.finish_reason is None) == (frame.error is None):
            raise _broken("a final frame has either a finish_reason or an error")
        if self._final is None or (frame.error is not None and self.end is None):
            self._final = frame  # an error also says that the tokens before another end are lost

    def _reach(self) -> int:
        return max([self.next_index, *(index + len(token_ids) for index, token_ids in self._waiting.items())])


def _broken(message: str) -> PdmeshError:
    return PdmeshError(message, code=ErrorCode.PROTOCOL)
