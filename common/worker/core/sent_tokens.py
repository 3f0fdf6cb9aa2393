"""What a worker has told of one sequence and what it still has to tell, kept whole, so that any of it can be told again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from contracts.errors import ErrorInfo, InvalidValueError
from contracts.requests import FinishReason, TokenFrame

MAX_FRAME_TOKENS: Final = 8192
"""Most tokens of one frame: after an outage there may be many, and a message has a bound."""


class SentTokens:
    """The tokens of one attempt and its end once there is one; all tokens of the request before `num_sent` were sent.

    Tokens have the index that they have in the whole request: those of an attempt begin at `num_delivered_tokens`, what earlier
    attempts have generated and the client has.
    """

    def __init__(self, *, handoff_id: str, request_id: str, attempt: int, num_delivered_tokens: int = 0) -> None:
        self._handoff_id = handoff_id
        self._request_id = request_id
        self._attempt = attempt
        self._token_ids: list[int] = []
        self._ended = False
        self._finish_reason: FinishReason | None = None
        self._error: ErrorInfo | None = None
        self._first = num_delivered_tokens
        self.num_sent = num_delivered_tokens
        self.num_cached_tokens = 0

    def __len__(self) -> int:
        """Tokens that are kept here: those of this attempt."""
        return len(self._token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the request so far, those of earlier attempts with them."""
        return self._first + len(self._token_ids)

    @property
    def num_waiting(self) -> int:
        """Tokens that were not sent yet."""
        return self.num_tokens - self.num_sent

    @property
    def is_silent(self) -> bool:
        """Whether nothing of this attempt was sent."""
        return self.num_sent == self._first

    def add(self, token_ids: Iterable[int]) -> None:
        """Take the next tokens."""
        self._token_ids.extend(token_ids)

    def end(self, finish_reason: FinishReason | None, error: ErrorInfo | None) -> None:
        """No more tokens will come."""
        self._ended, self._finish_reason, self._error = True, finish_reason, error

    def frame(self, index: int) -> TokenFrame:
        """The tokens from `index` on, as many as go into one frame; with the last of them, the end.

        Raises `InvalidValueError` for an index beyond the tokens that there are, or before those of this attempt.
        """
        if not self._first <= index <= self.num_tokens:
            raise InvalidValueError(field="index", value=index, rule=f"{self._first} to {self.num_tokens}")
        at = index - self._first
        told = tuple(self._token_ids[at : at + MAX_FRAME_TOKENS])
        final = self._ended and index + len(told) == self.num_tokens
        return TokenFrame(
            handoff_id=self._handoff_id,
            request_id=self._request_id,
            attempt=self._attempt,
            index=index,
            token_ids=told,
            final=final,
            num_tokens=self.num_tokens if final else 0,
            finish_reason=self._finish_reason if final else None,
            error=self._error if final else None,
            num_cached_tokens=self.num_cached_tokens,
        )
