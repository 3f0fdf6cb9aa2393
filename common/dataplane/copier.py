"""Copies batches of runs between two mapped memories at the speed of memcpy.

What costs is not the copying but the calls: a piece of 2 KiB takes 0.4 µs to copy and over 1 µs to ask for from Python. So
pieces at a regular distance are handed over as one strided copy (numpy, one inner loop in C, without the interpreter lock);
runs that follow each other regularly are first joined into such a copy. What is left of a long list goes as scatters.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from common.dataplane.checks import check_runs
from common.dataplane.scatter import LARGEST_BUFFERED_BYTES, Columns, Scatter
from common.layout.run import Run

if TYPE_CHECKING:
    import mmap

CHUNK_BYTES: Final = 16 << 20
"""Most bytes copied between two looks at the deadline and the grant."""
MANY_RUNS: Final = 64
"""From how many runs on a list is handled as columns."""
_FEW: Final = 4


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One memory of a copy: its mapping, the address and offset of its data, and the length of it."""

    map: mmap.mmap
    address: int
    base: int
    length: int


def join_runs(runs: Sequence[Run]) -> Iterator[Run]:
    """The same copies in fewer runs: neighbours of one length at one distance become one strided run, adjacent pieces one piece."""
    pending: Run | None = None
    for run in runs:
        if run.nbytes == 0:
            continue
        run = _flat(run)  # noqa: PLW2901 - the same run, said more simply
        if pending is None:
            pending = run
        elif (joined := _joined(pending, run)) is not None:
            pending = joined
        else:
            yield _flat(pending)
            pending = run
    if pending is not None:
        yield _flat(pending)


def _flat(run: Run) -> Run:
    """A run whose pieces touch on both sides is one piece."""
    if run.count > 1 and run.local_stride == run.remote_stride == run.length:
        return Run(local_offset=run.local_offset, remote_offset=run.remote_offset, length=run.nbytes)
    return run


def _joined(run: Run, after: Run) -> Run | None:
    if after.count != 1:
        return None
    if run.count == 1:
        local_stride, remote_stride = after.local_offset - run.local_offset, after.remote_offset - run.remote_offset
        if local_stride == remote_stride == run.length:
            return Run(local_offset=run.local_offset, remote_offset=run.remote_offset, length=run.length + after.length)
        regular = after.length == run.length and local_stride > 0 and remote_stride > 0
    else:
        local_stride, remote_stride = run.local_stride, run.remote_stride
        regular = (
            after.length == run.length
            and after.local_offset == run.local_offset + run.count * local_stride
            and after.remote_offset == run.remote_offset + run.count * remote_stride
        )
    if not regular:
        return None
    return Run(
        local_offset=run.local_offset,
        remote_offset=run.remote_offset,
        length=run.length,
        count=run.count + 1,
        local_stride=local_stride,
        remote_stride=remote_stride,
    )


def pieces(runs: Sequence[Run]) -> Iterator[Run]:
    """The joined runs, cut so that none moves more than `CHUNK_BYTES`."""
    for run in join_runs(runs):
        yield from _cut(run)


def _cut(run: Run) -> Iterator[Run]:
    if run.nbytes <= CHUNK_BYTES:
        yield run
    elif run.length > CHUNK_BYTES:
        for item in range(run.count):
            local = run.local_offset + item * run.local_stride
            remote = run.remote_offset + item * run.remote_stride
            for start in range(0, run.length, CHUNK_BYTES):
                length = min(CHUNK_BYTES, run.length - start)
                yield Run(local_offset=local + start, remote_offset=remote + start, length=length)
    else:
        per_chunk = CHUNK_BYTES // run.length
        for item in range(0, run.count, per_chunk):
            yield msgspec.structs.replace(
                run,
                local_offset=run.local_offset + item * run.local_stride,
                remote_offset=run.remote_offset + item * run.remote_stride,
                count=min(per_chunk, run.count - item),
            )


class Batch:
    """The runs of one transfer: checked first, then copied piece by piece."""

    def __init__(self, runs: Sequence[Run]) -> None:
        """Long lists are turned into columns once, for both uses."""
        self._runs = runs
        self._columns: Columns | None = None
        if len(runs) >= MANY_RUNS:
            with contextlib.suppress(OverflowError):  # such a run is out of any bounds, and is refused by name
                self._columns = Columns(runs)

    def refusal(self, local_length: int, remote_length: int) -> str:
        """Why the runs may not be copied between data of these lengths; "" when they may."""
        columns = self._columns
        if columns is not None and columns.are_within(local_length, remote_length):
            others = check_runs(columns.others, local_length, remote_length)
            if not others:
                return ""
        return check_runs(self._runs, local_length, remote_length)

    def pieces(self) -> Iterator[Run | Scatter]:
        """Copies that together move the bytes of the runs, each of bounded size; their order is free."""
        if self._columns is None:
            yield from pieces(self._runs)
            return
        yield from pieces(self._columns.others)
        for piece in self._columns.pieces():
            if isinstance(piece, Scatter):
                yield piece
            else:
                yield from _cut(piece)


def copy_piece(piece: Run | Scatter, local: Side, remote: Side, *, to_remote: bool) -> None:
    """Copy one piece, which lies within both sides. The interpreter lock is free meanwhile."""
    if isinstance(piece, Run):
        copy_run(piece, local, remote, to_remote=to_remote)
    elif to_remote:
        _scatter(piece.length, local, piece.local, remote, piece.remote)
    else:
        _scatter(piece.length, remote, piece.remote, local, piece.local)


def _scatter(length: int, source: Side, starts: Any, target: Side, ends: Any) -> None:
    import numpy as np

    if length > LARGEST_BUFFERED_BYTES:
        for end, start in zip((ends + target.address).tolist(), (starts + source.address).tolist(), strict=True):
            ctypes.memmove(end, start, length)
        return
    # Item i of such a window is the `length` bytes from byte i on: items overlap, and an item's number is its offset.
    item = np.dtype((np.void, length))
    read = np.ndarray((source.length - length + 1,), item, source.map, source.base, (1,))
    written = np.ndarray((target.length - length + 1,), item, target.map, target.base, (1,))
    written[ends] = read[starts]


def copy_run(run: Run, local: Side, remote: Side, *, to_remote: bool) -> None:
    """Copy one run, which lies within both sides."""
    if to_remote:
        _copy(run, local, run.local_offset, run.local_stride, remote, run.remote_offset, run.remote_stride)
    else:
        _copy(run, remote, run.remote_offset, run.remote_stride, local, run.local_offset, run.local_stride)


def _copy(run: Run, source: Side, start: int, stride: int, target: Side, target_start: int, target_stride: int) -> None:  # noqa: PLR0917 - two ends of three each
    if run.count <= _FEW:
        for item in range(run.count):
            ctypes.memmove(
                target.address + target_start + item * target_stride, source.address + start + item * stride, run.length
            )
        return
    import numpy as np  # only a process that moves caches needs it

    # Items of raw bytes are copied by one memcpy each; rows of single bytes would be a third slower at 2 KiB.
    raw = np.dtype((np.void, run.length))
    wanted = np.ndarray((run.count,), raw, source.map, source.base + start, (stride,))
    np.copyto(np.ndarray((run.count,), raw, target.map, target.base + target_start, (target_stride,)), wanted)
