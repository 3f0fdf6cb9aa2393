"""Ranges of the numbers in messages. A decoder holds them; whoever builds a message is trusted to."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

MAX_WHOLE: Final = (1 << 63) - 1

Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_WHOLE)]
"""A count, an id or a duration: never negative, and small enough for every format on the way (msgpack, a header's cell)."""
