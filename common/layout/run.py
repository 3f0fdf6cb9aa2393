"""A strided batch of byte copies between two regions: what a bound copy plan is made of."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """`count` copies of `length` bytes, the i-th from `local_offset + i * local_stride` to `remote_offset + i * remote_stride`.

    Offsets and strides are bytes from the start of a region's data. "Local" is the side that acts (the writer of a push,
    the reader of a pull); "remote" is the peer's side.
    """

    local_offset: int
    remote_offset: int
    length: int
    count: int = 1
    local_stride: int = 0
    remote_stride: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the whole run moves."""
        return self.length * self.count


def as_reader(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same copies as the destination sees them, which reads: local and remote change places."""
    return tuple(
        Run(
            local_offset=run.remote_offset,
            remote_offset=run.local_offset,
            length=run.length,
            count=run.count,
            local_stride=run.remote_stride,
            remote_stride=run.local_stride,
        )
        for run in runs
    )
