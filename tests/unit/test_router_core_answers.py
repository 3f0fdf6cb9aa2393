"""Answers as clients read them, key by key: whole ones, chunks of a stream, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contracts.errors import ErrorCode, ErrorInfo
from contracts.openai import PromptTokensDetails, Usage
from services.router.core.answers import DONE, AnswerWriter, ChoicePiece, body, error_body

USAGE = Usage(
    prompt_tokens=5,
    completion_tokens=2,
    total_tokens=7,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=3),
)
TOLD_USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 3},
}
FIRST = ChoicePiece(index=1, text="Hi", token_ids=(7, 8), finish_reason=None, first=True)
EMPTY = ChoicePiece(index=0, text="", token_ids=(), finish_reason=None)
LAST = ChoicePiece(index=0, text="", token_ids=(9,), finish_reason="length")


def writer(*, chat: bool, ids: bool = False) -> AnswerWriter:
    """A writer of the answers to one request."""
    return AnswerWriter(id="r1", created=99, model="tiny", chat=chat, return_token_ids=ids)


def told(chunk: bytes) -> Any:
    """The JSON of one event of a stream."""
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    return json.loads(chunk[6:])


def chat_chunk(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A chunk of a chat."""
    head = {"id": "chatcmpl-r1", "created": 99, "model": "tiny", "object": "chat.completion.chunk"}
    return {**head, "choices": list(choices), **more}


def completion(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A completion, whole or in part."""
    head = {"id": "cmpl-r1", "created": 99, "model": "tiny", "object": "text_completion"}
    return {**head, "choices": list(choices), **more}


def test_chunks_of_a_chat() -> None:
    """The role comes with the first text, empty text at the end is left out, ids and usage come if they were asked for.

    A chunk of several tokens says how many they are.
    """
    plain = writer(chat=True)
    first = {
        "index": 1,
        "delta": {"role": "assistant", "content": "Hi"},
        "logprobs": None,
        "finish_reason": None,
        "num_tokens": 2,
    }
    assert told(plain.chunk(FIRST)) == chat_chunk(first)
    empty = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": None}
    assert told(plain.chunk(EMPTY, usage=None)) == chat_chunk(empty, usage=None)
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "token_ids": [9]}
    assert told(writer(chat=True, ids=True).chunk(LAST, usage=USAGE)) == chat_chunk(last, usage=TOLD_USAGE)
    assert told(plain.usage_chunk(USAGE)) == chat_chunk(usage=TOLD_USAGE)


def test_chunks_of_a_completion() -> None:
    """Text, even when it is empty; how many tokens it is of where these are several."""
    plain = writer(chat=False)
    first = {"index": 1, "text": "Hi", "logprobs": None, "finish_reason": None, "num_tokens": 2}
    assert told(plain.chunk(FIRST)) == completion(first)
    last = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "token_ids": [9]}
    assert told(writer(chat=False, ids=True).chunk(LAST, usage=USAGE)) == completion(last, usage=TOLD_USAGE)
    assert told(plain.usage_chunk(USAGE)) == completion(usage=TOLD_USAGE)
    assert DONE == b"data: [DONE]\n\n"


def test_whole_answers() -> None:
    """All choices with their ids; a chat without a reason has stopped."""
    whole = json.loads(writer(chat=True, ids=True).whole([FIRST, LAST], USAGE))
    message = {"role": "assistant", "refusal": None}
    assert whole == {
        "id": "chatcmpl-r1",
        "created": 99,
        "model": "tiny",
        "object": "chat.completion",
        "usage": TOLD_USAGE,
        "choices": [
            {
                "index": 1,
                "message": {**message, "content": "Hi"},
                "logprobs": None,
                "finish_reason": "stop",
                "token_ids": [7, 8],
            },
            {
                "index": 0,
                "message": {**message, "content": ""},
                "logprobs": None,
                "finish_reason": "length",
                "token_ids": [9],
            },
        ],
    }
    assert json.loads(writer(chat=False).whole([FIRST, LAST], USAGE)) == completion(
        {"index": 1, "text": "Hi", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"},
        usage=TOLD_USAGE,
    )


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.OVERLOADED, "rate_limit_error"),
        (ErrorCode.MODEL_NOT_FOUND, "not_found_error"),
        (ErrorCode.INVALID_REQUEST, "invalid_request_error"),
        (ErrorCode.PROMPT_TOO_LONG, "invalid_request_error"),
        (ErrorCode.WORKER_LOST, "server_error"),
        (ErrorCode.INTERNAL, "server_error"),
    ],
)
def test_an_error_is_of_the_type_that_clients_know(code: ErrorCode, kind: str) -> None:
    """Message, field, code and the id of the request are our own."""
    error = ErrorInfo(code=code, message="it failed", param="prompt")
    assert json.loads(body(error_body(error, "id"))) == {
        "error": {"message": "it failed", "type": kind, "param": "prompt", "code": str(code), "request_id": "id"}
    }
