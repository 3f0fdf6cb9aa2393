"""What the router reads of a checkpoint: tokenizer, chat template, and some facts of its configuration."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.runtime.settings import SettingsError, SettingsProblem
from services.router.chat_template import ChatTemplate
from services.router.core.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as the router knows it. Weights are the workers' business."""

    name: str
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    chat_template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    """Tokens that end an answer."""
    max_sequence_tokens: int
    """Prompt and answer together; what the model was made for."""


def load_model(directory: Path, *, name: str, wall_time: Callable[[], float]) -> Model:
    """Read a checkpoint's directory. Raises SettingsError that says what is missing or wrong in it."""
    try:
        config = _read_json(directory / "config.json")
        text_config = config.get("text_config") or config
        generation = _read_json(directory / "generation_config.json", optional=True)
        tokenizer = Tokenizer.from_file(str(_existing(directory / "tokenizer.json")))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocab_size = int(text_config["vocab_size"])
        ends = frozenset[int]().union(
            *(
                _as_ids(each.get("eos_token_id")) for each in (text_config, config, generation)
            )  # all of them, as workers do
        )
        return Model(
            name=name,
            tokenizer=tokenizer,
            vocabulary=_vocabulary(tokenizer, vocab_size=vocab_size, ends=ends),
            chat_template=_chat_template(directory, wall_time),
            eos_token_ids=ends,
            max_sequence_tokens=int(text_config["max_position_embeddings"]),
        )
    except SettingsError:
        raise
    except KeyError as error:
        raise _problem(directory, f"config.json has {error}") from error
    except Exception as error:  # tokenizers raises plain Exception for a file that it cannot read
        raise _problem(directory, str(error)) from error


def _vocabulary(tokenizer: Tokenizer, *, vocab_size: int, ends: frozenset[int]) -> Vocabulary:
    if "ByteLevel" not in json.dumps(json.loads(tokenizer.to_str()).get("decoder")):
        raise ValueError("tokenizer.json: only byte-level BPE tokenizers (decoder ByteLevel) are served")
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    return Vocabulary(
        vocab=tokenizer.get_vocab(with_added_tokens=True),
        added={token_id: token.content for token_id, token in added.items()},
        silent=special.union(ends),
        vocab_size=vocab_size,
    )


def _chat_template(directory: Path, wall_time: Callable[[], float]) -> ChatTemplate | None:
    """Find the template: a file of its own, else in the tokenizer's configuration, else there is none."""
    config = _read_json(directory / "tokenizer_config.json", optional=True)
    file = directory / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((each["template"] for each in source if each.get("name") == "default"), None)
    if source is None:
        return None
    names = {key: _token_text(value) for key, value in config.items() if key.endswith("_token")}
    return ChatTemplate(source, names=names, wall_time=wall_time)


def _token_text(value: Any) -> Any:
    """Return the text of a token, which configurations write as text or as an object."""
    return value.get("content") if isinstance(value, Mapping) else value


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    content = json.loads(_existing(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TypeError(f"{path.name}: it is not a JSON object")
    return content


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is not there")
    return path


def _problem(directory: Path, rule: str) -> SettingsError:
    return SettingsError([SettingsProblem(key="model", value=str(directory), rule=f"a checkpoint directory: {rule}")])
