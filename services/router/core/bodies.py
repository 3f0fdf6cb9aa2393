"""Request bodies: JSON to structs, with errors that name the field."""

import difflib
import re
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from contracts.errors import ErrorCode, PdmeshError

T = TypeVar("T")

_AT: Final = re.compile(r"^(?P<problem>.*) - at `\$\.?(?P<path>.*)`$", re.DOTALL)
_SAME_WORD: Final = 0.87
"""How alike a slip is to what was meant. Less would refuse fields of other servers, such as `max_new_tokens`, `top_a`, `repeat_penalty`."""
_MIN_NAME_CHARS: Final = 4
_MAX_NAME_CHARS: Final = 40
MAX_COMPARED_NAMES: Final = 32
"""Unknown fields of one body that are looked at: each takes about as long as reading a kilobyte, and a body holds hundreds of thousands."""
_MISSING: Final = re.compile(r"missing required field `(?P<name>[^`]+)`")


def decode_body(body: bytes | bytearray, kind: type[T]) -> T:
    """Return the body as `kind`. Raises `PdmeshError` (`invalid_request`) whose `param` is the path of the field.

    Fields that `kind` does not know are ignored, as clients expect, unless they are all but one that it knows: that is a slip of
    the pen, and would quietly do nothing. Slips are looked for among the first `MAX_COMPARED_NAMES` of them.
    """
    try:
        found = msgspec.json.decode(body, type=kind)
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        problem, path = str(error), ""
        if at := _AT.match(problem):
            problem, path = at["problem"], at["path"]
        if missing := _MISSING.search(problem):
            path = f"{path}.{missing['name']}" if path else missing["name"]
        where = f"{path}: " if path else "body: "
        raise _invalid(f"{where}{problem}", path or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(f"body: it is not valid JSON ({error})", None) from None
    except RecursionError:
        raise _invalid("body: it is nested too deeply", None) from None
    known = _names_of(kind)
    for name in islice((name for name in given if name not in known), MAX_COMPARED_NAMES):
        meant = _meant(name, known)
        if meant is not None:
            raise _invalid(f"{name}: there is no such field; did you mean {meant}?", name)
    return found


def _names_of(kind: type[Any]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


def _meant(name: str, known: frozenset[str]) -> str | None:
    """The field that a misspelt name stands for; None for a name that looks like none."""
    if not _MIN_NAME_CHARS <= len(name) <= _MAX_NAME_CHARS:
        return None
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_SAME_WORD)
    return close[0] if close else None


def _invalid(message: str, param: str | None) -> PdmeshError:
    return PdmeshError(message, code=ErrorCode.INVALID_REQUEST, param=param)
