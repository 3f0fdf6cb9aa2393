"""What a client asks for, checked and in our own terms. Nothing here has been tokenized yet."""

from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from contracts.errors import ErrorCode, InvalidValueError, PdmeshError
from contracts.openai import ChatMessage, ChatRequest, CompletionRequest, GenerationFields, PromptField
from contracts.requests import SamplingParams
from services.router.core.unsupported import refuse_unsupported

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
_SEEDS: Final = 1 << 63

Prompt: TypeAlias = str | tuple[int, ...]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The parameters that all choices of one HTTP request share. `max_tokens` and `seed` may still be open.

    `max_tokens_field` is the name under which the client gave `max_tokens`, for errors about it. `redispatch` says whether an answer
    that has begun may go on elsewhere.
    """

    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    stops: tuple[str, ...]
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    ignore_eos: bool
    seed: int | None
    redispatch: bool = True
    max_tokens_field: str = "max_tokens"

    def sampling(self, *, max_tokens: int, seed: int, choice: int) -> SamplingParams:
        """Return what the engine is told for the `choice`-th of the `n` answers to a prompt.

        Each draws with a seed of its own, so that they differ; the same request with the same seed repeats all of them.
        """
        if self.min_tokens > max_tokens:
            raise InvalidValueError(
                field="min_tokens", value=self.min_tokens, rule=f"at most max_tokens ({max_tokens})"
            )
        return SamplingParams(
            max_tokens=max_tokens,
            seed=(seed + choice) % _SEEDS,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
        )


def read_parameters(request: CompletionRequest | ChatRequest) -> Ask:
    """Check everything that does not need the tokenizer. Raises `PdmeshError` naming the field, the value and the rule."""
    refuse_unsupported(request)
    n = _integer("n", request.n, default=1, least=1)
    if request.best_of is not None and request.best_of != n:
        raise PdmeshError(
            f"best_of: {request.best_of} is not supported; the rule is: the same as n ({n})",
            code=ErrorCode.UNSUPPORTED,
            param="best_of",
        )
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidValueError(field="stream_options", value="an object", rule="only with stream set to true")
    if options is not None:
        refuse_unsupported(options, prefix="stream_options.")
    top_k = _integer("top_k", request.top_k, default=0, least=-1)
    return Ask(
        n=n,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        stops=_stops(request.stop),
        max_tokens=_max_tokens(request),
        min_tokens=_integer("min_tokens", request.min_tokens, default=0, least=0),
        temperature=_number("temperature", request.temperature, default=1.0, least=0.0, most=2.0),
        top_p=_top_p(request.top_p),
        top_k=max(0, top_k),
        ignore_eos=bool(request.ignore_eos),
        seed=None if request.seed is None else _seed(request.seed),
        redispatch=request.redispatch is not False,
        max_tokens_field="max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
    )


def read_prompts(prompt: PromptField, *, most: int) -> tuple[Prompt, ...]:
    """Return the prompts of a completion, at least one and at most `most`, and none of them empty."""
    if isinstance(prompt, str):
        return (_text("prompt", prompt),)
    if not prompt:
        raise InvalidValueError(field="prompt", value=[], rule="at least one prompt")
    if set(map(type, prompt)) == {int}:  # a body holds millions of ids: none is looked at by itself
        return (cast("tuple[int, ...]", tuple(prompt)),)
    if len(prompt) > most:
        raise InvalidValueError(field="prompt", value=f"{len(prompt)} prompts", rule=f"at most {most}")
    prompts: list[Prompt] = []
    for place, each in enumerate(prompt):
        match each:
            case str():
                prompts.append(_text(f"prompt[{place}]", each))
            case list():
                if not each:
                    raise InvalidValueError(field=f"prompt[{place}]", value=[], rule="at least one token")
                prompts.append(tuple(each))
            case int():
                rule = "text, token ids, or a list of either; never ids beside prompts"
                raise InvalidValueError(field=f"prompt[{place}]", value=each, rule=rule)
    if len({type(each) for each in prompts}) > 1:
        raise InvalidValueError(field="prompt", value="text beside token ids", rule="all of one kind")
    return tuple(prompts)


def read_messages(messages: list[ChatMessage], *, field: str = "messages") -> list[dict[str, str]]:
    """Return the conversation as chat templates take it: role, content as text, and name if there is one."""
    if not messages:
        raise InvalidValueError(field=field, value=[], rule="at least one message")
    turns: list[dict[str, str]] = []
    for place, message in enumerate(messages):
        where = f"{field}[{place}]"
        refuse_unsupported(message, prefix=f"{where}.")
        turn = {"role": message.role, "content": _content(where, message)}
        if message.name is not None:
            turn["name"] = message.name
        turns.append(turn)
    return turns


def check_token_ids(token_ids: tuple[int, ...], *, vocab_size: int, field: str = "prompt") -> None:
    """Raise for ids that the model does not have. An empty prompt is one of them: it has no first id."""
    if not token_ids:
        raise InvalidValueError(field=field, value="", rule="at least one token")
    for extreme in (min(token_ids), max(token_ids)):
        if not 0 <= extreme < vocab_size:
            raise InvalidValueError(field=field, value=extreme, rule=f"token ids from 0 to {vocab_size - 1}")


def choose_max_tokens(
    asked: int | None, *, num_prompt_tokens: int, limit: int, default: int, field: str = "max_tokens"
) -> int:
    """Return how many tokens may be generated so that prompt and answer fit into `limit` tokens.

    Raises `PdmeshError`: `prompt_too_long` if the prompt leaves no room, `context_length_exceeded` if it leaves less than was
    asked for. The default is not asked for: it shrinks to what is there. `field` is what the client calls `asked`.
    """
    room = limit - num_prompt_tokens
    if room < 1:
        raise PdmeshError(
            f"prompt: {num_prompt_tokens} tokens are too many; the rule is: at most {limit - 1}, to leave room for one",
            code=ErrorCode.PROMPT_TOO_LONG,
            param="prompt",
        )
    if asked is None:
        return min(default, room)
    if asked > room:
        raise PdmeshError(
            f"{field}: {asked} is too many after a prompt of {num_prompt_tokens} tokens; "
            f"the rule is: at most {limit} together",
            code=ErrorCode.CONTEXT_LENGTH,
            param=field,
        )
    return asked


def _content(where: str, message: ChatMessage) -> str:
    match message.content:
        case None:
            if message.role != "assistant":
                raise InvalidValueError(field=f"{where}.content", value=None, rule="text")
            return ""
        case str() as text:
            return text
        case parts:
            texts: list[str] = []
            for place, part in enumerate(parts):
                if part.type != "text":
                    raise PdmeshError(
                        f"{where}.content[{place}].type: {part.type!r} is not supported; the rule is: 'text'",
                        code=ErrorCode.UNSUPPORTED,
                        param=f"{where}.content[{place}].type",
                    )
                if part.text is None:
                    raise InvalidValueError(field=f"{where}.content[{place}].text", value=None, rule="text")
                texts.append(part.text)
            return "".join(texts)


def _max_tokens(request: GenerationFields) -> int | None:
    asked: int | None = None
    for field, value in (("max_tokens", request.max_tokens), ("max_completion_tokens", request.max_completion_tokens)):
        if value is None:
            continue
        _integer(field, value, default=0, least=1)
        if asked is not None and asked != value:
            raise InvalidValueError(
                field=field, value=value, rule=f"the same as max_tokens ({asked}) if both are given"
            )
        asked = value
    return asked


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidValueError(field="stop", value=f"{len(stops)} strings", rule=f"at most {MAX_STOPS}")
    for place, each in enumerate(stops):
        if not 1 <= len(each) <= MAX_STOP_CHARS:
            field = "stop" if isinstance(stop, str) else f"stop[{place}]"
            raise InvalidValueError(field=field, value=each, rule=f"1 to {MAX_STOP_CHARS} characters")
    return stops


def _text(field: str, text: str) -> str:
    if not text:
        raise InvalidValueError(field=field, value=text, rule="at least one character")
    return text


def _integer(field: str, value: int | None, *, default: int, least: int) -> int:
    if value is None:
        return default
    if not least <= value < _SEEDS:
        raise InvalidValueError(field=field, value=value, rule=f"{least} or more")
    return value


def _number(field: str, value: float | None, *, default: float, least: float, most: float) -> float:
    if value is None:
        return default
    if not least <= value <= most:  # also false for NaN
        raise InvalidValueError(field=field, value=value, rule=f"from {least:g} to {most:g}")
    return float(value)


def _top_p(value: float | None) -> float:
    checked = _number("top_p", value, default=1.0, least=0.0, most=1.0)
    if checked == 0.0:
        raise InvalidValueError(field="top_p", value=value, rule="above 0 and at most 1")
    return checked


def _seed(value: int) -> int:
    if not -_SEEDS <= value < _SEEDS:
        raise InvalidValueError(field="seed", value=value, rule="a signed integer of 64 bits")
    return value % _SEEDS
