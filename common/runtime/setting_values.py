"""The value of one setting: read from text or JSON as its field's type, and shown again without secrets."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

_SECRET_SUFFIXES: Final = ("password", "token", "secret")
_BAD_CHOICE: Final = "Invalid enum value"
_TYPES: Final = {"bool": "0, 1, true or false", "int": "a whole number", "float": "a number", "str": "text"}
_WRONG_TYPE: Final = re.compile(r"Expected `(?P<kind>bool|int|float|str)`( [<>]=? [^,]+)?(, got `\w+`)?")


def read_text(text: str, kind: Any) -> Any:
    """Read text as `kind`: 0/1/true/false for a bool, JSON or a comma list for what holds several values.

    Raises `ValueError` whose text is the rule that is broken.
    """
    stripped = text.strip()
    try:
        return _convert(stripped, kind, strict=False)
    except msgspec.ValidationError as as_scalar:
        if stripped[:1] in ("[", "{"):
            try:
                value = json.loads(stripped)
            except ValueError as error:
                raise ValueError(f"not JSON: {error}") from error
            return _checked(value, kind, strict=False)
        try:
            return _convert([part.strip() for part in stripped.split(",") if part.strip()], kind, strict=False)
        except msgspec.ValidationError as as_list:
            told = as_list if str(as_list).startswith(_BAD_CHOICE) else as_scalar
            raise ValueError(_rule(told, kind)) from None


def read_json(value: Any, kind: Any) -> Any:
    """Take a value of a JSON document as `kind`. Raises `ValueError` whose text is the rule that is broken."""
    return _checked(value, kind, strict=True)


def choices(kind: Any) -> tuple[str, ...]:
    """The values that a setting of type `kind` may have, or each item of one; empty where they cannot be counted."""
    return tuple(str(value) for value in _choices(msgspec.inspect.type_info(kind)))


def bounds(kind: Any) -> str:
    """Within which numbers a setting of type `kind` must lie, in words; empty without bounds, and for what is no number."""
    info = msgspec.inspect.type_info(kind)
    if isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    if not isinstance(info, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        return ""
    if info.ge is not None and info.le is not None:
        return f"{info.ge} to {info.le}"
    limits = ((">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt))
    return " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)


def shown(key: str, value: Any) -> Any:
    """The value as people may see it: without secrets and passwords, a path as text."""
    if key.endswith(_SECRET_SUFFIXES) and value:
        return "***"
    if isinstance(value, str) and "://" in value and "@" in value:
        scheme, _, rest = value.partition("://")
        return f"{scheme}://***@{rest.rpartition('@')[2]}"
    return str(value) if isinstance(value, Path) else value


def _checked(value: Any, kind: Any, *, strict: bool) -> Any:
    try:
        return _convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(_rule(error, kind)) from None


def _convert(value: Any, kind: Any, *, strict: bool) -> Any:
    return msgspec.convert(value, kind, strict=strict, dec_hook=_decode_other)


def _rule(error: msgspec.ValidationError, kind: Any) -> str:
    """What is broken, in words; with all that is allowed, of which msgspec names one bound and no choices."""
    problem = str(error)
    allowed = choices(kind)
    if allowed and problem.startswith(_BAD_CHOICE):
        return f"one of {', '.join(allowed)}"
    plain = _WRONG_TYPE.fullmatch(problem)
    return problem if plain is None else f"{_TYPES[plain['kind']]} {bounds(kind)}".rstrip()


def _choices(kind: msgspec.inspect.Type) -> Iterator[Any]:
    match kind:
        case msgspec.inspect.EnumType(cls=enum):
            yield from (member.value for member in enum)
        case msgspec.inspect.LiteralType(values=values):
            yield from values
        case msgspec.inspect.Metadata(type=inner) | msgspec.inspect.VarTupleType(item_type=inner):
            yield from _choices(inner)
        case msgspec.inspect.UnionType(types=members):
            for member in members:
                yield from _choices(member)
        case _:
            return


def _decode_other(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    raise ValueError(f"expected a {kind.__name__}")
