"""No parameter that OpenAI's clients can send is dropped in silence: it is served, refused by name, or a label that asks for nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from contracts.errors import ErrorCode, PdmeshError
from contracts.openai import ChatMessage, ChatRequest, CompletionRequest, StreamOptions
from services.router.core.parameters import read_messages, read_parameters
from services.router.core.unsupported import refuse_unsupported

LABELS = {
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
}
SENT: dict[type[msgspec.Struct], str] = {
    ChatRequest: """
        audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages metadata
        modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options
        prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream stream_options
        temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
    """,
    CompletionRequest: """
        best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop stream stream_options
        suffix temperature top_p user
    """,
    StreamOptions: "include_obfuscation include_usage",
    ChatMessage: "role content name refusal audio function_call tool_calls tool_call_id",
}
"""What version 3.57 of the official client has parameters for."""


@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_every_parameter_of_the_schema_is_known_or_a_label(kind: type[msgspec.Struct]) -> None:
    """A client that sends one hears of it, or loses nothing."""
    assert set(SENT[kind].split()) - set(kind.__struct_fields__) <= LABELS


@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_a_field_that_is_known_and_not_built_has_a_rule(kind: type[Any]) -> None:
    """Fields of any type are those that nothing reads: each is refused at a value that no neutral one can be."""
    required = {"model": "m", "prompt": "x", "messages": [], "role": "user"}
    given = {name: required[name] for name in kind.__struct_fields__ if name in required}
    unread = [field.name for field in msgspec.structs.fields(kind) if field.type is Any]
    assert unread
    for name in unread:
        with pytest.raises(PdmeshError, match=f"^{name}: this server does not support it"):
            refuse_unsupported(kind(**given, **{name: object}))


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("verbosity", "low", "medium"),
        ("store", True, False),
        ("service_tier", "priority", "auto"),
        ("service_tier", "flex", "default"),
        ("moderation", {"model": "m"}, None),
        ("parallel_tool_calls", "yes", True),
        ("parallel_tool_calls", 0, False),
    ],
)
def test_what_a_chat_cannot_have_is_refused(field: str, value: object, neutral: object) -> None:
    """At its neutral value it asks for nothing."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    read_parameters(msgspec.convert(body | {field: neutral}, ChatRequest))
    with pytest.raises(PdmeshError, match=f"{field}: this server does not support it") as caught:
        read_parameters(msgspec.convert(body | {field: value}, ChatRequest))
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED, field)


def test_what_a_stream_cannot_have_is_refused() -> None:
    """By its place."""
    body = {"model": "m", "prompt": "x", "stream": True}
    read_parameters(msgspec.convert(body | {"stream_options": {"include_obfuscation": False}}, CompletionRequest))
    with pytest.raises(PdmeshError) as caught:
        read_parameters(msgspec.convert(body | {"stream_options": {"include_obfuscation": True}}, CompletionRequest))
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED, "stream_options.include_obfuscation")


@pytest.mark.parametrize(("field", "value"), [("refusal", "no"), ("audio", {"id": "a"}), ("tool_call_id", "c")])
def test_what_a_turn_cannot_have_is_refused(field: str, value: object) -> None:
    """Our own turns, which say that they refuse nothing, may come back."""
    turn = {"role": "assistant", "content": "x"}
    assert read_messages([msgspec.convert(turn | {field: None}, ChatMessage)]) == [turn]
    with pytest.raises(PdmeshError) as caught:
        read_messages([msgspec.convert(turn | {field: value}, ChatMessage)])
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED, f"messages[0].{field}")
