"""One part of a plan, ready to be placed for any request: what a rank sends for a role of a layer to one destination rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from common.layout.bind import Geometry, TokenChunk
from common.layout.context_parallel import held_range
from common.layout.joining import pattern_of
from common.layout.run_batch import Placed, RunPattern
from common.layout.slot_rows import slot_bases, slot_rows
from common.layout.templates import CopyTemplate, PagedTemplate, SlotTemplate
from contracts.manifest import PlannedPart


class PartCopies:
    """The copies of one part. States are worked out here, once a link; tokens once a chunk, by the chunk."""

    def __init__(self, part: PlannedPart, templates: Sequence[CopyTemplate]) -> None:
        self.part: Final = part
        paged = [each for each in templates if isinstance(each, PagedTemplate)]
        slots = [each for each in templates if isinstance(each, SlotTemplate)]
        self.is_state: Final = bool(slots)
        self.token_bytes: Final = sum(each.piece.length * each.token_bytes for each in paged)
        self._places: Final = [(Geometry.of(each), each.src_offset, each.dst_offset) for each in paged]
        self.state_bytes: Final = sum(each.nbytes for each in slots)
        by_stride: dict[tuple[int, ...], list[SlotTemplate]] = {}
        for each in slots:
            strides = each.src_slot_stride, each.dst_slot_stride, each.src_row_stride, each.dst_row_stride
            counts = each.src_num_slots, each.dst_num_slots, each.src_num_rows, each.dst_num_rows, each.moved_rows
            by_stride.setdefault((*strides, *counts), []).append(each)
        self._states: Final[list[tuple[RunPattern, SlotTemplate]]] = [
            (pattern_of([slot_rows(each) for each in group]), group[0]) for group in by_stride.values()
        ]

    def place_tokens(self, chunk: TokenChunk) -> list[Placed]:
        """The copies of KEY or VALUE of a chunk. Raises `InvalidValueError` as `TokenChunk.pattern` does."""
        return [Placed(chunk.pattern(geometry), src, dst) for geometry, src, dst in self._places]

    def place_state(self, src_slot: int, dst_slot: int, *, src_row: int = 0, dst_row: int = 0) -> list[Placed]:
        """The copies of CONV, SSM or BOOTSTRAP between two slots, from row to row. Raises `InvalidValueError` as `slot_bases` does."""
        return [
            Placed(pattern, *slot_bases(each, src_slot, dst_slot, src_row=src_row, dst_row=dst_row))
            for pattern, each in self._states
        ]

    def token_ranges(self, chunk: TokenChunk) -> tuple[tuple[int, int], ...]:
        """The chunk's tokens that go to this destination rank, as ranges of the positions at which it keeps them: see `held_range`."""
        return held_range(chunk.start, chunk.end, chunk.block_size, self.part.modulus, self.part.residue)
