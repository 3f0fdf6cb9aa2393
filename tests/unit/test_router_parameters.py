"""What clients ask for is checked, and errors name the field, the value and the rule."""

import json
from typing import Any

import msgspec
import pytest

from contracts.errors import ErrorCode, PdmeshError
from contracts.openai import ChatMessage, ChatRequest, CompletionRequest
from services.router.core.bodies import MAX_COMPARED_NAMES, decode_body
from services.router.core.parameters import (
    Ask,
    check_token_ids,
    choose_max_tokens,
    read_messages,
    read_parameters,
    read_prompts,
)


def completion(**fields: Any) -> CompletionRequest:
    """A completion request, through JSON as from a client."""
    body = {"model": "m", "prompt": "x"} | fields
    return decode_body(json.dumps(body).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    """A chat request, through JSON as from a client."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    return decode_body(json.dumps(body).encode(), ChatRequest)


def test_nothing_given_means_defaults() -> None:
    """Null and absent fields are the same; length and seed stay open."""
    expected = Ask(
        n=1,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        return_token_ids=False,
        stops=(),
        max_tokens=None,
        min_tokens=0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        ignore_eos=False,
        seed=None,
    )
    assert read_parameters(completion()) == expected
    nothing = dict.fromkeys(("stop", "n", "seed", "max_tokens", "temperature", "stream_options", "logprobs", "tools"))
    assert read_parameters(chat(**nothing, no_such_field=[1])) == expected


def test_what_real_clients_send_at_neutral_values_passes() -> None:
    """The load generators' standing parameters ask for nothing that is not built."""
    read_parameters(completion(best_of=1, temperature=0, ignore_eos=True, logprobs=None, repetition_penalty=1.0))
    read_parameters(completion(stop=None, max_tokens=64, max_completion_tokens=64, top_k=-1, echo=False, logit_bias={}))
    read_parameters(
        chat(logprobs=False, top_logprobs=0, tools=[], tool_choice="none", response_format={"type": "text"})
    )
    read_parameters(chat(frequency_penalty=0.0, presence_penalty=0, modalities=["text"], min_p=0.0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 0),
        ("logprobs", 1),
        ("echo", True),
        ("best_of", 2),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("min_p", 0.1),
        ("min_p", False),
        ("response_format", {"type": "json_object"}),
        ("suffix", "x"),
        ("stop_token_ids", [1]),
        ("skip_special_tokens", False),
        ("guided_json", {}),
    ],
)
def test_what_is_not_built_is_refused_by_name(field: str, value: object) -> None:
    """A known field that would change the answer is never silently dropped."""
    with pytest.raises(PdmeshError, match=field) as caught:
        read_parameters(completion(**{field: value}))
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED, field)


@pytest.mark.parametrize("field", ["tools", "functions", "documents"])
def test_chat_fields_that_are_not_built_are_refused(field: str) -> None:
    """Tools need a parser for their calls."""
    with pytest.raises(PdmeshError, match=field) as caught:
        read_parameters(chat(**{field: [{"type": "function"}]}))
    assert caught.value.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], param: str) -> None:
    """The error names the field."""
    with pytest.raises(PdmeshError, match="the rule is") as caught:
        read_parameters(completion(**fields))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        (b"{", None, "not valid JSON"),
        (b'{"model":"m","prompt":"x","temperature":NaN}', None, "not valid JSON"),
        (b'{"model":"m","prompt":"x","temperature":1e999}', "temperature", "out of range"),
        (b'{"model":"m","prompt":"\xff"}', None, "not valid JSON"),
        (b'{"model":"m"}', "prompt", "missing"),
        (b"[]", None, "Expected `object`"),
        (b'{"model":"m","prompt":"x","max_tokens":"5"}', "max_tokens", "Expected `int | null`, got `str`"),
        (b'{"model":"m","prompt":"x","max_tokens":true}', "max_tokens", "got `bool`"),
        (b'{"model":"m","prompt":[[1.5]]}', "prompt[0][0]", "got `float`"),
        (
            b'{"model":"m","prompt":"x","stream":true,"stream_options":{"include_usage":1}}',
            "stream_options.include_usage",
            "got `int`",
        ),
        (b'{"model":"m","prompt":"x","logit_bias":' + b"[" * 100_000, None, "nested too deeply"),
    ],
)
def test_bad_bodies_name_the_path(body: bytes, param: str | None, text: str) -> None:
    """Malformed JSON and wrong types are the client's errors, with the path of the field."""
    with pytest.raises(PdmeshError, match=text.replace("|", r"\|")) as caught:
        decode_body(body, CompletionRequest)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)


def test_prompts_come_as_text_or_ids_or_lists_of_either() -> None:
    """One prompt or several."""
    assert read_prompts("a", most=1) == ("a",)
    assert read_prompts([1, 2], most=1) == ((1, 2),)
    assert read_prompts(["a", "b"], most=2) == ("a", "b")
    assert read_prompts([[1], [2, 3]], most=2) == ((1,), (2, 3))


def test_prompts_are_bounded_before_any_is_looked_at() -> None:
    """A body holds millions of them, and this one is not of one kind: that is not found out."""
    with pytest.raises(PdmeshError, match=r"prompt: '3 prompts' is not allowed; the rule is: at most 2") as caught:
        read_prompts(["a", "", 5], most=2)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", [1]], [1, "a"], [[1], 2]])
