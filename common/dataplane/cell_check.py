"""Whether the cells of a grant hold its generation: asked several times in each transfer, so prepared once a grant."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from common.dataplane.port import MAX_GENERATION
from common.dataplane.shm_memory import CELL_BYTES, PAGE_BYTES, RegionMemory

_FEW: Final = 8
_WORD: Final = np.dtype(np.uint64)


class CellCheck:
    """Some cells of one region's header, at least one, all of them within it. `cells` is the tuple that was given, itself.

    Blocks in order are a few stretches of cells, compared as bytes: a call that takes no more than the comparison, also when a large
    copy has just emptied the core's cache. Cells that lie anywhere are gathered.
    """

    def __init__(self, memory: RegionMemory, cells: tuple[int, ...]) -> None:
        self.cells: Final = tuple(cells)
        self._map: Final = memory.map
        stretches: list[tuple[int, int]] = []
        ordered = sorted(set(cells))
        start = before = ordered[0]
        for cell in ordered:
            if cell > before + 1:
                stretches.append((start, before + 1))
                start = cell
            before = cell
        stretches.append((start, before + 1))
        self._stretches: Final = [
            (PAGE_BYTES + CELL_BYTES * start, PAGE_BYTES + CELL_BYTES * end) for start, end in stretches
        ]
        self._index: Any = None
        self._column: Any = None
        if len(stretches) > _FEW:
            self._index = np.array(ordered, np.intp)
            self._column = np.ndarray((memory.num_cells,), _WORD, memory.map, PAGE_BYTES)
        self._expected: tuple[int | None, list[tuple[int, int, bytes]]] = (None, [])

    def all_hold(self, generation: int) -> bool:
        """Whether each of the cells holds `generation` now."""
        known, expected = self._expected
        if known != generation:
            if not 0 <= generation <= MAX_GENERATION:
                return False
            word = generation.to_bytes(CELL_BYTES, "little")
            expected = [(start, end, word * ((end - start) // CELL_BYTES)) for start, end in self._stretches]
            self._expected = (generation, expected)
        if self._column is not None:
            wrong = self._column[self._index] != np.uint64(generation)
            return not np.count_nonzero(wrong)
        header = self._map
        for start, end, wanted in expected:  # noqa: SIM110 - a generator takes longer than the comparisons
            if header[start:end] != wanted:
                return False
        return True
