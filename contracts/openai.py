"""The part of the OpenAI HTTP interface that the router speaks: what clients send and what they get back.

Requests: unknown fields are ignored, but for slips of the pen, and so are labels and hints that ask for nothing of an answer (`user`,
`metadata`, `safety_identifier`, `prompt_cache_...`); fields that are known but not built are typed `Any`, so that the router can refuse
them by name; `null` always means "not given". Answers: fields that are `UNSET` are left out of the JSON.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

PromptField: TypeAlias = str | list[str | int | list[int]]
"""Text, token ids, or a list of either; never both in one list, which the type cannot say."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which usage figures a stream carries: in one last chunk without choices, or on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    include_obfuscation: Any = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    redispatch: bool | None = None
    """Ours: false forbids that an answer that has begun goes on elsewhere when its worker is lost; it ends with the error."""

    # Known, not built: refused unless neutral.
    min_p: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    length_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    use_beam_search: Any = None
    stop_token_ids: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    add_special_tokens: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logits_processors: Any = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: PromptField
    suffix: Any = None
    prompt_embeds: Any = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a message. Only parts of type `text` are served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    chat_template_kwargs: dict[str, Any] | None = None

    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    store: Any = None
    service_tier: Any = None
    moderation: Any = None
    web_search_options: Any = None
    documents: Any = None
    chat_template: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the prompt prefill found in a cache: a cold prompt says 0."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens read and written for one HTTP request, over all of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One text, whole or the next piece of it. A piece says of how many tokens it is where these are more than one, in `num_tokens`."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    num_tokens: int | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's turn."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One whole answer."""

    index: int
    message: AnswerMessage
    logprobs: None = None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The next piece of an answer. The role comes with a choice's first one."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The next piece of one choice. It says of how many tokens it is where these are more than one, in `num_tokens`."""

    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    num_tokens: int | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: `param` names the field at fault, `code` is one of `contracts.errors.ErrorCode`.

    `request_id` is that of the header `x-request-id`: what becomes of an error in a log often is the body alone.
    """

    message: str
    type: str
    param: str | None
    code: str
    request_id: str


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every answer that is not a success, and the error event of a stream."""

    error: ErrorDetail


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    id: str
    created: int
    max_model_len: int
    owned_by: str = "pdmesh"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /tokenize`: a prompt, or messages to which the chat template is applied."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of the text, and how many would fit."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The text of the tokens, special ones included."""

    prompt: str
