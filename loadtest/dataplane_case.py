"""What one measurement of the data plane moves: how many bytes, in how many pieces, and where they lie. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from common.layout.run import Run

KIB = 1 << 10
MIB = 1 << 20
_UNITS = (("MiB", MIB), ("KiB", KIB), ("B", 1))


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of transfer. `piece_bytes` 0 is one piece.

    Pieces are what a reshard from two ranks to one makes of a sequence: packed at the source, every second place at the
    destination. `shuffled` ones are in no order (blocks as a worn allocator hands them out), others follow each other.
    """

    nbytes: int
    piece_bytes: int = 0
    shuffled: bool = False

    @property
    def span(self) -> int:
        """Bytes of a region from the transfer's first to its last, on the side where they lie wider apart."""
        return 2 * self.nbytes if self.piece_bytes else self.nbytes

    @property
    def shape(self) -> str:
        """For people: how the bytes are cut."""
        if not self.piece_bytes:
            return "one piece"
        return f"{shown_bytes(self.piece_bytes)} {'shuffled' if self.shuffled else 'in order'}"

    def runs(self, position: int) -> list[Run]:
        """The copies, from `position` on at both sides."""
        piece = self.piece_bytes
        if not piece:
            return [Run(local_offset=position, remote_offset=position, length=self.nbytes)]
        count = self.nbytes // piece
        if not self.shuffled:
            strides = {"local_stride": piece, "remote_stride": 2 * piece}
            return [Run(local_offset=position, remote_offset=position, length=piece, count=count, **strides)]
        order = list(range(count))
        random.Random(piece).shuffle(order)
        return [
            Run(local_offset=position + piece * place, remote_offset=position + 2 * piece * target, length=piece)
            for place, target in enumerate(order)
        ]


class Positions:
    """Where transfers begin in a region: each goes on behind the one before, round and round, so that caches do not flatter."""

    def __init__(self, region_bytes: int) -> None:
        self._region_bytes = region_bytes
        self._next = 0

    def take(self, span: int) -> int:
        """The next place for `span` bytes, which the region must have."""
        if self._next + span > self._region_bytes:
            self._next = 0
        position = self._next
        self._next += span
        return position


def pieces_of(runs: list[Run], *, remote: bool) -> Iterator[tuple[int, int]]:
    """Offset and length of every piece at one side."""
    for run in runs:
        offset, stride = (run.remote_offset, run.remote_stride) if remote else (run.local_offset, run.local_stride)
        for item in range(run.count):
            yield offset + item * stride, run.length


def shown_bytes(nbytes: int) -> str:
    """A size in the largest unit that it is a multiple of."""
    for unit, size in _UNITS:
        if nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    raise ValueError(f"nbytes: {nbytes} is not allowed; the rule is: a whole number")


def read_bytes(text: str) -> int:
    """A size such as `64KiB`, `16 MiB` or `64`. Raises ValueError."""
    words = text.strip()
    for unit, size in _UNITS:
        if words.lower().endswith(unit.lower()):
            return int(words[: -len(unit)]) * size
    return int(words)
