"""What a stranger may send instead of one kind of message, and what its reader is to make of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from common.schemas.json_schema import tag_of
from contracts.codec import MAX_MESSAGE_BYTES, SCHEMA_VERSION, Versioned, decode
from contracts.errors import CodecError
from tests.contract.golden_messages import FOLDER

MAX_SERVER_BYTES: Final = 1024 * 1024
_DEPTH: Final = 20_000
_HUGE: Final = "9" * 4000


@dataclass(frozen=True, slots=True)
class Payload:
    """Some bytes. `refusal` is the reader's error, None for what it has to take."""

    name: str
    data: bytes
    refusal: CodecError | None


def payloads(kind: type[Versioned], *, by_field: bool = True) -> list[Payload]:
    """Everything that is tried instead of a message of this kind; each of its fields is spoilt only `by_field`."""
    good: dict[str, Any] = json.loads((FOLDER / f"{tag_of(kind)}.json").read_bytes())
    fields = _fields(good) if by_field else ()
    found = (*_bytes(good), *_messages(good), *fields)
    return [Payload(name, data, _refusal(data, kind)) for name, data in found]


def _bytes(good: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    text = json.dumps(good).encode()
    yield "nothing", b""
    yield "binary", bytes(range(256))
    yield "utf16", json.dumps(good).encode("utf-16")
    yield "truncated", text[:-2]
    yield "two messages", text + text
    for scalar in ("null", "5", '"x"', "[]", "true", "NaN"):
        yield f"only {scalar}", scalar.encode()
    yield "deep list", b'{"x":' + b"[" * _DEPTH
    yield "deep object", b'{"x":' * _DEPTH
    yield "huge number", f'{{"x":{_HUGE},{json.dumps(good)[1:]}'.encode()
    yield "number without end", b'{"x":1' + b"0" * 100_000
    yield "lone surrogate", b'{"x":"\\ud800",' + text[1:]
    yield "largest", _padded(text, MAX_MESSAGE_BYTES)
    yield "too large", _padded(text, MAX_MESSAGE_BYTES + 1)
    yield "far too large", _padded(text, MAX_SERVER_BYTES - 1024)
    yield "key twice", b'{"type":5,' + text[1:]
    yield "tag twice", text[:-1] + b',"type":"no_such_tag"}'


def _messages(good: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    for name, changed in (
        ("unknown field", good | {"added_later": {"x": [1]}}),
        ("newer version", good | {"v": SCHEMA_VERSION + 1}),
        ("newer version and kind", {"type": "no_such_tag", "v": SCHEMA_VERSION + 1}),
        ("version of nobody", good | {"v": -1}),
        ("huge version", good | {"v": int(_HUGE)}),
        ("unknown tag", good | {"type": "no_such_tag"}),
        ("other tag", good | {"type": "token_frame" if good["type"] != "token_frame" else "ping"}),
        ("long tag", good | {"type": "x" * 200_000}),
        ("no fields", {"type": good["type"]}),
        ("no tag", {key: value for key, value in good.items() if key != "type"}),
    ):
        yield name, json.dumps(changed).encode()


def _fields(good: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    for field, value in good.items():
        if field in {"type", "v"}:
            continue
        yield f"no {field}", json.dumps({key: each for key, each in good.items() if key != field}).encode()
        for wrong in _wrong(value):
            yield f"{field}={str(wrong)[:20]}", json.dumps(good | {field: wrong}).encode()


def _wrong(value: Any) -> tuple[Any, ...]:
    match value:
        case bool():
            return (None, "true")
        case int():
            return (None, "1", -1, 1 << 63, 10**30, 1.5)
        case float():
            return (None, "1.0")
        case str():
            return (None, 7, "", "a.>", "*", "x" * 100, "y" * 200_000)
        case list():
            return (None, {}, [None], ["x"], list(range(20_000)))
        case _:
            return (None, [], {}, {"type": "no_such_tag"})


def _padded(text: bytes, size: int) -> bytes:
    head = b'{"padding":"'
    return head + b"x" * (size - len(head) - len(text) - 1) + b'",' + text[1:]


def _refusal(data: bytes, kind: type[Versioned]) -> CodecError | None:
    try:
        decode(data, kind)
    except CodecError as error:
        return error
    return None
