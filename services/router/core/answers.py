"""Answers as clients read them: whole ones, chunks of a stream, errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson
from msgspec import UNSET, UnsetType

from contracts.errors import ErrorCode, ErrorInfo
from contracts.openai import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Delta,
    ErrorBody,
    ErrorDetail,
    Usage,
)

DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """The next piece of one choice, or the whole of it."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWriter:
    """Writes the answers to one HTTP request. `id` carries no prefix yet, `created` is in seconds since 1970 UTC."""

    id: str
    created: int
    model: str
    chat: bool
    return_token_ids: bool

    def chunk(self, piece: ChoicePiece, usage: Usage | UnsetType | None = UNSET) -> bytes:
        """Return one event of the stream."""
        if not self.chat:
            choice = self._completion_choice(piece)
            return event(self._completion([msgspec.structs.replace(choice, num_tokens=_count(piece))], usage))
        # The role comes with the first text, not in a chunk of its own: clients measure the time to the first chunk.
        delta = Delta(
            role="assistant" if piece.first else UNSET,
            content=piece.text if piece.text or piece.finish_reason is None else UNSET,
        )
        told = ChatChunkChoice(
            index=piece.index,
            delta=delta,
            finish_reason=piece.finish_reason,
            token_ids=self._ids(piece),
            num_tokens=_count(piece),
        )
        return event(ChatChunk(id=self._id, created=self.created, model=self.model, choices=[told], usage=usage))

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the last event before the end, for those who asked for it: usage, and no choices."""
        if self.chat:
            return event(ChatChunk(id=self._id, created=self.created, model=self.model, choices=[], usage=usage))
        return event(self._completion([], usage))

    def whole(self, pieces: Sequence[ChoicePiece], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""
        if not self.chat:
            return body(self._completion([self._completion_choice(piece) for piece in pieces], usage))
        choices = [
            ChatChoice(
                index=piece.index,
                message=AnswerMessage(content=piece.text),
                finish_reason=piece.finish_reason or "stop",
                token_ids=self._ids(piece),
            )
            for piece in pieces
        ]
        return body(ChatCompletion(id=self._id, created=self.created, model=self.model, choices=choices, usage=usage))

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self.id}" if self.chat else f"cmpl-{self.id}"

    def _ids(self, piece: ChoicePiece) -> list[int] | UnsetType:
        return list(piece.token_ids) if self.return_token_ids else UNSET

    def _completion_choice(self, piece: ChoicePiece) -> CompletionChoice:
        return CompletionChoice(
            index=piece.index, text=piece.text, finish_reason=piece.finish_reason, token_ids=self._ids(piece)
        )

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self.created, model=self.model, choices=choices, usage=usage)


def body(answer: msgspec.Struct) -> bytes:
    """Return an answer's JSON."""
    return orjson.dumps(_plain(answer))


def event(answer: msgspec.Struct) -> bytes:
    """Return an answer as a server-sent event."""
    return b"data: " + body(answer) + b"\n\n"


def error_body(error: ErrorInfo, request_id: str) -> ErrorBody:
    """Return an error as clients of the OpenAI interface read it; `request_id` is that of the answer's headers."""
    return ErrorBody(
        error=ErrorDetail(
            message=error.message,
            type=_type_of(error),
            param=error.param,
            code=str(error.code),
            request_id=request_id,
        )
    )


def _count(piece: ChoicePiece) -> int | UnsetType:
    """How many tokens a chunk carries, where somebody who takes chunks for tokens would be wrong."""
    return len(piece.token_ids) if len(piece.token_ids) > 1 else UNSET


def _type_of(error: ErrorInfo) -> str:
    match error.code:
        case ErrorCode.OVERLOADED:
            return "rate_limit_error"
        case ErrorCode.MODEL_NOT_FOUND:
            return "not_found_error"
        case _ if error.rule.http_status < 500:
            return "invalid_request_error"
        case _:
            return "server_error"


def _plain(answer: msgspec.Struct) -> Any:
    return msgspec.to_builtins(answer)
