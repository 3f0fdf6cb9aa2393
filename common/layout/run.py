"""A strided batch of byte copies between two regions: what a bound copy plan is made of."""

from __future__ import annotations

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
