"""What a worker has told of one sequence and what it still has to tell, kept whole, so that any of it can be told again. Pure."""

from __future__ import annotations

from typing import Final

from contracts.errors import ErrorInfo, InvalidValueError
from contracts.requests import FinishReason, TokenFrame

MAX_FRAME_TOKENS: Final = 8192
"""Most tokens of one frame: after an outage there may be many, and a message has a bound."""


class SentTokens:
    """The generated tokens of one attempt, of which the first `num_sent` were sent, and its end once there is one."""

    def __init__(self, *, handoff_id: str, request_id: str, attempt: int) -> None:
        self._handoff_id = handoff_id
        self._request_id = request_id
        self._attempt = attempt
        self._token_ids: list[int] = []
        self._ended = False
        self._finish_reason: FinishReason | None = None
        self._error: ErrorInfo | None = None
        self.num_sent = 0
        self.num_cached_tokens = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def num_waiting(self) -> int:
        """Tokens that were not sent yet."""
        return len(self._token_ids) - self.num_sent

    def add(self, token: int) -> None:
        """Take the next token."""
        self._token_ids.append(token)

    def end(self, finish_reason: FinishReason | None, error: ErrorInfo | None) -> None:
        """No more tokens will come."""
        self._ended, self._finish_reason, self._error = True, finish_reason, error

    def frame(self, index: int) -> TokenFrame:
        """The tokens from `index` on, as many as go into one frame; with the last of them, the end.

        Raises `InvalidValueError` for an index beyond the tokens that there are.
        """
        if not 0 <= index <= len(self._token_ids):
            raise InvalidValueError(field="index", value=index, rule=f"0 to {len(self._token_ids)}")
        told = tuple(self._token_ids[index : index + MAX_FRAME_TOKENS])
        final = self._ended and index + len(told) == len(self._token_ids)
        return TokenFrame(
            handoff_id=self._handoff_id,
            request_id=self._request_id,
            attempt=self._attempt,
            index=index,
            token_ids=told,
            final=final,
            num_tokens=len(self._token_ids) if final else 0,
            finish_reason=self._finish_reason if final else None,
            error=self._error if final else None,
            num_cached_tokens=self.num_cached_tokens,
        )
