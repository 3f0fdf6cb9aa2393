"""Long lists of runs, handled as columns of numbers: checked, joined and copied without a step of Python for each.

A list that holds a piece of every block of a request has thousands of runs, of a few KiB each. Looked at one by one they would
cost several times what their copying costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec

from common.layout.run import Run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

LARGEST_BUFFERED_BYTES: Final = 8192
"""Longer pieces are copied one by one: then the call costs little beside the copy, and a detour through a buffer costs more."""
SCATTER_BYTES: Final = 256 << 10
"""Most bytes of one scatter of more than one piece: what passes through a buffer stays in the core's cache."""
_FEWEST_REGULAR: Final = 8
_FIELDS: Final = Run.__struct_fields__


class Scatter(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces of one length at arbitrary places: the i-th from `local[i]` to `remote[i]`, in bytes of the regions' data."""

    length: int
    local: Any
    remote: Any

    @property
    def nbytes(self) -> int:
        """Bytes that all pieces move."""
        return self.length * len(self.local)


class Columns:
    """The runs of a list whose count is 1, as columns; the others are kept as they are."""

    def __init__(self, runs: Sequence[Run]) -> None:
        """Raises `OverflowError` when a number does not fit into 64 bits."""
        import numpy as np  # only a process that moves caches needs it

        numbers = chain.from_iterable(map(msgspec.structs.astuple, runs))
        table = np.fromiter(numbers, np.int64, len(runs) * len(_FIELDS)).reshape(len(runs), len(_FIELDS))
        single = table[:, _FIELDS.index("count")] == 1
        length, local, remote = (table[:, _FIELDS.index(name)] for name in ("length", "local_offset", "remote_offset"))
        self.others: Final = [runs[index] for index in np.flatnonzero(~single).tolist()]
        self.length: Column = length[single]
        self.local: Column = local[single]
        self.remote: Column = remote[single]

    def are_within(self, local_length: int, remote_length: int) -> bool:
        """Whether every run with count 1 lies within data of these lengths (empty ones lie anywhere)."""
        length, local, remote = self.length, self.local, self.remote
        inside = (local >= 0) & (remote >= 0) & (local <= local_length - length) & (remote <= remote_length - length)
        return bool((((length > 0) & inside) | (length == 0)).all())

    def pieces(self) -> Iterator[Run | Scatter]:
        """Copies that move the bytes of the runs with count 1: strided runs of any size, and scatters."""
        import numpy as np

        filled = self.length > 0
        length, local, remote = self.length[filled], self.local[filled], self.remote[filled]
        if not len(length):
            return
        touching = (np.diff(local) == length[:-1]) & (np.diff(remote) == length[:-1])
        starts = np.flatnonzero(np.concatenate(([True], ~touching)))
        length, local, remote = np.add.reduceat(length, starts), local[starts], remote[starts]
        left = np.ones(len(length), dtype=np.bool_)
        for first, end in _regular_stretches(length, local, remote):
            left[first:end] = False
            yield Run(
                local_offset=int(local[first]),
                remote_offset=int(remote[first]),
                length=int(length[first]),
                count=end - first,
                local_stride=int(local[first + 1] - local[first]),
                remote_stride=int(remote[first + 1] - remote[first]),
            )
        yield from _irregular(length[left], local[left], remote[left])


def _regular_stretches(length: Column, local: Column, remote: Column) -> list[tuple[int, int]]:
    """Stretches [first, end) of pieces of one length at one rising distance on each side, each worth a strided copy."""
    import numpy as np

    if len(length) < _FEWEST_REGULAR:
        return []
    local_step, remote_step = np.diff(local), np.diff(remote)
    usable = (np.diff(length) == 0) & (local_step > 0) & (remote_step > 0)
    goes_on = usable[1:] & usable[:-1] & (np.diff(local_step) == 0) & (np.diff(remote_step) == 0)
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


def _irregular(length: Column, local: Column, remote: Column) -> Iterator[Scatter]:
    import numpy as np

    for size in np.unique(length).tolist():
        same = length == size
        starts, ends = local[same], remote[same]
        step = max(1, SCATTER_BYTES // size)
        for place in range(0, len(starts), step):
            yield Scatter(length=size, local=starts[place : place + step], remote=ends[place : place + step])
