"""The one codec of the bus: typed JSON, readable with any NATS tool. Unknown fields are ignored, a newer schema is refused."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from contracts.errors import CodecError

SCHEMA_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 256 * 1024

T = TypeVar("T")

_encoder: Final = msgspec.json.Encoder(order="deterministic")
_decoders: Final[dict[object, msgspec.json.Decoder[object]]] = {}


class Versioned(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every message: `v` is the schema version of its writer."""

    v: int = SCHEMA_VERSION


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
    deeply, or written by a newer schema.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise CodecError(f"message of {len(data)} bytes; the rule is: at most {MAX_MESSAGE_BYTES}")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        message = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"not a valid {getattr(kind, '__name__', kind)}: {error}") from error
    version = getattr(message, "v", SCHEMA_VERSION)
    if version > SCHEMA_VERSION:
        raise CodecError(f"schema version {version}; this build reads up to {SCHEMA_VERSION}")
    return message  # type: ignore[return-value]  # the decoder was made for `kind`