def test_empty_and_mixed_prompts_are_refused(prompt: Any) -> None:
    """Nothing to compute, or no one kind."""
    with pytest.raises(PdmeshError, match="prompt"):
        read_prompts(prompt, most=3)


def test_messages_become_plain_text_turns() -> None:
    """Text parts are joined; an assistant's turn may be empty."""
    request = chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": None},
        ]
    )
    assert read_messages(request.messages) == [
        {"role": "user", "content": "ab", "name": "Ann"},
        {"role": "assistant", "content": ""},
    ]


def test_fields_of_turns_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask anew for each turn of a long conversation held up everybody for most of a minute."""
    asked: list[object] = []
    fields = msgspec.structs.fields

    def noted(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
        asked.append(kind)
        return fields(kind)

    monkeypatch.setattr(msgspec.structs, "fields", noted)
    assert len(read_messages([ChatMessage(role="user", content="")] * 1000)) == 1000
    assert len(asked) <= 1


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)
def test_bad_messages_name_their_place(messages: list[Any], param: str) -> None:
    """Images and calls are refused by name."""
    with pytest.raises(PdmeshError) as caught:
        read_messages(chat(messages=messages).messages)
    assert caught.value.param == param


def test_token_ids_must_exist() -> None:
    """Ids below 0 or from the vocabulary's size on, and prompts without any."""
    check_token_ids((0, 9), vocab_size=10)
    for bad in ((), (3, 10), (-1,)):
        with pytest.raises(PdmeshError, match="prompt"):
            check_token_ids(bad, vocab_size=10)


def test_the_answers_length_fits_behind_the_prompt() -> None:
    """What is asked for is given or refused; the default shrinks."""
    assert choose_max_tokens(5, num_prompt_tokens=95, limit=100, default=16) == 5
    assert choose_max_tokens(None, num_prompt_tokens=95, limit=100, default=16) == 5
    assert choose_max_tokens(None, num_prompt_tokens=5, limit=100, default=16) == 16
    too_long, too_much = (ErrorCode.PROMPT_TOO_LONG, "prompt"), (ErrorCode.CONTEXT_LENGTH, "max_tokens")
    for asked, prompt, expected in ((6, 95, too_much), (None, 100, too_long), (1, 300, too_long)):
        with pytest.raises(PdmeshError) as caught:
            choose_max_tokens(asked, num_prompt_tokens=prompt, limit=100, default=16)
        assert (caught.value.code, caught.value.param) == expected


def test_choices_draw_with_seeds_of_their_own() -> None:
    """The n answers differ, and a negative seed is as good as any."""
    ask = read_parameters(completion(seed=-1, n=2, max_tokens=4))
    assert ask.seed == (1 << 63) - 1
    seeds = [ask.sampling(max_tokens=4, seed=ask.seed, choice=choice).seed for choice in range(2)]
    assert seeds == [(1 << 63) - 1, 0]


def test_min_tokens_is_at_most_max_tokens() -> None:
    """Checked once the length is known."""
    with pytest.raises(PdmeshError, match=r"min_tokens: 5 .* at most max_tokens \(4\)"):
        read_parameters(completion(min_tokens=5)).sampling(max_tokens=4, seed=0, choice=0)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("redispach", "redispatch"),
        ("max_token", "max_tokens"),
        ("stream_option", "stream_options"),
        ("toppp", None),
        ("top_a", None),
        ("max_new_tokens", None),
        ("repeat_penalty", None),
        ("user", None),
        ("metadata", None),
        ("x" * 100_000, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_slip_of_the_pen_is_told_and_other_unknown_fields_are_ignored(name: str, meant: str | None) -> None:
    """Clients send fields of other servers, which do no harm; a misspelt one would quietly do nothing."""
    body = json.dumps({"model": "tiny", "prompt": "x", name: 1}).encode()
    if meant is None:
        assert decode_body(body, CompletionRequest).prompt == "x"
        return
    with pytest.raises(PdmeshError) as caught:
        decode_body(body, CompletionRequest)
    assert caught.value.message == f"{name}: there is no such field; did you mean {meant}?"
    assert (caught.value.code, caught.value.info.param) == (ErrorCode.INVALID_REQUEST, name)


@pytest.mark.parametrize("num_before", [MAX_COMPARED_NAMES - 1, MAX_COMPARED_NAMES])
def test_slips_are_looked_for_among_so_many_unknown_fields(num_before: int) -> None:
    """A body may hold hundreds of thousands of them, and each comparison holds up everybody; fields that are known do not count."""
    unknown = {f"x_{place}": 1 for place in range(num_before)}
    after = {f"y_{place}": 1 for place in range(20_000)}
    body = json.dumps(unknown | {"model": "tiny", "prompt": "x", "temprature": 1} | after).encode()
    if num_before < MAX_COMPARED_NAMES:
        with pytest.raises(PdmeshError, match="did you mean temperature"):
            decode_body(body, CompletionRequest)
    else:
        assert decode_body(body, CompletionRequest).prompt == "x"
