"""Ranges of the numbers in messages. A decoder holds them; whoever builds a message is trusted to."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

MAX_WHOLE: Final = (1 << 63) - 1
MAX_MS: Final = 30 * 24 * 3600 * 1000

Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_WHOLE)]
"""A count, an id or a duration: never negative, and small enough for every format on the way (msgpack, a header's cell)."""

Milliseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_MS)]
"""How long something may take or stays remembered: at most 30 days, so that adding it to any clock makes a time."""
