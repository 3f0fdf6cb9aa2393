"""Fields that clients send and that are not built: harmless at their neutral value, refused at any other."""

import functools
from typing import Any, Final

import msgspec

from contracts.errors import ErrorCode, PdmeshError
from contracts.openai import ChatMessage, ChatRequest, CompletionRequest, StreamOptions

_OFF: Final = (False,)
_EMPTY: Final[tuple[Any, ...]] = ([], {})
_TEXT_ONLY: Final = ({"type": "text"},)

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": _EMPTY,
    "logprobs": _OFF,
    "prompt_logprobs": _OFF,
    "echo": _OFF,
    "use_beam_search": _OFF,
    "stop_token_ids": _EMPTY,
    "bad_words": _EMPTY,
    "allowed_token_ids": (),
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (True, False),
    "response_format": _TEXT_ONLY,
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": _EMPTY,
    "suffix": ("",),
    "prompt_embeds": (),
    "top_logprobs": (0,),
    "tools": _EMPTY,
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": _EMPTY,
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "store": _OFF,
    "service_tier": ("auto", "default"),
    "moderation": (),
    "web_search_options": (),
    "documents": _EMPTY,
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": _OFF,
    "tool_calls": _EMPTY,
    "tool_call_id": (),
    "refusal": ("",),
    "include_obfuscation": _OFF,
}
"""Field -> values that ask for nothing. `null` always does. There are no tools to call, in parallel or not, and Qwen's tokenizers add no special tokens, so that
either value of `parallel_tool_calls` and of `add_special_tokens` is met."""


def refuse_unsupported(
    request: CompletionRequest | ChatRequest | ChatMessage | StreamOptions, *, prefix: str = ""
) -> None:
    """Raise `PdmeshError` (`unsupported_parameter`) naming the first field that asks for something that is not built."""
    for field, neutral in _not_built(type(request)):
        value = getattr(request, field)
        if value is not None and not any(_same(value, each) for each in neutral):
            name = f"{prefix}{field}"
            accepted = " or ".join(["null", *(msgspec.json.encode(each).decode() for each in neutral)])
            raise PdmeshError(
                f"{name}: this server does not support it; the rule is: leave it out, or {accepted}",
                code=ErrorCode.UNSUPPORTED,
                param=name,
            )


@functools.cache
def _not_built(kind: type[msgspec.Struct]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Fields of a kind that are not built, with their neutral values. To ask for them anew took most of the time of a long conversation."""
    return tuple((field.name, _NEUTRAL[field.name]) for field in msgspec.structs.fields(kind) if field.name in _NEUTRAL)


def _same(value: Any, neutral: Any) -> bool:
    """Compare as JSON does: true is not 1, but 1.0 is."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
