"""What a client is told about a parameter that cannot be: the field, what it gave, and the rule, word for word."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from contracts.errors import ErrorCode, InvalidValueError, PdmeshError
from contracts.openai import ChatMessage, CompletionRequest
from services.router.core import parameters
from services.router.core.parameters import MAX_STOP_CHARS, MAX_STOPS, Ask

LARGEST = (1 << 63) - 1


def ask(**fields: Any) -> Ask:
    """The parameters of a completion."""
    request = msgspec.convert({"model": "m", "prompt": "x", **fields}, CompletionRequest)
    return parameters.read_parameters(request)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"n": 0}, "n: 0 is not allowed; the rule is: 1 or more"),
        ({"n": 2, "best_of": 3}, "best_of: 3 is not supported; the rule is: the same as n (2)"),
        ({"top_k": -2}, "top_k: -2 is not allowed; the rule is: -1 or more"),
        ({"min_tokens": -1}, "min_tokens: -1 is not allowed; the rule is: 0 or more"),
        ({"max_tokens": 0}, "max_tokens: 0 is not allowed; the rule is: 1 or more"),
        ({"temperature": 2.5}, "temperature: 2.5 is not allowed; the rule is: from 0 to 2"),
        ({"temperature": -0.5}, "temperature: -0.5 is not allowed; the rule is: from 0 to 2"),
        ({"top_p": 1.5}, "top_p: 1.5 is not allowed; the rule is: from 0 to 1"),
        ({"top_p": 0}, "top_p: 0.0 is not allowed; the rule is: above 0 and at most 1"),
        ({"seed": 1 << 63}, f"seed: {1 << 63} is not allowed; the rule is: a signed integer of 64 bits"),
        (
            {"max_tokens": 3, "max_completion_tokens": 4},
            "max_completion_tokens: 4 is not allowed; the rule is: the same as max_tokens (3) if both are given",
        ),
        (
            {"stop": ["a"] * (MAX_STOPS + 1)},
            f"stop: '{MAX_STOPS + 1} strings' is not allowed; the rule is: at most {MAX_STOPS}",
        ),
        ({"stop": ""}, f"stop: '' is not allowed; the rule is: 1 to {MAX_STOP_CHARS} characters"),
        ({"stop": ["a", ""]}, f"stop[1]: '' is not allowed; the rule is: 1 to {MAX_STOP_CHARS} characters"),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options: 'an object' is not allowed; the rule is: only with stream set to true",
        ),
        (
            {"echo": True},
            "echo: this server does not support it; the rule is: leave it out, or null or false",
        ),
    ],
)
def test_a_parameter_that_cannot_be_is_refused_word_for_word(fields: dict[str, Any], text: str) -> None:
    """The field of the error is the one that the text names."""
    with pytest.raises(PdmeshError) as caught:
        ask(**fields)
    assert str(caught.value) == text
    assert caught.value.info.param == text.split(":", maxsplit=1)[0]
    unsupported = caught.value.code is ErrorCode.UNSUPPORTED
    assert unsupported == ("support" in text)


def test_what_is_just_within_the_bounds_is_taken() -> None:
    """Each bound itself is allowed."""
    stops = ["a" * MAX_STOP_CHARS] * MAX_STOPS
    got = ask(n=1, best_of=1, top_k=-1, temperature=2, top_p=1, min_tokens=LARGEST, seed=LARGEST, stop=stops)
    assert (got.top_k, got.temperature, got.top_p, got.min_tokens) == (0, 2.0, 1.0, LARGEST)
    assert (got.seed, len(got.stops)) == (LARGEST, MAX_STOPS)
    assert ask(seed=-1).seed == LARGEST
    assert ask(seed=-(1 << 63)).seed == 0
    assert ask(max_tokens=3, max_completion_tokens=3).max_tokens == 3
    with pytest.raises(InvalidValueError, match=r"^min_tokens: .* the rule is: 0 or more$"):
        ask(min_tokens=LARGEST + 1)


def test_a_limit_is_known_under_the_name_that_the_client_gave_it() -> None:
    """For errors about it that come later."""
    assert (ask(max_tokens=3).max_tokens, ask(max_tokens=3).max_tokens_field) == (3, "max_tokens")
    newer = ask(max_completion_tokens=4)
    assert (newer.max_tokens, newer.max_tokens_field) == (4, "max_completion_tokens")


def test_an_answer_that_does_not_fit_is_told_with_all_numbers() -> None:
    """Prompt alone too long, or with what was asked for; what fits exactly is taken, and the default shrinks."""
    with pytest.raises(PdmeshError) as caught:
        parameters.choose_max_tokens(None, num_prompt_tokens=10, limit=10, default=4)
    assert str(caught.value) == "prompt: 10 tokens are too many; the rule is: at most 9, to leave room for one"
    assert (caught.value.code, caught.value.info.param) == (ErrorCode.PROMPT_TOO_LONG, "prompt")
    with pytest.raises(PdmeshError) as caught:
        parameters.choose_max_tokens(4, num_prompt_tokens=7, limit=10, default=4, field="max_completion_tokens")
    told = "max_completion_tokens: 4 is too many after a prompt of 7 tokens; the rule is: at most 10 together"
    assert str(caught.value) == told
    assert (caught.value.code, caught.value.info.param) == (ErrorCode.CONTEXT_LENGTH, "max_completion_tokens")
    with pytest.raises(PdmeshError, match=r"^max_tokens: 4 is too many"):
        parameters.choose_max_tokens(4, num_prompt_tokens=7, limit=10, default=4)
    assert parameters.choose_max_tokens(3, num_prompt_tokens=7, limit=10, default=9) == 3
    assert parameters.choose_max_tokens(None, num_prompt_tokens=7, limit=10, default=9) == 3
    assert parameters.choose_max_tokens(None, num_prompt_tokens=9, limit=10, default=1) == 1


@pytest.mark.parametrize(
    ("token_ids", "text"),
    [
        ((), "prompt: '' is not allowed; the rule is: at least one token"),
        ((3, 10, 4), "prompt: 10 is not allowed; the rule is: token ids from 0 to 9"),
        ((3, -1, 4), "prompt: -1 is not allowed; the rule is: token ids from 0 to 9"),
    ],
)
def test_token_ids_that_there_are_not_are_named(token_ids: tuple[int, ...], text: str) -> None:
    """The first and the last id of the vocabulary are fine."""
    parameters.check_token_ids((0, 9), vocab_size=10)
    with pytest.raises(InvalidValueError) as caught:
        parameters.check_token_ids(token_ids, vocab_size=10)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "prompt: '' is not allowed; the rule is: at least one character"),
        ([], "prompt: [] is not allowed; the rule is: at least one prompt"),
        (["a", ""], "prompt[1]: '' is not allowed; the rule is: at least one character"),
        ([[1], []], "prompt[1]: [] is not allowed; the rule is: at least one token"),
        (
            ["a", [1]],
            "prompt: 'text beside token ids' is not allowed; the rule is: all of one kind",
        ),
        (
            ["a", 1],
            "prompt[1]: 1 is not allowed; the rule is: text, token ids, or a list of either; never ids beside prompts",
        ),
    ],
)
def test_prompts_that_cannot_be_are_refused_word_for_word(prompt: Any, text: str) -> None:
    """With the place of the one at fault."""
    with pytest.raises(InvalidValueError) as caught:
        parameters.read_prompts(prompt, most=9)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            {"role": "user", "content": None},
            "messages[0].content: None is not allowed; the rule is: text",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "messages[0].content[1].type: 'image_url' is not supported; the rule is: 'text'",
        ),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages[0].content[0].text: None is not allowed; the rule is: text",
        ),
        (
            {"role": "assistant", "content": "a", "tool_calls": [{}]},
            "messages[0].tool_calls: this server does not support it; the rule is: leave it out, or null or [] or {}",
        ),
    ],
)
def test_messages_that_cannot_be_are_refused_word_for_word(message: dict[str, Any], text: str) -> None:
    """With the place in the conversation; the field of the error is the one that the text names."""
    with pytest.raises(PdmeshError) as caught:
        parameters.read_messages([msgspec.convert(message, ChatMessage)])
    assert str(caught.value) == text
    assert caught.value.info.param == text.split(":", maxsplit=1)[0]


def test_an_empty_conversation_is_refused_under_the_name_of_its_field() -> None:
    """Whatever it is called."""
    with pytest.raises(InvalidValueError) as caught:
        parameters.read_messages([])
    assert str(caught.value) == "messages: [] is not allowed; the rule is: at least one message"
    with pytest.raises(InvalidValueError, match=r"^chat: "):
        parameters.read_messages([], field="chat")


def test_every_choice_is_asked_for_with_all_that_the_client_said() -> None:
    """Its seed is that of the request and its number, within 63 bits."""
    got = ask(temperature=0.5, top_p=0.25, top_k=3, min_tokens=2, ignore_eos=True, n=2)
    params = got.sampling(max_tokens=2, seed=LARGEST, choice=1)
    assert msgspec.structs.asdict(params) == {
        "max_tokens": 2,
        "seed": 0,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    with pytest.raises(InvalidValueError) as caught:
        got.sampling(max_tokens=1, seed=0, choice=0)
    assert str(caught.value) == "min_tokens: 2 is not allowed; the rule is: at most max_tokens (1)"
