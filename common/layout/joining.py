"""Lists of runs brought into the fewest copies: neighbours become strided runs, the rest scatters.

What costs is not the copying but the asking: a piece of 2 KiB takes 0.4 µs to copy and over 1 µs to ask for from Python. Long
lists are therefore handled as columns of numbers, without a step of Python for each run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec

from common.layout.run import Run
from common.layout.run_batch import Placed, RunBatch, RunPattern, Scatter

if TYPE_CHECKING:
    from common.layout.run_batch import Column

MANY_RUNS: Final = 16
"""From how many runs on a list is handled as columns."""
LARGEST_SCATTERED_BYTES: Final = 128 << 10
"""Longer pieces are runs of their own: a call for each costs little beside its copy."""
_FEWEST_REGULAR: Final = 8
"""Fewest pieces of a longer list that are worth a strided copy of their own."""
_FEWEST_SCATTERED: Final = 4
_FIELDS: Final = Run.__struct_fields__


def batch_of(runs: Sequence[Run]) -> RunBatch:
    """The same bytes as one batch, in the fewest copies. Offsets must not be negative: check the runs first."""
    return runs if isinstance(runs, RunBatch) else RunBatch((Placed(pattern_of(runs)),))


def pattern_of(runs: Sequence[Run]) -> RunPattern:
    """The same bytes as one pattern, in the fewest copies. Raises `OverflowError` for a number that does not fit into 64 bits."""
    if len(runs) < MANY_RUNS:
        return RunPattern(join_runs(runs))
    import numpy as np  # only a process that moves caches needs it

    numbers = chain.from_iterable(map(msgspec.structs.astuple, runs))
    table = np.fromiter(numbers, np.int64, len(runs) * len(_FIELDS)).reshape(len(runs), len(_FIELDS))
    single = table[:, _FIELDS.index("count")] == 1
    others = [runs[index] for index in np.flatnonzero(~single).tolist()]
    length, local, remote = (table[single, _FIELDS.index(name)] for name in ("length", "local_offset", "remote_offset"))
    return RunPattern((*join_runs(others), *join_columns(length, local, remote)))


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


def join_columns(length: Column, local: Column, remote: Column) -> Iterator[Run | Scatter]:
    """The same for pieces whose lengths and offsets are given as columns; their order is not kept."""
    import numpy as np

    filled = length > 0
    if not filled.all():
        length, local, remote = length[filled], local[filled], remote[filled]
    if not len(length):
        return
    touching = (np.diff(local) == length[:-1]) & (np.diff(remote) == length[:-1])
    if touching.any():
        starts = np.flatnonzero(np.concatenate(([True], ~touching)))
        length, local, remote = np.add.reduceat(length, starts), local[starts], remote[starts]
    stretches = _regular_stretches(length, local, remote)
    left = np.ones(len(length), dtype=np.bool_)
    for first, end in stretches:
        left[first:end] = False
        yield Run(
            local_offset=int(local[first]),
            remote_offset=int(remote[first]),
            length=int(length[first]),
            count=end - first,
            local_stride=int(local[first + 1] - local[first]),
            remote_stride=int(remote[first + 1] - remote[first]),
        )
    if stretches:
        length, local, remote = length[left], local[left], remote[left]
    yield from _irregular(length, local, remote)


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


def _regular_stretches(length: Column, local: Column, remote: Column) -> list[tuple[int, int]]:
    """Stretches [first, end) of pieces of one length at one rising distance on each side: the whole list, or long ones in it."""
    import numpy as np

    if len(length) < 2:
        return []
    local_step, remote_step = np.diff(local), np.diff(remote)
    usable = (np.diff(length) == 0) & (local_step > 0) & (remote_step > 0)
    goes_on = usable[1:] & usable[:-1] & (np.diff(local_step) == 0) & (np.diff(remote_step) == 0)
    if usable[0] and goes_on.all():
        return [(0, len(length))]
    # A stretch of steps begins where the step before is not the same one; `bounds` holds those beginnings and the end.
    bounds = np.concatenate(([0], np.flatnonzero(~goes_on) + 1, [len(usable)]))
    stretches: list[tuple[int, int]] = []
    next_free = 0
    for place in np.flatnonzero(np.diff(bounds) >= _FEWEST_REGULAR - 1).tolist():
        first, end = max(int(bounds[place]), next_free), int(bounds[place + 1]) + 1
        if usable[first] and end - first >= _FEWEST_REGULAR - 1:
            stretches.append((first, end))
            next_free = end
    return stretches


def _irregular(length: Column, local: Column, remote: Column) -> Iterator[Run | Scatter]:
    import numpy as np

    for size in np.unique(length).tolist():
        same = length == size
        scatter = Scatter(size, local[same], remote[same])
        if size > LARGEST_SCATTERED_BYTES or len(scatter.local) < _FEWEST_SCATTERED:
            yield from scatter.runs()
        else:
            yield scatter
