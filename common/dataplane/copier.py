"""Copies the pieces of a batch between two mapped memories at the speed of memcpy.

A copy of many pieces is one call (numpy, one inner loop in C). Its items are rows of whole numbers, not raw bytes of one item
each: numpy keeps the interpreter lock for fewer than 500 items, whatever their size, and the computation would stand still.

All calls of a group are prepared before the first is made. A large copy leaves nothing of the interpreter in the core's cache;
looking at each piece after the copy of the one before would take twice as long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from common.dataplane.shm_memory import RegionMemory
from common.layout.run import Run
from common.layout.run_batch import Placed, RunBatch, RunPattern, Scatter

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

_Call = tuple[Callable[..., None], tuple[Any, ...]]


class _Buffer(threading.local):
    """Scratch memory of one thread: fresh memory of this size would be faulted in page by page each time."""

    def __init__(self) -> None:
        self.memory: Final = np.ones(BUFFER_BYTES, np.uint8)


_buffer: Final = _Buffer()


def groups_of(batch: RunBatch) -> Iterator[list[Placed]]:
    """The batch in groups that each move at most `CHUNK_BYTES`; what is longer is cut."""
    group: list[Placed] = []
    nbytes = 0
    for whole in batch.placed:
        for placed in (whole,) if whole.pattern.nbytes <= CHUNK_BYTES else _pieces_of(whole):
            size = placed.pattern.nbytes
            if not size:
                continue
            if nbytes + size > CHUNK_BYTES and group:
                yield group
                group, nbytes = [], 0
            group.append(placed)
            nbytes += size
    if group:
        yield group


def copy_group(group: Iterable[Placed], here: RegionMemory, there: RegionMemory, *, to_remote: bool) -> int:
    """Copy patterns that lie within both memories, in any order; return how many bytes. Long copies free the interpreter lock."""
    source, target = (here, there) if to_remote else (there, here)
    nbytes = 0
    calls: list[_Call] = []
    for placed in group:
        pattern, local_base, remote_base = placed.pattern, placed.local_base, placed.remote_base
        nbytes += pattern.nbytes
        for piece in pattern.pieces:
            if not isinstance(piece, Run):
                bases = (local_base, remote_base) if to_remote else (remote_base, local_base)
                calls.append(_scatter_call(piece, source, target, bases, to_remote=to_remote))
                continue
            length, count = piece.length, piece.count
            if to_remote:
                start, step = local_base + piece.local_offset, piece.local_stride
                end, end_step = remote_base + piece.remote_offset, piece.remote_stride
            else:
                start, step = remote_base + piece.remote_offset, piece.remote_stride
                end, end_step = local_base + piece.local_offset, piece.local_stride
            if length <= _SMALL_BYTES and count <= _FEW:
                for _ in range(count):
                    target.data[end : end + length] = source.data[start : start + length]
                    start += step
                    end += end_step
            else:
                rows = _rows(target, end, length, count, end_step), _rows(source, start, length, count, step)
                calls.append((np.copyto, rows))
    for call, arguments in calls:
        call(*arguments)
    return nbytes


def _pieces_of(placed: Placed) -> Iterator[Placed]:
    """The pieces of a pattern one by one, cut where they are too long."""
    for piece in placed.pattern.pieces:
        for part in (piece,) if piece.nbytes <= CHUNK_BYTES else _cut(piece):
            yield Placed(RunPattern((part,)), placed.local_base, placed.remote_base)


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


def _rows(memory: RegionMemory, offset: int, length: int, count: int, step: int) -> Rows:
    """`count` rows of `length` bytes of the data from `offset` on, `step` bytes apart; they may overlap."""
    if length % 8:
        return np.ndarray((count, length), _BYTES, memory.map, memory.base + offset, (step, 1))
    return np.ndarray((count, length // 8), _WORDS, memory.map, memory.base + offset, (step, 8))


def _table(piece: Scatter, memory: RegionMemory, base: int) -> Rows:
    """Every row of the piece's length that begins a multiple of its `row_bytes` after `base`."""
    length, step = piece.length, piece.row_bytes
    return _rows(memory, base, length, (memory.length - base - length) // step + 1, step)


def _scatter_call(
    piece: Scatter, source: RegionMemory, target: RegionMemory, bases: tuple[int, int], *, to_remote: bool
) -> _Call:
    """How to copy a scatter; `bases` are the source's and the target's. A source with regular rows needs no buffer."""
    if to_remote:
        offsets, starts, step, ends = piece.local, piece.local_rows, piece.local_step, piece.remote_rows
    else:
        offsets, starts, step, ends = piece.remote, piece.remote_rows, piece.remote_step, piece.local_rows
    written = _table(piece, target, bases[1])
    if step is not None:
        rows = _rows(source, bases[0] + int(offsets[0]), piece.length, len(offsets), step)
        return _scatter_rows, (rows, written, ends)
    return _scatter, (piece, _table(piece, source, bases[0]), starts, written, ends)


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
