"""Request bodies: JSON to structs, with errors that name the field."""

import re
from typing import Final, TypeVar

import msgspec

from contracts.errors import ErrorCode, PdmeshError

T = TypeVar("T")

_AT: Final = re.compile(r"^(?P<problem>.*) - at `\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING: Final = re.compile(r"missing required field `(?P<name>[^`]+)`")


def decode_body(body: bytes | bytearray, kind: type[T]) -> T:
    """Return the body as `kind`. Raises `PdmeshError` (`invalid_request`) whose `param` is the path of the field."""
    try:
        return msgspec.json.decode(body, type=kind)
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


def _invalid(message: str, param: str | None) -> PdmeshError:
    return PdmeshError(message, code=ErrorCode.INVALID_REQUEST, param=param)
