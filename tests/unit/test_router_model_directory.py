"""What the router reads of a checkpoint, and what it says of one that it cannot read."""

import dataclasses
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from common.runtime.settings import SettingsError
from contracts.errors import PdmeshError
from services.router import tokenizing as tokenizing_module
from services.router.chat_template import ChatTemplate
from services.router.core.detokenizer import Detokenizer, whole_text
from services.router.core.vocabulary import Vocabulary
from services.router.model_directory import Model, load_model
from services.router.tokenizing import Tokenizing
from tests.integration.router_world import MAX_POSITION, VOCAB_SIZE, encode_text, tokenizer, write_model

MESSAGES = [{"role": "user", "content": "hi"}]


def load(folder: Path) -> Model:
    """Read a checkpoint's directory."""
    return load_model(folder, name="tiny", wall_time=lambda: 86400.0)


def template(source: str) -> ChatTemplate:
    """A compiled template."""
    return ChatTemplate(source, names={"eos_token": "<end>"}, wall_time=lambda: 86400.0)


def test_facts_come_from_the_configuration(tmp_path: Path) -> None:
    """Also when the text model's is nested in that of a larger one."""
    folder = write_model(tmp_path / "tiny")
    model = load(folder)
    assert (model.vocabulary.size, model.max_sequence_tokens) == (VOCAB_SIZE, MAX_POSITION)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"text_config": config}))
    assert load(folder).max_sequence_tokens == MAX_POSITION


@pytest.mark.parametrize("text", ["", "hello", "wörld 😀 \n\t <|im_end|>", "\u0000é中文", "a" * 300])
def test_decoding_is_that_of_the_tokenizer(tmp_path: Path, text: str) -> None:
    """The byte table and the incremental decoder agree with the tokenizer's own decoder, special tokens left out."""
    vocabulary = load(write_model(tmp_path / "tiny")).vocabulary
    ids = encode_text(text)
    detokenizer = Detokenizer(vocabulary)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == tokenizer().decode(ids)


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("config.json", None, "config.json is not there"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", '{"vocab_size": 5}', "max_position_embeddings"),
        ("tokenizer.json", None, "tokenizer.json is not there"),
        ("tokenizer.json", "{}", "checkpoint directory"),
        ("chat_template.jinja", "{% if %}", "does not compile"),
    ],
)
def test_broken_checkpoints_are_settings_errors(tmp_path: Path, name: str, content: str | None, rule: str) -> None:
    """The setting, its value and what is wrong."""
    folder = write_model(tmp_path / "tiny")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(SettingsError, match=rule) as caught:
        load(folder)
    assert caught.value.problems[0].key == "model"


def test_other_kinds_of_tokenizers_are_refused(tmp_path: Path) -> None:
    """Their text would come out wrong."""
    folder = write_model(tmp_path / "tiny")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(SettingsError, match="only byte-level BPE"):
        load(folder)


def test_a_template_may_stand_in_the_tokenizers_configuration(tmp_path: Path) -> None:
    """As text, or as a list of named ones; without any, chat is refused by name."""
    folder = write_model(tmp_path / "tiny")
    (folder / "chat_template.jinja").unlink()
    assert load(folder).chat_template is None
    for value in ("T{{ eos_token }}", [{"name": "default", "template": "T{{ eos_token }}"}]):
        config = {"chat_template": value, "eos_token": {"content": "<end>"}}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        found = load(folder).chat_template
        assert found is not None
        assert found.render(MESSAGES) == "T<end>"


async def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    """The error says what to use instead."""
    folder = write_model(tmp_path / "tiny")
    (folder / "chat_template.jinja").unlink()
    tokenizing = Tokenizing(load(folder), num_threads=1, inline_chars=10)
    with pytest.raises(PdmeshError, match="has no chat template"):
        await tokenizing.encode_chat(MESSAGES, arguments=None)
    tokenizing.close()


async def test_threads_give_what_the_loop_gives(tmp_path: Path) -> None:
    """Long text is encoded elsewhere, with the same result."""
    model = load(write_model(tmp_path / "tiny"))
    inline, threaded = (Tokenizing(model, num_threads=1, inline_chars=limit) for limit in (1000, 0))
    text = "hello there, wörld"
    expected = [tuple(encode_text(text)), tuple(encode_text("hi"))]
    assert await inline.encode_prompts([text, "hi"]) == await threaded.encode_prompts([text, "hi"]) == expected
    inline.close()
    threaded.close()
    threaded.close()


