"""Every setting of a service as people read about it, from the struct that declares it: nothing is written down twice."""

import ast
import inspect
import json
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from common.runtime.setting_values import bounds, choices, shown
from common.runtime.settings import ENVIRONMENT_PREFIX

_NAMES: Final[dict[type[msgspec.inspect.Type], str]] = {
    msgspec.inspect.IntType: "whole number",
    msgspec.inspect.FloatType: "number",
    msgspec.inspect.BoolType: "true or false",
    msgspec.inspect.StrType: "text",
}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting. `default` is as one would write it, None where a value is required; `text` is one line."""

    name: str
    kind: str
    default: str | None
    variable: str
    text: str


def settings_of(struct: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """The settings that a struct declares, in its order. The text of each is the docstring below its field."""
    texts = _texts(struct)
    return tuple(
        Setting(
            name=field.name,
            kind=_kind(field.type),
            default=None if field.required else _default(field.name, field.default),
            variable=f"{ENVIRONMENT_PREFIX}{field.name.upper()}",
            text=texts.get(field.name, ""),
        )
        for field in msgspec.structs.fields(struct)
    )


def _texts(struct: type[msgspec.Struct]) -> dict[str, str]:
    """What stands below each field. Python drops these texts, so they are read from the source."""
    (declared,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    body = declared.body if isinstance(declared, ast.ClassDef) else []
    texts: dict[str, str] = {}
    for field, below in pairwise(body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = text
    return texts


def _kind(annotation: Any) -> str:
    """The type with its bounds, in words."""
    allowed = choices(annotation)
    info = msgspec.inspect.type_info(annotation)
    if isinstance(info, msgspec.inspect.VarTupleType):
        return "several, with commas"
    if allowed:
        return " | ".join(allowed)
    if isinstance(info, msgspec.inspect.CustomType) and info.cls is Path:
        return "path"
    name = _NAMES.get(type(info))
    if name is None:
        raise TypeError(f"a setting of type {annotation} cannot be described")
    return f"{name} {bounds(annotation)}".rstrip()


def _default(name: str, value: Any) -> str:
    plain = msgspec.to_builtins(shown(name, value))
    if isinstance(plain, list | tuple):
        return ",".join(plain)
    return plain if isinstance(plain, str) else json.dumps(plain)
