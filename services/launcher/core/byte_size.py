"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re
from typing import Final

from contracts.errors import InvalidValueError

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP: Final = 1024
_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")


def read_size(field: str, text: str) -> int:
    """The bytes that `64GiB`, `1.5 TiB` or `4096` says. Raises `InvalidValueError` that names `field`."""
    found = _PATTERN.fullmatch(text.strip())
    units = {unit.lower(): _STEP**power for power, unit in enumerate(_UNITS)} | {"": 1}
    factor = units.get(found.group(2).lower()) if found else None
    if found is None or factor is None or not float(found.group(1)):
        raise InvalidValueError(field=field, value=text, rule=f"a number above 0 and a unit of {', '.join(_UNITS)}")
    return int(float(found.group(1)) * factor)


def shown_size(num_bytes: int) -> str:
    """A size with one place, in the largest unit that leaves a number of 1 or more."""
    power = 0
    while power < len(_UNITS) - 1 and num_bytes >= _STEP ** (power + 1):
        power += 1
    return f"{num_bytes / _STEP**power:,.1f} {_UNITS[power]}" if power else f"{num_bytes} B"
