"""Copies that are known once two workers are linked, before any request: a plan is made of these, and `bind` fills in the ids.

All offsets, strides and sizes are bytes in the regions of the source and the destination rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from contracts.manifest import PlannedPart, Segment


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A logical interval that a template moves, in the units of the manifest (heads, or channels of one segment)."""

    segment: Segment = Segment.WHOLE
    start: int
    length: int


class PagedTemplate(msgspec.Struct, frozen=True, kw_only=True, tag="paged"):
    """Moves `piece.length` neighbouring KV heads of one layer's KEY or VALUE cache, for any tokens of any sequence.

    The heads are contiguous inside a block on both sides; in a partly filled block only the filled tokens of each move.
    """

    part: PlannedPart
    piece: Piece
    src_offset: int
    dst_offset: int
    src_block_stride: int
    dst_block_stride: int
    src_num_blocks: int
    dst_num_blocks: int
    head_bytes: int
    token_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes that move for one full block."""
        return self.piece.length * self.head_bytes


class SlotTemplate(msgspec.Struct, frozen=True, kw_only=True, tag="slot"):
    """Moves `moved_rows` rows of `row_bytes` bytes of one layer's CONV, SSM or BOOTSTRAP cache, from any slot to any slot.

    A slot may have more rows on one side than on the other: how many depends on how many tokens a worker guesses.
    """

    part: PlannedPart
    pieces: tuple[Piece, ...]
    src_offset: int
    dst_offset: int
    src_slot_stride: int
    dst_slot_stride: int
    src_num_slots: int
    dst_num_slots: int
    src_row_stride: int
    dst_row_stride: int
    src_num_rows: int
    dst_num_rows: int
    moved_rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that move for one sequence."""
        return self.moved_rows * self.row_bytes


CopyTemplate = PagedTemplate | SlotTemplate


def coalesce(templates: Iterable[CopyTemplate]) -> tuple[CopyTemplate, ...]:
    """Join neighbours of the same part whose bytes are contiguous on both sides; the order of what remains is kept."""
    joined: list[CopyTemplate] = []
    for template in templates:
        merged = _join(joined[-1], template) if joined and joined[-1].part == template.part else None
        if merged is None:
            joined.append(template)
        else:
            joined[-1] = merged
    return tuple(joined)


def _join(left: CopyTemplate, right: CopyTemplate) -> CopyTemplate | None:
    if isinstance(left, PagedTemplate) and isinstance(right, PagedTemplate):
        if not _adjacent(left, right, left.block_bytes):
            return None
        length = left.piece.length + right.piece.length
        return msgspec.structs.replace(left, piece=Piece(start=left.piece.start, length=length))
    if isinstance(left, SlotTemplate) and isinstance(right, SlotTemplate) and _adjacent(left, right, left.row_bytes):
        pieces = left.pieces + right.pieces
        return msgspec.structs.replace(left, pieces=pieces, row_bytes=left.row_bytes + right.row_bytes)
    return None


def _adjacent(left: CopyTemplate, right: CopyTemplate, nbytes: int) -> bool:
    return left.src_offset + nbytes == right.src_offset and left.dst_offset + nbytes == right.dst_offset
