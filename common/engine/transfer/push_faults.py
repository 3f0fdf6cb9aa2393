"""Planted faults in transfers: what a rank's failpoints do to the bytes that it sends or reads. Without any nothing here runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from common.dataplane.failpoints import Action, Failpoints, Part
from common.dataplane.port import DataPlane, Region
from common.layout.bind import TokenChunk
from common.layout.run import Run
from common.layout.run_batch import Placed
from contracts.manifest import PlannedPart

if TYPE_CHECKING:
    from common.engine.transfer.push_write import PushPart


class PushFaults:
    """The failpoints of one rank, true if any of them touches bytes. Several lanes of its pusher use it at once."""

    def __init__(self, failpoints: Failpoints, data_plane: DataPlane) -> None:
        self._points: Final = failpoints
        self._data_plane = data_plane
        self._zeros: list[Region] = []
        self._guard = threading.Lock()
        self._touches_bytes = any(point.action is not Action.LINK for point in failpoints.points)

    def __bool__(self) -> bool:
        return self._touches_bytes

    def delay_s(self, part: PlannedPart) -> float:
        """How late the part leaves."""
        return self._points.delay_ms(_part_of(part)) / 1000

    def is_dropped(self, part: PlannedPart) -> bool:
        """Whether the part is neither sent nor reported."""
        return self._points.is_dropped(_part_of(part))

    def is_failed(self, part: PlannedPart) -> bool:
        """Whether a transfer with the part fails."""
        return self._points.is_failed(_part_of(part))

    def is_state_zeroed(self, part: PlannedPart) -> bool:
        """Whether the part, a state, arrives as zeros."""
        return self._is_zeroed(part, None)

    def writes(self, part: PushPart, dst_slot: int) -> tuple[list[Placed], list[Placed]]:
        """The copies of a part block by block, misplaced as planted: those that are sound, and those that arrive as zeros."""
        planned, chunk = part.copies.part, part.chunk
        sound: list[Placed] = []
        zeroed: list[Placed] = []
        if chunk is None:
            (zeroed if self._is_zeroed(planned, None) else sound).extend(part.place(dst_slot))
            return sound, zeroed
        size = chunk.block_size
        sources = self._source_ids(planned, chunk.src_block_ids)
        for block in range(chunk.start // size, -(-chunk.end // size)):
            start, end = max(chunk.start, block * size), min(chunk.end, (block + 1) * size)
            alone = TokenChunk(sources, chunk.dst_block_ids, start, end, size)
            found = [placed for placed in part.copies.place_tokens(alone) if placed.pattern.nbytes]
            (zeroed if self._is_zeroed(planned, block) else sound).extend(found)
        return sound, zeroed

    def from_zeros(self, runs: Sequence[Run]) -> tuple[tuple[Run, ...], Region]:
        """The same destinations with zeros as their source, and the region that the zeros are in."""
        needed = max(run.length for run in runs)
        with self._guard:
            if not self._zeros or self._zeros[-1].descriptor.length < needed:
                self._zeros.append(
                    self._data_plane.allocate(needed, 1)
                )  # another lane may still send from the last one
            zeros = self._zeros[-1]
        return tuple(msgspec.structs.replace(run, local_offset=0, local_stride=0) for run in runs), zeros

    def _is_zeroed(self, part: PlannedPart, block: int | None) -> bool:
        """Whether the request's block (None: a state) arrives as zeros."""
        return self._points.is_zeroed(_part_of(part), block)

    def _source_ids(self, part: PlannedPart, block_ids: Sequence[int]) -> Sequence[int]:
        """The source's blocks with swapped ones in each other's place; a swap with a block that is not there does nothing."""
        named = _part_of(part)
        sources = [self._points.source_block(named, block) for block in range(len(block_ids))]
        return [block_ids[source if source < len(block_ids) else block] for block, source in enumerate(sources)]


def _part_of(part: PlannedPart) -> Part:
    return Part(
        namespace=part.namespace,
        role=part.role,
        layer=part.layer,
        source=part.src_rank,
        destination=part.dst_rank,
    )
