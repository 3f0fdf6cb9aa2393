"""Copies batches of runs between two mapped memories at the speed of memcpy.

What costs is not the copying but the calls: a piece of 2 KiB takes 0.4 µs to copy and over 1 µs to ask for from Python. So
pieces at a regular distance are handed over as one strided copy (numpy, one inner loop in C, without the interpreter lock);
runs that follow each other regularly are first joined into such a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from common.layout.run import Run

if TYPE_CHECKING:
    import mmap

CHUNK_BYTES: Final = 4 << 20
"""Most bytes copied between two looks at the deadline and the grant."""
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


def copy_run(run: Run, local: Side, remote: Side, *, to_remote: bool) -> None:
    """Copy one run, which lies within both sides. The interpreter lock is free meanwhile."""
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

    shape = (run.count, run.length)
    wanted = np.ndarray(shape, np.uint8, source.map, source.base + start, (stride, 1))
    np.copyto(np.ndarray(shape, np.uint8, target.map, target.base + target_start, (target_stride, 1)), wanted)
