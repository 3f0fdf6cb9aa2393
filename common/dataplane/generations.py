"""Generation cells: which there are, and what may be stored into them, whatever memory they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.dataplane.port import MAX_GENERATION
from contracts.errors import InvalidValueError


class Cells(Protocol):
    """The cells of one region, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, cell: int, /) -> int: ...

    def __setitem__(self, cell: int, value: int, /) -> None: ...


def check_cells(stored: Cells, cells: Sequence[int]) -> None:
    """Raise `InvalidValueError` unless there is every one of `cells`."""
    for cell in cells:
        if not 0 <= cell < len(stored):
            raise InvalidValueError(field="cells", value=cell, rule=f"0 to {len(stored) - 1}")


def raise_cells(stored: Cells, cells: Sequence[int], value: int) -> None:
    """Store `value` into `cells`. Raises `InvalidValueError`, before any is changed, when a cell holds a newer one.

    The caller keeps others from raising the same cells meanwhile.
    """
    check_cells(stored, cells)
    if not 0 < value <= MAX_GENERATION:
        raise InvalidValueError(field="value", value=value, rule=f"1 to {MAX_GENERATION}")
    for cell in cells:
        if stored[cell] > value:
            rule = f"generations only rise, and cell {cell} holds {stored[cell]}"
            raise InvalidValueError(field="value", value=value, rule=rule)
    for cell in cells:
        stored[cell] = value
