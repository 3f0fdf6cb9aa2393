"""The runs of a transfer as columns of pieces, in the order in which their bytes are on the wire."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.dataplane.shm_memory import RegionMemory
from common.dataplane.tcp_channel import SLICE_BYTES
from common.dataplane.tcp_pieces import MOST_FEW
from common.dataplane.tcp_vector import Vector
from common.dataplane.tcp_wire import MAX_SEGMENTS
from common.layout.joining import batch_of
from common.layout.run import Run
from common.layout.run_batch import RunBatch

if TYPE_CHECKING:
    from common.dataplane.tcp_pieces import Column, Numbers
    from common.layout.run_batch import Scatter


class Segments(NamedTuple):
    """Pieces of at least one byte: where each begins on either side, and its length (tuples of few, int64 columns of many)."""

    local: Numbers
    remote: Numbers
    length: Numbers

    def batches(self) -> Iterator[Segments]:
        """The same in batches of at most `MAX_SEGMENTS`."""
        for first in range(0, len(self.length), MAX_SEGMENTS):
            yield Segments(*(column[first : first + MAX_SEGMENTS] for column in self))

    @property
    def num_batches(self) -> int:
        """How many batches that makes."""
        return -(-len(self.length) // MAX_SEGMENTS)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(self.length) if isinstance(self.length, tuple) else int(self.length.sum())

    def remote_table(self) -> bytes:
        """The table of a batch: the pieces at the owner's side."""
        if isinstance(self.length, tuple):
            return array("Q", chain.from_iterable(zip(self.remote, self.length, strict=True))).tobytes()
        table = np.empty((len(self.length), 2), "<u8")
        table[:, 0] = self.remote
        table[:, 1] = self.length
        return table.tobytes()


def segments_of(runs: Sequence[Run]) -> Segments:
    """What `runs` copy, in the fewest pieces: what lies next to each other on both sides is one. Runs must have been checked."""
    few = _few_of(runs)
    if few is not None:
        return few
    batch = batch_of(runs)
    local: list[Column] = []
    remote: list[Column] = []
    length: list[Column] = []
    for placed in batch.placed:
        for piece in placed.pattern.pieces:
            if isinstance(piece, Run):
                steps = np.arange(piece.count, dtype=np.int64)
                local.append(placed.local_base + piece.local_offset + steps * piece.local_stride)
                remote.append(placed.remote_base + piece.remote_offset + steps * piece.remote_stride)
                length.append(np.full(piece.count, piece.length, np.int64))
            else:
                local.append(placed.local_base + piece.local)
                remote.append(placed.remote_base + piece.remote)
                length.append(np.full(len(piece.local), piece.length, np.int64))
    if not length:
        return Segments((), (), ())
    return _joined(np.concatenate(local), np.concatenate(remote), np.concatenate(length))


def vector_into(memory: RegionMemory, offsets: Numbers, lengths: Numbers, *, head: bytes = b"") -> Vector:
    """Pieces of a region's data for one transfer, with `head` before them. They must lie within the region."""
    return Vector(memory.address, offsets, lengths, memory, slice_bytes=SLICE_BYTES, head=head)


def _few_of(runs: Sequence[Run]) -> Segments | None:
    """The same, or None when there are more than `MOST_FEW` copies."""
    local: list[int] = []
    remote: list[int] = []
    lengths: list[int] = []
    num_copies = 0
    local_end = remote_end = -1
    for copies, local_base, remote_base in _placed(runs):
        for piece in copies:
            length = piece.length
            num_copies += piece.count if isinstance(piece, Run) else len(piece.local)
            if num_copies > MOST_FEW:
                return None
            for local_offset, remote_offset in _places(piece):
                here, there = local_base + local_offset, remote_base + remote_offset
                if here == local_end and there == remote_end:
                    lengths[-1] += length
                else:
                    local.append(here)
                    remote.append(there)
                    lengths.append(length)
                local_end, remote_end = here + length, there + length
    return Segments(tuple(local), tuple(remote), tuple(lengths))


def _places(piece: Run | Scatter) -> Iterable[tuple[int, int]]:
    """Where each copy of at least one byte begins on either side."""
    if not isinstance(piece, Run):
        return zip(piece.local.tolist(), piece.remote.tolist(), strict=True)
    if not piece.length:
        return ()
    if piece.count == 1:
        return ((piece.local_offset, piece.remote_offset),)
    return [
        (piece.local_offset + item * piece.local_stride, piece.remote_offset + item * piece.remote_stride)
        for item in range(piece.count)
    ]


def _placed(runs: Sequence[Run]) -> Iterable[tuple[Sequence[Run | Scatter], int, int]]:
    """Copies, and what is to be added to their offsets."""
    if isinstance(runs, RunBatch):
        return [(each.pattern.pieces, each.local_base, each.remote_base) for each in runs.placed]
    return ((runs, 0, 0),)


def _joined(local: Column, remote: Column, length: Column) -> Segments:
    touching = (local[1:] == local[:-1] + length[:-1]) & (remote[1:] == remote[:-1] + length[:-1])
    if not touching.any():
        return Segments(local, remote, length)
    starts = np.flatnonzero(np.concatenate(([True], ~touching)))
    return Segments(local[starts], remote[starts], np.add.reduceat(length, starts))
