"""Copies between two places of one region's memory: out of a staging row into a slot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from common.layout.run import Run

_WORDS: Final = np.dtype(np.uint64)
_BYTES: Final = np.dtype(np.uint8)


def copy_within(data: memoryview, runs: Iterable[Run]) -> int:
    """Copy `runs` from local to remote offsets, both in `data`; return how many bytes. Source and target must not overlap.

    Rows are copied as words where their length allows it: numpy then lets go of the interpreter lock for long ones.
    """
    nbytes = 0
    for run in runs:
        target = _rows(data, run.remote_offset, run.remote_stride, run)
        np.copyto(target, _rows(data, run.local_offset, run.local_stride, run))
        nbytes += run.nbytes
    return nbytes


def fill_zeros(data: memoryview, runs: Iterable[Run]) -> None:
    """Zero the local side of `runs`."""
    for run in runs:
        _rows(data, run.local_offset, run.local_stride, run)[...] = 0


def _rows(data: memoryview, offset: int, stride: int, run: Run) -> Any:
    """`run.count` rows of `run.length` bytes. Raises `ValueError` or `TypeError` for rows beyond the data."""
    if run.length % _WORDS.itemsize:
        return np.ndarray((run.count, run.length), _BYTES, data, offset, (stride, 1))
    return np.ndarray((run.count, run.length // _WORDS.itemsize), _WORDS, data, offset, (stride, _WORDS.itemsize))
