"""From a template and a request's block ids to copies of bytes. This is on the hot path of a handoff.

Block ids are listed as `extents` says. "Local" in the runs is the source; a reader turns them round with `as_reader`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from common.layout.context_parallel import owned_blocks
from common.layout.extents import extents
from common.layout.joining import join_columns, join_runs
from common.layout.run import Run
from common.layout.run_batch import Placed, RunBatch, RunPattern, Scatter
from common.layout.templates import PagedTemplate
from contracts.errors import InvalidValueError


class Geometry(NamedTuple):
    """What the copies of a chunk depend on, but for a layer's offsets."""

    modulus: int
    residue: int
    num_heads: int
    head_bytes: int
    token_bytes: int
    src_block_stride: int
    dst_block_stride: int
    src_num_blocks: int
    dst_num_blocks: int

    @classmethod
    def of(cls, template: PagedTemplate) -> Geometry:
        """That of one template."""
        return cls(
            template.part.modulus,
            template.part.residue,
            template.piece.length,
            template.head_bytes,
            template.token_bytes,
            template.src_block_stride,
            template.dst_block_stride,
            template.src_num_blocks,
            template.dst_num_blocks,
        )


class TokenChunk:
    """Tokens `[start, end)` of one sequence, on their way from blocks to blocks: bound once, then placed for every layer and role.

    Not for several threads at once. The ids must not change.
    """

    def __init__(
        self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], start: int, end: int, block_size: int
    ) -> None:
        self.src_block_ids: Final = src_block_ids
        self.dst_block_ids: Final = dst_block_ids
        self.start: Final = start
        self.end: Final = end
        self.block_size: Final = block_size
        self._patterns: dict[Geometry, RunPattern] = {}
        self._cells: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def pattern(self, geometry: Geometry) -> RunPattern:
        """What templates of this geometry move for these tokens; a template's offsets are its bases.

        Raises `InvalidValueError` for ids that are missing or not the rank's (they would address another layer's cache), and for a
        block size that is not the templates'.
        """
        pattern = self._patterns.get(geometry)
        if pattern is None:
            pattern = self._patterns[geometry] = self._bind(geometry)
        return pattern

    def cells(self, modulus: int, residue: int, slot_cell: int) -> tuple[int, ...]:
        """The generation cells of the destination that these tokens touch: `slot_cell`, then a cell for each of their blocks.

        The same tuple again for the same arguments.
        """
        key = modulus, residue, slot_cell
        found = self._cells.get(key)
        if found is None:
            blocks = owned_blocks(self.start, self.end, self.block_size, modulus, residue)
            found = self._cells[key] = (slot_cell, *(self.dst_block_ids[block // modulus] for block in blocks))
        return found

    def _bind(self, geometry: Geometry) -> RunPattern:
        head_bytes, token_bytes = geometry.head_bytes, geometry.token_bytes
        if self.block_size * token_bytes != head_bytes:
            rule = f"{head_bytes // token_bytes}, the block size of the plan"
            raise InvalidValueError(field="block_size", value=self.block_size, rule=rule)
        where = extents(
            self.src_block_ids,
            self.dst_block_ids,
            self.start,
            self.end,
            self.block_size,
            modulus=geometry.modulus,
            residue=geometry.residue,
        )
        for field, blocks, partial, count in (
            ("src_block_ids", where.src_blocks, [part.src_block for part in where.parts], geometry.src_num_blocks),
            ("dst_block_ids", where.dst_blocks, [part.dst_block for part in where.parts], geometry.dst_num_blocks),
        ):
            ends = (min(blocks), max(blocks)) if blocks else ()
            for block in (*partial, *ends):
                _check_id(field, block, count)
        pieces: list[Run | Scatter] = [
            _heads_of(geometry, part.src_block, part.dst_block, part.first * token_bytes, part.num_tokens * token_bytes)
            for part in where.parts
        ]
        if where.src_blocks:
            pieces += _full_blocks(geometry, where.src_blocks, where.dst_blocks)
        return RunPattern(pieces)


def bind_tokens(  # noqa: PLR0917 - see TokenChunk
    template: PagedTemplate,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    start: int,
    end: int,
    block_size: int,
) -> RunBatch:
    """The runs that move tokens `[start, end)` of one sequence, for one template alone. Raises as `TokenChunk.pattern` does."""
    pattern = TokenChunk(src_block_ids, dst_block_ids, start, end, block_size).pattern(Geometry.of(template))
    return RunBatch((Placed(pattern, template.src_offset, template.dst_offset),))


def _heads_of(geometry: Geometry, src_block: int, dst_block: int, skipped: int, length: int) -> Run:
    """Some tokens of one block: a piece of each head."""
    src = src_block * geometry.src_block_stride + skipped
    dst = dst_block * geometry.dst_block_stride + skipped
    if geometry.num_heads == 1:
        return Run(local_offset=src, remote_offset=dst, length=length)
    stride, count = geometry.head_bytes, geometry.num_heads
    return Run(
        local_offset=src, remote_offset=dst, length=length, count=count, local_stride=stride, remote_stride=stride
    )


def _full_blocks(geometry: Geometry, src: tuple[int, ...], dst: tuple[int, ...]) -> Iterator[Run | Scatter]:
    """Whole blocks, at least one. Ids at a regular distance need no look at each of them: that is the usual case."""
    src_stride, dst_stride = geometry.src_block_stride, geometry.dst_block_stride
    length = geometry.num_heads * geometry.head_bytes
    src_step, dst_step = _rising_step(src), _rising_step(dst)
    if src_step and dst_step:
        yield from join_runs(
            (
                Run(
                    local_offset=src[0] * src_stride,
                    remote_offset=dst[0] * dst_stride,
                    length=length,
                    count=len(src),
                    local_stride=src_step * src_stride,
                    remote_stride=dst_step * dst_stride,
                ),
            )
        )
        return
    sources, targets = np.array(src, np.int64) * src_stride, np.array(dst, np.int64) * dst_stride
    yield from join_columns(np.full(len(src), length), sources, targets)


def _rising_step(ids: tuple[int, ...]) -> int:
    """The distance of ids that rise by the same number each, else 0; 1 for a single one."""
    step = ids[1] - ids[0] if len(ids) > 1 else 1
    return step if step > 0 and ids == tuple(range(ids[0], ids[0] + step * len(ids), step)) else 0


def _check_id(field: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise InvalidValueError(field=field, value=value, rule=f"0 to {count - 1}")
