"""The one codec of the bus: typed JSON, readable with any NATS tool. Unknown fields are ignored, a newer schema is refused."""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeVar

import msgspec

from contracts.errors import CodecError
from contracts.numbers import MAX_WHOLE

SCHEMA_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 256 * 1024

T = TypeVar("T")

_AT: Final = re.compile(r" - at `\$\.?(?P<path>.+)`$", re.DOTALL)
_MISSING: Final = re.compile(r"missing required field `(?P<name>[^`]+)`")
_MAX_PATH_CHARS: Final = 120
_MAX_PROBLEM_CHARS: Final = 300

_encoder: Final = msgspec.json.Encoder(order="deterministic")
_decoders: Final[dict[object, msgspec.json.Decoder[object]]] = {}


class Versioned(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every message: `v` is the schema version of its writer."""

    v: Annotated[int, msgspec.Meta(ge=1, le=MAX_WHOLE)] = SCHEMA_VERSION


class _Other(msgspec.Struct, frozen=True, tag="(another message)"):
    """Never sent. A decoder of one tagged struct takes an object without a tag for it; a decoder of two does not."""


class _Version(msgspec.Struct, frozen=True):
    """What of a message can be read whatever its build: a newer one may have changed everything else."""

    v: Annotated[int, msgspec.Meta(le=MAX_WHOLE)] = SCHEMA_VERSION


def encode(message: msgspec.Struct) -> bytes:
    """One UTF-8 JSON object. Raises `CodecError` above `MAX_MESSAGE_BYTES`."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        name = type(message).__name__
        raise CodecError(f"{name} encodes to {len(data)} bytes; the rule is: at most {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Validate and decode `data` as `kind` (a struct, or a union of tagged structs).

    Raises `CodecError` that names what was expected, for bytes that are not JSON, of another type, oversized, nested too
    deeply, or written by a newer schema. Its `param` is the path of the field at fault, where there is one.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise CodecError(f"message of {len(data)} bytes; the rule is: at most {MAX_MESSAGE_BYTES}")
    try:
        message = _decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _check_version(_version_of(data))
        problem = str(error)
        text = f"not a valid {_name(kind)}: {_clipped(problem)}"
        raise CodecError(text, param=field_at_fault(problem)) from error
    if isinstance(message, _Other):
        raise CodecError(f"not a valid {_name(kind)}: it has the tag of no message", param="type")
    _check_version(getattr(message, "v", SCHEMA_VERSION))
    return message  # type: ignore[return-value]  # the decoder was made for `kind`


def field_at_fault(problem: str) -> str | None:
    """Return the path of the field that the text of a validation error names, `a.b[0].c`; None where it names none."""
    at = _AT.search(problem)
    path = at["path"] if at else ""
    if missing := _MISSING.search(problem):
        path = f"{path}.{missing['name']}" if path else missing["name"]
    return path[:_MAX_PATH_CHARS] or None


def _decoder(kind: object) -> msgspec.json.Decoder[object]:
    decoder = _decoders.get(kind)
    if decoder is None:
        wanted: object = kind
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag is not None:
            wanted = kind | _Other
        decoder = _decoders[kind] = msgspec.json.Decoder(wanted)
    return decoder


def _version_of(data: bytes | bytearray | memoryview) -> int:
    try:
        return msgspec.json.decode(data, type=_Version).v
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return SCHEMA_VERSION  # it says nothing that can be read: what is wrong with the rest is the better answer


def _check_version(version: int) -> None:
    if version > SCHEMA_VERSION:
        raise CodecError(f"v: schema version {version}; this build reads up to {SCHEMA_VERSION}", param="v")


def _name(kind: object) -> object:
    return getattr(kind, "__name__", kind)


def _clipped(problem: str) -> str:
    """Return the text without its middle where it is long: it may quote a value, and ends with the place of the fault."""
    half = _MAX_PROBLEM_CHARS // 2
    return problem if len(problem) <= _MAX_PROBLEM_CHARS else f"{problem[:half]} ... {problem[-half:]}"
