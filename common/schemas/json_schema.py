"""JSON Schema (2020-12) of every message, made from the struct that decodes it. Pure."""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec

from contracts import rank
from contracts.codec import SCHEMA_VERSION, Versioned
from contracts.operations import bus_kinds

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_DEFINITIONS: Final = "#/$defs/"


def bus_schemas() -> dict[str, dict[str, Any]]:
    """The schema of every message and record of the bus, by tag."""
    return {tag_of(kind): schema_of(kind) for kind in bus_kinds()}


def rank_schemas() -> dict[str, dict[str, Any]]:
    """The schema of every message between a worker and its rank processes, by tag: msgpack there, in the terms of JSON here."""
    kinds = dict.fromkeys((*get_args(rank.RankCommand), *get_args(rank.RankMessage)))
    return {tag_of(kind): schema_of(kind) for kind in kinds}


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of one message: what it calls valid is what a decoder takes, the schema version of its writer included.

    Unknown fields are allowed, as a decoder ignores them. The types that it is made of are its own `$defs`.
    """
    (root,), definitions = msgspec.json.schema_components([kind], ref_template=f"{_DEFINITIONS}{{name}}")
    schema = _cleaned(definitions.pop(root["$ref"].removeprefix(_DEFINITIONS)))
    if issubclass(kind, Versioned):
        schema["properties"]["v"]["maximum"] = SCHEMA_VERSION
    if definitions:
        schema["$defs"] = {name: _cleaned(each) for name, each in sorted(definitions.items())}
    return {"$schema": DIALECT, **schema}


def tag_of(kind: type[msgspec.Struct]) -> str:
    """The name of a message on the wire."""
    return str(kind.__struct_config__.tag)


def _cleaned(value: Any) -> Any:
    """Leave out `discriminator`, which is OpenAPI's: in JSON Schema the tags of the alternatives say it already."""
    if isinstance(value, dict):
        return {key: _cleaned(each) for key, each in value.items() if key != "discriminator"}
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    return value