@pytest.mark.parametrize(
    ("messages", "arguments", "threaded"),
    [
        (MESSAGES, None, False),
        ([{"role": "user", "content": "x" * 900}], {"thinking": False}, False),
        ([{"role": "user", "content": "x" * 1000}], None, True),
        ([{"role": "user", "content": ""}] * 20, None, True),
        ([{"role": "user", "content": "", "name": "x" * 1000}], None, True),
        (MESSAGES, {"x": ["x" * 500, {"x" * 500: 1}]}, True),
    ],
    ids=["short", "nearly long", "text", "turns", "name", "arguments"],
)
async def test_what_is_long_of_a_conversation_is_rendered_elsewhere(
    tmp_path: Path, messages: list[dict[str, str]], arguments: dict[str, Any] | None, threaded: bool
) -> None:
    """Whatever makes it long: its texts, the number of its turns, names, or what it tells the template."""
    threads: list[threading.Thread] = []

    def note() -> str:
        threads.append(threading.current_thread())
        return ""

    model = load(write_model(tmp_path / "tiny"))
    chat = template("{{ note() }}{% for turn in messages %}{{ turn.role }}{% endfor %}")
    chat._names["note"] = note
    tokenizing = Tokenizing(dataclasses.replace(model, chat_template=chat), num_threads=1, inline_chars=1000)
    await tokenizing.encode_chat(messages, arguments=arguments)
    tokenizing.close()
    assert [thread is not threading.main_thread() for thread in threads] == [threaded]


@pytest.mark.parametrize(("num_prompts", "threaded"), [(4, False), (5, True)])
async def test_the_prompts_of_a_request_are_long_together(
    tmp_path: Path, num_prompts: int, threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many short ones hold up the others as much as one that has their length."""
    threads: list[threading.Thread] = []
    encode = Tokenizing._encode

    def noted(self: Tokenizing, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        threads.append(threading.current_thread())
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizing, "_encode", noted)
    tokenizing = Tokenizing(load(write_model(tmp_path / "tiny")), num_threads=1, inline_chars=100)
    await tokenizing.encode_prompts(["x" * 25] * num_prompts)
    tokenizing.close()
    assert [thread is not threading.main_thread() for thread in threads] == [threaded] * num_prompts


@pytest.mark.parametrize(("num_ids", "threaded"), [(100, False), (101, True)])
async def test_long_lists_of_ids_are_decoded_elsewhere(
    tmp_path: Path, num_ids: int, threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same result."""
    threads: list[threading.Thread] = []

    def noted(vocabulary: Vocabulary, token_ids: Iterable[int]) -> str:
        threads.append(threading.current_thread())
        return whole_text(vocabulary, token_ids)

    monkeypatch.setattr(tokenizing_module, "whole_text", noted)
    tokenizing = Tokenizing(load(write_model(tmp_path / "tiny")), num_threads=1, inline_chars=100)
    assert await tokenizing.decode(encode_text("a") * num_ids) == "a" * num_ids
    tokenizing.close()
    assert [thread is not threading.main_thread() for thread in threads] == [threaded]


def test_templates_get_their_own_switches() -> None:
    """chat_template_kwargs reach the template, but never replace the conversation."""
    source = "{{ messages[0].content }}{{ '!' if loud }}{{ strftime_now('%Y-%m-%d') }}{{ {'a': 'é<'} | tojson }}"
    assert template(source).render(MESSAGES, arguments={"loud": True}) == 'hi!1970-01-02{"a": "é<"}'
    with pytest.raises(PdmeshError, match=r"chat_template_kwargs\.messages"):
        template(source).render(MESSAGES, arguments={"messages": []})


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].nothing.more }}",
    ],
)
def test_a_template_that_fails_is_the_requests_error(source: str) -> None:
    """Refusals, forbidden accesses and plain mistakes: 400, never a crash."""
    with pytest.raises(PdmeshError, match="the chat template refuses them") as caught:
        template(source).render(MESSAGES)
    assert caught.value.param == "messages"
