"""From a template and a request's ids to copies of bytes. This is on the hot path of a handoff.

A request's block ids are listed in the order of its tokens: `src_block_ids[g]` holds block g of the sequence. The destination
lists only the blocks that it owns: block g is `dst_block_ids[g // modulus]` (equal to g without context parallelism).
"Local" in the runs is the source; a reader turns them round with `as_reader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from common.layout.joining import join_columns, join_runs
from common.layout.run import Run
from common.layout.run_batch import Placed, RunBatch, RunPattern, Scatter
from common.layout.templates import PagedTemplate, SlotTemplate
from contracts.errors import InvalidValueError


class PartBlock(NamedTuple):
    """A block of which only `num_tokens` tokens from token `first` on count."""

    src_block: int
    dst_block: int
    first: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Extents:
    """The blocks that hold a range of tokens: full ones as ids of both sides, in the order of the tokens, and parts of blocks."""

    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]
    parts: tuple[PartBlock, ...]


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


def extents(
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    start: int,
    end: int,
    block_size: int,
    *,
    modulus: int = 1,
    residue: int = 0,
) -> Extents:
    """The blocks that hold tokens `[start, end)` of a sequence. The same for all layers: share it.

    Only blocks g with `g % modulus == residue` count. Raises `InvalidValueError` when a list of ids is too short for `end`.
    """
    if not 0 <= start <= end:
        raise InvalidValueError(field="tokens", value=(start, end), rule="0 <= start <= end")
    blocks = _owned_blocks(start, end, block_size, modulus, residue)
    if not blocks:
        return Extents(src_blocks=(), dst_blocks=(), parts=())
    for field, ids, needed in (
        ("src_block_ids", src_block_ids, blocks[-1] + 1),
        ("dst_block_ids", dst_block_ids, blocks[-1] // modulus + 1),
    ):
        if len(ids) < needed:
            raise InvalidValueError(field=field, value=f"{len(ids)} ids", rule=f"at least {needed} for token {end - 1}")
    src = src_block_ids[blocks[0] : blocks[-1] + 1 : modulus]
    dst = dst_block_ids[blocks[0] // modulus : blocks[-1] // modulus + 1]
    # Only the first and the last of the blocks can hold other tokens as well.
    low = int(blocks[0] * block_size < start or (blocks[0] + 1) * block_size > end)
    high = len(blocks) - int(len(blocks) > low and (blocks[-1] + 1) * block_size > end)
    parts = tuple(
        PartBlock(
            src[place],
            dst[place],
            max(start - blocks[place] * block_size, 0),
            min(end - blocks[place] * block_size, block_size) - max(start - blocks[place] * block_size, 0),
        )
        for place in (*range(low), *range(high, len(blocks)))
    )
    return Extents(src_blocks=tuple(src[low:high]), dst_blocks=tuple(dst[low:high]), parts=parts)


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
            blocks = _owned_blocks(self.start, self.end, self.block_size, modulus, residue)
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


def bind_slot(
    template: SlotTemplate, src_slot: int, dst_slot: int, *, src_row: int = 0, dst_row: int = 0
) -> tuple[Run, ...]:
    """The run that moves one sequence's state between two slots, from `src_row` on to `dst_row` on.

    With speculation the state of a sequence begins at the row of the last accepted token (SSM: that row, CONV: three rows from
    there); without, at 0. Raises `InvalidValueError` for a slot or a row that does not exist.
    """
    _check_id("src_slot", src_slot, template.src_num_slots)
    _check_id("dst_slot", dst_slot, template.dst_num_slots)
    _check_rows("src_row", src_row, template)
    _check_rows("dst_row", dst_row, template)
    run = slot_rows(template)
    return (
        Run(
            local_offset=run.local_offset + src_slot * template.src_slot_stride + src_row * template.src_row_stride,
            remote_offset=run.remote_offset + dst_slot * template.dst_slot_stride + dst_row * template.dst_row_stride,
            length=run.length,
            count=run.count,
            local_stride=run.local_stride,
            remote_stride=run.remote_stride,
        ),
    )


def slot_rows(template: SlotTemplate) -> Run:
    """The run that moves a state from row 0 of slot 0 to row 0 of slot 0: other slots and rows lie at other bases."""
    length, count = template.row_bytes, template.moved_rows
    src_stride, dst_stride = template.src_row_stride, template.dst_row_stride
    if count == 1 or src_stride == dst_stride == length:
        return Run(local_offset=template.src_offset, remote_offset=template.dst_offset, length=length * count)
    return Run(
        local_offset=template.src_offset,
        remote_offset=template.dst_offset,
        length=length,
        count=count,
        local_stride=src_stride,
        remote_stride=dst_stride,
    )


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


def _owned_blocks(start: int, end: int, block_size: int, modulus: int, residue: int) -> range:
    """The blocks of a sequence that hold tokens `[start, end)` and belong to the residue."""
    if start >= end:
        return range(0)
    first = start // block_size
    first += (residue - first) % modulus
    return range(first, (end - 1) // block_size + 1, modulus)


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


def _check_rows(field: str, row: int, template: SlotTemplate) -> None:
    first = template.moved_rows - 1
    if row < 0 or row + first >= template.num_rows:
        shown = (row, row + first) if first else row
        raise InvalidValueError(field=field, value=shown, rule=f"0 to {template.num_rows - 1}")
