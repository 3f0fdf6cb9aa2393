"""The runs of a transfer as columns of pieces, in the order in which their bytes are on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from common.dataplane.shm_memory import RegionMemory
from common.dataplane.tcp_channel import SLICE_BYTES
from common.dataplane.tcp_vector import Vector
from common.dataplane.tcp_wire import MAX_SEGMENTS
from common.layout.joining import batch_of
from common.layout.run import Run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[Any]


class Segments(NamedTuple):
    """Pieces of at least one byte: where each begins on either side, and its length (int64 columns)."""

    local: Column
    remote: Column
    length: Column

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
        return int(self.length.sum())

    def remote_table(self) -> bytes:
        """The table of a batch: the pieces at the owner's side."""
        table = np.empty((len(self.length), 2), "<u8")
        table[:, 0] = self.remote
        table[:, 1] = self.length
        return table.tobytes()


def segments_of(runs: Sequence[Run]) -> Segments:
    """What `runs` copy, in the fewest pieces: what lies next to each other on both sides is one. Runs must have been checked."""
    batch = batch_of(runs)
    if len(batch) == 1:
        for run in batch:
            if run.count == 1:
                row = np.array((run.local_offset, run.remote_offset, run.length), np.int64)
                return Segments(row[:1], row[1:2], row[2:])
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
        empty = np.empty(0, np.int64)
        return Segments(empty, empty, empty)
    return _joined(np.concatenate(local), np.concatenate(remote), np.concatenate(length))


def vector_into(memory: RegionMemory, offsets: Column, lengths: Column, *, head: bytes = b"") -> Vector:
    """Pieces of a region's data for one transfer, with `head` before them. They must lie within the region."""
    return Vector(memory.address, offsets, lengths, memory, slice_bytes=SLICE_BYTES, head=head)


def _joined(local: Column, remote: Column, length: Column) -> Segments:
    touching = (local[1:] == local[:-1] + length[:-1]) & (remote[1:] == remote[:-1] + length[:-1])
    if not touching.any():
        return Segments(local, remote, length)
    starts = np.flatnonzero(np.concatenate(([True], ~touching)))
    return Segments(local[starts], remote[starts], np.add.reduceat(length, starts))
