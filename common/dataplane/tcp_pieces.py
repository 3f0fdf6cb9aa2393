"""Tables of addresses and lengths for the kernel, and how far a transfer has come in one: a short one in Python, a long one in numpy.

Setting numpy up costs tens of microseconds when the core's cache is cold, as it is after waiting for a peer: more than all else that
a small transfer does.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[Any]
    Numbers = tuple[int, ...] | Column

ROW_BYTES: Final = 16
"""A row of a table: the kernel's `struct iovec`."""
MOST_FEW: Final = 128
"""Up to here pieces are few: handled one by one they take less time than numpy (measured up to 128, at either end)."""


class Pieces(Protocol):
    """The rows that are left of a table, and all of its bytes."""

    nbytes: int
    address: int
    """Where the first row that is left lies. The table is kept alive by this object."""

    def num_next(self) -> int:
        """Rows that make up a slice, with the one that goes beyond it; all that are left if they are less."""
        ...

    def advance(self, count: int) -> None:
        """`count` bytes more have been moved, and some are left."""
        ...


class FewPieces:
    """See `Pieces`. A piece longer than a slice is cut beforehand."""

    def __init__(
        self, address: int, offsets: tuple[int, ...], lengths: tuple[int, ...], slice_bytes: int, head: array[int]
    ) -> None:
        rows = list(head.buffer_info()) if head else []
        self.nbytes = len(head) + sum(lengths)
        for offset, length in zip(offsets, lengths, strict=True):
            start, left = address + offset, length
            while left > slice_bytes:
                rows += start, slice_bytes
                start += slice_bytes
                left -= slice_bytes
            rows += start, left
        self._table: Final = array("Q", rows)
        self.address, self._num_left = self._table.buffer_info()
        self._num_left //= 2
        self._slice_bytes: Final = slice_bytes
        self._first = 0

    def num_next(self) -> int:
        """See `Pieces.num_next`."""
        left = self._slice_bytes
        if self.nbytes <= left:
            return self._num_left
        lengths = self._table[2 * self._first + 1 :: 2]
        for index, length in enumerate(lengths):
            left -= length
            if left < 0:
                return index + 1
        return len(lengths)

    def advance(self, count: int) -> None:
        """See `Pieces.advance`."""
        table, first = self._table, self._first
        while count >= table[2 * first + 1]:
            count -= table[2 * first + 1]
            first += 1
        table[2 * first] += count
        table[2 * first + 1] -= count
        self.address += (first - self._first) * ROW_BYTES
        self._num_left -= first - self._first
        self._first = first


class ManyPieces:
    """See `Pieces`. What only transfers of more than one call need is worked out when they turn out to be one."""

    def __init__(self, address: int, offsets: Column, lengths: Column, slice_bytes: int, head: array[int]) -> None:
        first = 1 if head else 0
        table: Column = np.empty((first + len(lengths), 2), np.uint64)
        if head:
            table[0] = head.buffer_info()
        np.add(offsets, address, out=table[first:, 0], casting="unsafe")
        table[first:, 1] = lengths
        self.nbytes = int(table[:, 1].sum())
        if self.nbytes > slice_bytes and int(table[:, 1].max()) > slice_bytes:
            table = _cut(table, slice_bytes)
        self._table: Final = table
        self.address: int = table.__array_interface__["data"][0]
        self._slice_bytes: Final = slice_bytes
        self._ends: Column | None = None
        self._first = 0
        self._done = 0

    def num_next(self) -> int:
        """See `Pieces.num_next`."""
        num_left = len(self._table) - self._first
        if self.nbytes - self._done > self._slice_bytes:
            end = int(self._cumulated.searchsorted(np.uint64(self._done + self._slice_bytes), "right"))
            num_left = min(num_left, end - self._first + 1)
        return num_left

    def advance(self, count: int) -> None:
        """See `Pieces.advance`."""
        self._done += count
        ends = self._cumulated
        first = int(ends.searchsorted(np.uint64(self._done), "right"))
        self.address += (first - self._first) * ROW_BYTES
        self._first = first
        left = int(ends[first]) - self._done
        row = self._table[first]
        row[0] += row[1] - np.uint64(left)
        row[1] = left

    @property
    def _cumulated(self) -> Column:
        """Where each piece ends among all bytes."""
        if self._ends is None:
            self._ends = np.cumsum(self._table[:, 1], dtype=np.uint64)
        return self._ends


def pieces_of(address: int, offsets: Numbers, lengths: Numbers, slice_bytes: int, head: array[int]) -> Pieces:
    """`head`, which the caller keeps alive, then pieces of the memory at `address`: tuples of few, or columns of many."""
    if isinstance(offsets, tuple) and isinstance(lengths, tuple):
        return FewPieces(address, offsets, lengths, slice_bytes, head)
    return ManyPieces(address, np.asarray(offsets), np.asarray(lengths), slice_bytes, head)


def _cut(table: Column, longest: int) -> Column:
    """The same memory in rows of at most `longest` bytes."""
    limit = np.uint64(longest)
    addresses, lengths = table[:, 0], table[:, 1]
    counts = (lengths + limit - np.uint64(1)) // limit
    repeats = np.maximum(counts, 1).astype(np.int64)
    whole = np.repeat(np.arange(len(lengths)), repeats)
    within = (np.arange(len(whole)) - np.repeat(np.cumsum(repeats) - repeats, repeats)).astype(np.uint64) * limit
    return np.stack((addresses[whole] + within, np.minimum(limit, lengths[whole] - within)), axis=1)
