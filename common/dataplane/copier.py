"""Copies the pieces of a batch between two mapped memories at the speed of memcpy.

A copy of many pieces is one call (numpy, one inner loop in C). Its items are rows of whole numbers, not raw bytes of one item
each: numpy keeps the interpreter lock for fewer than 500 items, whatever their size, and the computation would stand still.

All calls of a group are prepared before the first is made. A large copy leaves nothing of the interpreter in the core's cache;
looking at each piece after the copy of the one before would take three times as long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from common.dataplane.shm_memory import RegionMemory
from common.layout.run import Run
from common.layout.run_batch import RunBatch, Scatter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[Any]

CHUNK_BYTES: Final = 16 << 20
"""Most bytes copied between two looks at the deadline and the grant."""
BUFFER_BYTES: Final = 256 << 10
"""What a scatter passes through when its source is not regular: small enough for the core's cache."""
_SMALL_BYTES: Final = 16 << 10
"""Up to here a copy is hardly longer than letting go of the interpreter lock and taking it again."""
_FEW: Final = 4
"""Up to here small copies one by one cost less than having numpy set up one for all."""

_WORDS: Final = np.dtype(np.uint64)
_BYTES: Final = np.dtype(np.uint8)

PlacedPiece = tuple[Run | Scatter, int, int]
"""A piece with what is to be added to its local and its remote offsets."""
_Call = tuple[Callable[..., None], tuple[Any, ...]]


class _Buffer(threading.local):
    """Scratch memory of one thread: fresh memory of this size would be faulted in page by page each time."""

    def __init__(self) -> None:
        self.memory: Final = np.ones(BUFFER_BYTES, np.uint8)


_buffer: Final = _Buffer()


def groups_of(batch: RunBatch) -> Iterator[list[PlacedPiece]]:
    """The batch's pieces in groups that each move at most `CHUNK_BYTES`; longer pieces are cut."""
    group: list[PlacedPiece] = []
    nbytes = 0
    for placed in batch.placed:
        for whole in placed.pattern.pieces:
            for piece in (whole,) if whole.nbytes <= CHUNK_BYTES else _cut(whole):
                if nbytes + piece.nbytes > CHUNK_BYTES:
                    yield group
                    group, nbytes = [], 0
                group.append((piece, placed.local_base, placed.remote_base))
                nbytes += piece.nbytes
    if group:
        yield group


def copy_pieces(group: Iterable[PlacedPiece], here: RegionMemory, there: RegionMemory, *, to_remote: bool) -> int:
    """Copy pieces that lie within both memories, in any order; return how many bytes. Long copies free the interpreter lock."""
    nbytes = 0
    calls: list[_Call] = []
    for piece, local_base, remote_base in group:
        nbytes += piece.nbytes
        if isinstance(piece, Run):
            local = here, local_base + piece.local_offset, piece.local_stride
            remote = there, remote_base + piece.remote_offset, piece.remote_stride
            source, target = (local, remote) if to_remote else (remote, local)
            if piece.length <= _SMALL_BYTES and piece.count <= _FEW:
                _copy_small(piece.length, piece.count, source, target)
            else:
                calls.append((np.copyto, (_rows(piece, target), _rows(piece, source))))
        else:
            local_side = _table(piece, here, local_base), piece.local_rows
            remote_side = _table(piece, there, remote_base), piece.remote_rows
            if to_remote:
                first, step = int(piece.local[0]), piece.local_step
                source = here, local_base + first, step or 0
                read, written = local_side, remote_side
            else:
                first, step = int(piece.remote[0]), piece.remote_step
                source = there, remote_base + first, step or 0
                read, written = remote_side, local_side
            if step is None:
                calls.append((_scatter, (piece, *read, *written)))
            else:
                calls.append((_scatter_rows, (_rows_of(piece.length, len(piece.local), source), *written)))
    for call, arguments in calls:
        call(*arguments)
    return nbytes


_Place = tuple[RegionMemory, int, int]
"""A memory, an offset into its data, and the distance from piece to piece."""


def _cut(piece: Run | Scatter) -> Iterator[Run | Scatter]:
    if isinstance(piece, Scatter):
        step = max(1, CHUNK_BYTES // piece.length)
        for first in range(0, len(piece.local), step):
            yield Scatter(piece.length, piece.local[first : first + step], piece.remote[first : first + step])
    elif piece.length > CHUNK_BYTES:
        for item in range(piece.count):
            local = piece.local_offset + item * piece.local_stride
            remote = piece.remote_offset + item * piece.remote_stride
            for start in range(0, piece.length, CHUNK_BYTES):
                length = min(CHUNK_BYTES, piece.length - start)
                yield Run(local_offset=local + start, remote_offset=remote + start, length=length)
    else:
        per_chunk = CHUNK_BYTES // piece.length
        for item in range(0, piece.count, per_chunk):
            yield msgspec.structs.replace(
                piece,
                local_offset=piece.local_offset + item * piece.local_stride,
                remote_offset=piece.remote_offset + item * piece.remote_stride,
                count=min(per_chunk, piece.count - item),
            )


def _copy_small(length: int, count: int, source: _Place, target: _Place) -> None:
    memory, offset, stride = source
    read = memory.data
    memory, place, step = target
    written = memory.data
    for _ in range(count):
        written[place : place + length] = read[offset : offset + length]
        offset += stride
        place += step


def _rows(run: Run, place: _Place) -> Rows:
    return _rows_of(run.length, run.count, place)


def _rows_of(length: int, count: int, place: _Place) -> Rows:
    """`count` rows of `length` bytes at a place; they may overlap."""
    memory, offset, stride = place
    if length % 8:
        return np.ndarray((count, length), _BYTES, memory.map, memory.base + offset, (stride, 1))
    return np.ndarray((count, length // 8), _WORDS, memory.map, memory.base + offset, (stride, 8))


def _table(piece: Scatter, memory: RegionMemory, base: int) -> Rows:
    """Every row of the piece's length that begins a multiple of its `row_bytes` after `base`."""
    length, step = piece.length, piece.row_bytes
    return _rows_of(length, (memory.length - base - length) // step + 1, (memory, base, step))


def _scatter_rows(source: Rows, written: Rows, ends: Any) -> None:
    written[ends] = source


def _scatter(piece: Scatter, read: Rows, starts: Any, written: Rows, ends: Any) -> None:
    length = piece.length
    at_once = max(1, BUFFER_BYTES // length)
    buffered = piece.row_bytes == length
    for first in range(0, len(starts), at_once):
        wanted, places = starts[first : first + at_once], ends[first : first + at_once]
        if buffered:
            held = _buffer.memory[: len(wanted) * length].view(read.dtype).reshape(len(wanted), -1)
            # "clip" only because the default mode would go through a buffer of numpy's own: no row is out of range.
            read.take(wanted, 0, held, "clip")
            written[places] = held
        else:
            written[places] = read[wanted]
