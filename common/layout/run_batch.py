"""Many runs as one thing: patterns of copies that are worked out once, and placed for every layer at its own offsets.

The blocks of a request lie alike in the caches of all layers. So the copies of a chunk are normalised and measured once (a
`RunPattern`), and a layer's part is that pattern at two offsets (`Placed`). A batch of those is a `Sequence[Run]` like any other;
whoever knows more about it need not look at single runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, overload

import msgspec

from common.layout.run import Run
from contracts.errors import InvalidValueError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

Span = tuple[int, int]
"""First byte touched and the end of the last one, relative to the start of a region's data."""


class Scatter:
    """Pieces of one length at arbitrary places: the i-th from `local[i]` to `remote[i]`, in bytes.

    Offsets are not negative, and int64 columns of one size, at least 1. `row_bytes` is `length` where all offsets are multiples of
    it, and 1 otherwise; `local_rows` and `remote_rows` are the offsets in that unit. `local_step` and `remote_step` are the
    distance between pieces where it is the same for all, else None.
    """

    __slots__ = ("length", "local", "local_rows", "local_step", "remote", "remote_rows", "remote_step", "row_bytes")

    def __init__(self, length: int, local: Column, remote: Column) -> None:
        if length <= 0 or len(local) != len(remote) or not len(local) or min(local.min(), remote.min()) < 0:
            shown = f"{len(local)} and {len(remote)} pieces of {length} bytes"
            raise InvalidValueError(
                field="scatter", value=shown, rule="pieces of 1 byte or more at offsets of 0 or more"
            )
        self.length: Final = length
        self.local: Final = local
        self.remote: Final = remote
        aligned = not (local % length).any() and not (remote % length).any()
        self.row_bytes: Final = length if aligned else 1
        self.local_rows: Final[Any] = local // self.row_bytes
        self.remote_rows: Final[Any] = remote // self.row_bytes
        self.local_step: Final = _step(local)
        self.remote_step: Final = _step(remote)

    @property
    def nbytes(self) -> int:
        """Bytes that all pieces move."""
        return self.length * len(self.local)

    def runs(self) -> Iterator[Run]:
        """Each piece as a run."""
        for local, remote in zip(self.local.tolist(), self.remote.tolist(), strict=True):
            yield Run(local_offset=local, remote_offset=remote, length=self.length)


class RunPattern:
    """Copies at offsets that are still relative, with the exact span of bytes that they touch on each side.

    Every piece moves at least one byte. The columns of its scatters must not be changed any more.
    """

    __slots__ = ("local_span", "nbytes", "num_runs", "pieces", "remote_span")

    def __init__(self, pieces: Iterable[Run | Scatter]) -> None:
        self.pieces: Final = tuple(pieces)
        self.nbytes: Final = sum(piece.nbytes for piece in self.pieces)
        self.num_runs: Final = sum(1 if isinstance(piece, Run) else len(piece.local) for piece in self.pieces)
        for piece in self.pieces:
            if isinstance(piece, Run) and (piece.length <= 0 or piece.count <= 0):
                shown = (piece.length, piece.count)
                raise InvalidValueError(field="length and count", value=shown, rule="more than 0 in a pattern")
        self.local_span: Final = _span(_local_ends(piece) for piece in self.pieces)
        self.remote_span: Final = _span(_remote_ends(piece) for piece in self.pieces)

    def runs(self) -> Iterator[Run]:
        """All runs, still relative."""
        for piece in self.pieces:
            if isinstance(piece, Run):
                yield piece
            else:
                yield from piece.runs()


class Placed(msgspec.Struct, frozen=True):
    """A pattern at its place: the bases are added to every offset of its side."""

    pattern: RunPattern
    local_base: int = 0
    remote_base: int = 0

    def is_within(self, local_length: int, remote_length: int) -> bool:
        """Whether every byte of every run lies within data of these lengths."""
        pattern, local_base, remote_base = self.pattern, self.local_base, self.remote_base
        local_low, local_high = pattern.local_span
        remote_low, remote_high = pattern.remote_span
        return not pattern.nbytes or (
            -local_low <= local_base <= local_length - local_high
            and -remote_low <= remote_base <= remote_length - remote_high
        )

    def runs(self) -> Iterator[Run]:
        """All runs at their final offsets."""
        for run in self.pattern.runs():
            yield Run(
                local_offset=self.local_base + run.local_offset,
                remote_offset=self.remote_base + run.remote_offset,
                length=run.length,
                count=run.count,
                local_stride=run.local_stride,
                remote_stride=run.remote_stride,
            )


class RunBatch(Sequence[Run]):
    """Placed patterns, seen as the sequence of their runs. The order in which the bytes of one pattern move is free."""

    __slots__ = ("nbytes", "placed")

    def __init__(self, placed: Iterable[Placed]) -> None:
        self.placed: Final = tuple(placed)
        self.nbytes: Final = sum(each.pattern.nbytes for each in self.placed)

    def __len__(self) -> int:
        return sum(each.pattern.num_runs for each in self.placed)

    def __iter__(self) -> Iterator[Run]:
        for each in self.placed:
            yield from each.runs()

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Run]: ...
    def __getitem__(self, index: int | slice) -> Run | Sequence[Run]:
        return tuple(self)[index]


def _step(offsets: Column) -> int | None:
    steps = offsets[1:] - offsets[:-1]
    return int(steps[0]) if len(steps) and (steps == steps[0]).all() else None


def _local_ends(piece: Run | Scatter) -> Span:
    if isinstance(piece, Scatter):
        return int(piece.local.min()), int(piece.local.max()) + piece.length
    return _run_ends(piece.local_offset, piece.local_stride, piece)


def _remote_ends(piece: Run | Scatter) -> Span:
    if isinstance(piece, Scatter):
        return int(piece.remote.min()), int(piece.remote.max()) + piece.length
    return _run_ends(piece.remote_offset, piece.remote_stride, piece)


def _run_ends(offset: int, stride: int, run: Run) -> Span:
    last = offset + (run.count - 1) * stride
    return min(offset, last), max(offset, last) + run.length


def _span(ends: Iterable[Span]) -> Span:
    found = tuple(ends)
    return (min(low for low, _ in found), max(high for _, high in found)) if found else (0, 0)
