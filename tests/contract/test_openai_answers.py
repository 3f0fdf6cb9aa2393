"""What the router writes is what the official client's types read, and what it refuses it refuses in the known form."""

import json

import openai.types as official
import pytest
from msgspec import UNSET
from openai.types import chat as official_chat

from contracts.errors import ERROR_RULES, ErrorCode, ErrorInfo
from contracts.openai import ModelCard, ModelList, PromptTokensDetails, Usage
from services.router.core.answers import DONE, AnswerWriter, ChoicePiece, body, error_body, event

USAGE = Usage(
    prompt_tokens=5,
    completion_tokens=2,
    total_tokens=7,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
)


def writer(*, chat: bool, return_token_ids: bool = False) -> AnswerWriter:
    """Writes for request r1."""
    return AnswerWriter(id="r1", created=1, model="tiny", chat=chat, return_token_ids=return_token_ids)


def parsed(data: bytes) -> str:
    """The JSON text of an event."""
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    return data.removeprefix(b"data: ").decode()


def test_completions_are_read_strictly() -> None:
    """Whole answers and chunks, with all required fields and the right types."""
    piece = ChoicePiece(0, "text", (1, 2), "stop")
    answer = official.Completion.model_validate_json(writer(chat=False).whole([piece], USAGE), strict=True)
    assert (answer.id, answer.object, answer.choices[0].text) == ("cmpl-r1", "text_completion", "text")
    chunk = json.loads(parsed(writer(chat=False).chunk(ChoicePiece(1, "t", (1,), None))))
    assert chunk == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "created": 1,
        "model": "tiny",
        "choices": [{"index": 1, "text": "t", "logprobs": None, "finish_reason": None}],
    }


def test_chat_answers_are_read_strictly() -> None:
    """Whole answers, first chunks, middle ones and last ones."""
    make = writer(chat=True)
    answer = official_chat.ChatCompletion.model_validate_json(make.whole([ChoicePiece(0, "hi", (1,), "length")], USAGE))
    assert answer.choices[0].message.content == "hi"
    pieces = [
        ChoicePiece(0, "a", (1,), None, first=True),
        ChoicePiece(0, "", (1,), None),
        ChoicePiece(0, "b", (2,), "stop"),
        ChoicePiece(0, "", (), "stop"),
    ]
    chunks = [official_chat.ChatCompletionChunk.model_validate_json(parsed(make.chunk(each))) for each in pieces]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [(delta.role, delta.content) for delta in deltas] == [
        ("assistant", "a"),
        (None, ""),
        (None, "b"),
        (None, None),
    ]


@pytest.mark.parametrize("chat", [False, True])
def test_usage_is_there_when_asked_for_and_else_absent(chat: bool) -> None:
    """A chunk has figures, null, or no such field; the usage chunk has no choices."""
    make = writer(chat=chat)
    piece = ChoicePiece(0, "a", (1,), None)
    assert "usage" not in json.loads(parsed(make.chunk(piece, UNSET)))
    assert json.loads(parsed(make.chunk(piece, None)))["usage"] is None
    last = json.loads(parsed(make.usage_chunk(USAGE)))
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("chat", [False, True])
def test_token_ids_are_there_when_asked_for_and_else_absent(chat: bool) -> None:
    """On chunks and on whole answers."""
    piece = ChoicePiece(0, "a", (1, 2), "stop")
    for wanted in (False, True):
        make = writer(chat=chat, return_token_ids=wanted)
        for answer in (json.loads(parsed(make.chunk(piece))), json.loads(make.whole([piece], USAGE))):
            assert answer["choices"][0].get("token_ids") == ([1, 2] if wanted else None)


def test_a_chunk_of_several_tokens_says_so_and_is_read_all_the_same() -> None:
    """The official client keeps the number as a field that it does not know; a chunk of one token and a whole answer have none."""
    piece, one = ChoicePiece(0, "abc", (1, 2, 3), "stop"), ChoicePiece(0, "a", (1,), None)
    completion = official.Completion.model_validate_json(parsed(writer(chat=False).chunk(piece)))
    chat = official_chat.ChatCompletionChunk.model_validate_json(parsed(writer(chat=True).chunk(piece)))
    for choice in (completion.choices[0], chat.choices[0]):
        assert choice.model_extra is not None
        assert choice.model_extra["num_tokens"] == 3
    for is_chat in (False, True):
        make = writer(chat=is_chat)
        for answer in (json.loads(parsed(make.chunk(one))), json.loads(make.whole([piece], USAGE))):
            assert "num_tokens" not in answer["choices"][0]


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_has_the_known_form(code: ErrorCode) -> None:
    """Message, type, param, code and the id of the request; the type says whose fault it is."""
    info = ErrorInfo(code=code, message="m", param="p")
    error = json.loads(body(error_body(info, "my-id")))["error"]
    assert error.keys() == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == "my-id"
    assert (error["message"], error["param"], error["code"]) == ("m", "p", code.value)
    assert (error["type"] == "server_error") == (ERROR_RULES[code].http_status >= 500)


def test_models_are_read_strictly() -> None:
    """The list and its cards."""
    card = ModelCard(id="tiny", created=1, max_model_len=100)
    listed = json.loads(body(ModelList(data=[card])))
    assert listed["object"] == "list"
    assert official.Model.model_validate(listed["data"][0]).id == "tiny"


def test_text_with_line_ends_stays_one_event() -> None:
    """Line ends inside text never end an event; the end mark is the known one."""
    data = writer(chat=False).chunk(ChoicePiece(0, "a\n\nb\r", (1,), None))
    assert data.count(b"\n") == 2
    assert event(error_body(ErrorInfo(code=ErrorCode.INTERNAL, message="a\nb"), "id")).count(b"\n") == 2
    assert DONE == b"data: [DONE]\n\n"
