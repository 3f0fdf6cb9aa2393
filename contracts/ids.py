"""Identifiers that become NATS subject tokens, and the rules that they obey."""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeAlias

import msgspec

from contracts.errors import InvalidValueError

_PATTERN: Final = r"[a-z0-9][a-z0-9_-]{0,62}"
_TOKEN: Final = re.compile(_PATTERN)
ENTROPY_BYTES: Final = 10

# Written so that Python and ECMA 262, whose patterns JSON Schema has, read it alike: a final newline does not pass.
Token: TypeAlias = Annotated[str, msgspec.Meta(pattern=rf"^{_PATTERN}$(?!\n)")]
"""A field of a message that its readers put into subjects: a decoder refuses what `check_token` would."""


def check_token(field: str, value: str) -> str:
    """Return `value` when it may stand as one token of a subject; raise `InvalidValueError` that names `field` otherwise."""
    if not _TOKEN.fullmatch(value):
        rule = "1 to 63 characters of a-z, 0-9, '_' and '-', not starting with '_' or '-'"
        raise InvalidValueError(field=field, value=value, rule=rule)
    return value


def request_id(entropy: bytes) -> str:
    """A new request id from at least `ENTROPY_BYTES` random bytes. It is always ours: a client's id is only an attribute."""
    if len(entropy) < ENTROPY_BYTES:
        raise InvalidValueError(field="entropy", value=f"{len(entropy)} bytes", rule=f"at least {ENTROPY_BYTES} bytes")
    return f"r{entropy[:ENTROPY_BYTES].hex()}"


def handoff_id(request: str, attempt: int) -> str:
    """The id of one attempt to serve a request."""
    if attempt < 0:
        raise InvalidValueError(field="attempt", value=attempt, rule="0 or more")
    return f"{check_token('request_id', request)}-{attempt}"


def incarnation(entropy: bytes) -> str:
    """The id of one start of a worker."""
    return f"i{entropy[:6].hex()}"
