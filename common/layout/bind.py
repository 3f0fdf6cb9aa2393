"""From a template and a request's ids to runs of bytes. This is on the hot path: work is proportional to blocks, then to runs.

A request's block ids are listed in the order of its tokens: `src_block_ids[g]` holds block g of the sequence. The destination
lists only the blocks that it owns: block g is `dst_block_ids[g // modulus]` (equal to g without context parallelism).
"Local" in the runs is the source; a reader turns them round with `as_reader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from common.layout.run import Run
from common.layout.templates import PagedTemplate, SlotTemplate
from contracts.errors import InvalidValueError


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """`count` full blocks whose ids step by `src_step` at the source and by 1 at the destination, or a part of one block.

    `num_tokens` tokens from token `first` of each block; `count > 1` only for full blocks.
    """

    src_block: int
    dst_block: int
    first: int
    num_tokens: int
    count: int = 1
    src_step: int = 1


def extents(
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    start: int,
    end: int,
    block_size: int,
    *,
    modulus: int = 1,
    residue: int = 0,
) -> tuple[Extent, ...]:
    """The blocks that hold tokens `[start, end)` of a sequence, consecutive ids joined. The same for all layers: share it.

    Only blocks g with `g % modulus == residue` count. Raises `InvalidValueError` when a list of ids is too short for `end`.
    """
    if not 0 <= start <= end:
        raise InvalidValueError(field="tokens", value=(start, end), rule="0 <= start <= end")
    if start == end:
        return ()
    first = start // block_size
    first += (residue - first) % modulus
    blocks = range(first, (end - 1) // block_size + 1, modulus)
    if not blocks:
        return ()
    for field, ids, needed in (
        ("src_block_ids", src_block_ids, blocks[-1] + 1),
        ("dst_block_ids", dst_block_ids, blocks[-1] // modulus + 1),
    ):
        if len(ids) < needed:
            raise InvalidValueError(field=field, value=f"{len(ids)} ids", rule=f"at least {needed} for token {end - 1}")
    found: list[Extent] = []
    first_full, end_full = -(-start // block_size), end // block_size
    src_block = dst_block = count = 0
    for block in blocks:
        src, dst = src_block_ids[block], dst_block_ids[block // modulus]
        if first_full <= block < end_full:
            if count and src == src_block + count * modulus and dst == dst_block + count:
                count += 1
                continue
            if count:
                found.append(_full(src_block, dst_block, block_size, count, modulus))
            src_block, dst_block, count = src, dst, 1
            continue
        if count:
            found.append(_full(src_block, dst_block, block_size, count, modulus))
            count = 0
        low, high = max(start - block * block_size, 0), min(end - block * block_size, block_size)
        found.append(Extent(src_block=src, dst_block=dst, first=low, num_tokens=high - low))
    if count:
        found.append(_full(src_block, dst_block, block_size, count, modulus))
    return tuple(found)


def bind_extents(template: PagedTemplate, where: Iterable[Extent]) -> tuple[Run, ...]:
    """The runs that move what `template` moves for these extents.

    Raises `InvalidValueError` for a block id that is not one of the rank's: it would address another layer's cache.
    """
    runs: list[Run] = []
    token_bytes, head_bytes, num_heads = template.token_bytes, template.head_bytes, template.piece.length
    src_stride, dst_stride = template.src_block_stride, template.dst_block_stride
    for extent in where:
        src, dst, count = extent.src_block, extent.dst_block, extent.count
        src_last, dst_last = src + (count - 1) * extent.src_step, dst + count - 1
        if src < 0 or dst < 0 or src_last >= template.src_num_blocks or dst_last >= template.dst_num_blocks:
            _check_id("src_block_ids", src, src_last - src, template.src_num_blocks)
            _check_id("dst_block_ids", dst, dst_last - dst, template.dst_num_blocks)
        skipped = extent.first * token_bytes
        src_at = template.src_offset + src * src_stride + skipped
        dst_at = template.dst_offset + dst * dst_stride + skipped
        length = extent.num_tokens * token_bytes
        if length == head_bytes:
            strides = extent.src_step * src_stride, dst_stride
            _append(runs, src_at, dst_at, length * num_heads, count=count, strides=strides)
        else:
            _append(runs, src_at, dst_at, length, count=num_heads, strides=(head_bytes, head_bytes))
    return tuple(runs)


def bind_tokens(  # noqa: PLR0917 - ids of both sides, then a range: the order in which every caller has them
    template: PagedTemplate,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    start: int,
    end: int,
    block_size: int,
) -> tuple[Run, ...]:
    """The runs that move tokens `[start, end)` of one sequence: `extents`, then `bind_extents`.

    Raises `InvalidValueError` for ids that are missing or out of range, and for a block size that is not the template's.
    """
    if block_size * template.token_bytes != template.head_bytes:
        rule = f"{template.head_bytes // template.token_bytes}, the block size of the plan"
        raise InvalidValueError(field="block_size", value=block_size, rule=rule)
    modulus, residue = template.part.modulus, template.part.residue
    where = extents(src_block_ids, dst_block_ids, start, end, block_size, modulus=modulus, residue=residue)
    return bind_extents(template, where)


def bind_slot(
    template: SlotTemplate, src_slot: int, dst_slot: int, *, src_row: int = 0, dst_row: int = 0
) -> tuple[Run, ...]:
    """The run that moves one sequence's state between two slots, from `src_row` on to `dst_row` on.

    With speculation the state of a sequence begins at the row of the last accepted token (SSM: that row, CONV: three rows from
    there); without, at 0. Raises `InvalidValueError` for a slot or a row that does not exist.
    """
    _check_id("src_slot", src_slot, 0, template.src_num_slots)
    _check_id("dst_slot", dst_slot, 0, template.dst_num_slots)
    _check_id("src_row", src_row, template.moved_rows - 1, template.num_rows)
    _check_id("dst_row", dst_row, template.moved_rows - 1, template.num_rows)
    runs: list[Run] = []
    _append(
        runs,
        template.src_offset + src_slot * template.src_slot_stride + src_row * template.src_row_stride,
        template.dst_offset + dst_slot * template.dst_slot_stride + dst_row * template.dst_row_stride,
        template.row_bytes,
        count=template.moved_rows,
        strides=(template.src_row_stride, template.dst_row_stride),
    )
    return tuple(runs)


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


def _full(src_block: int, dst_block: int, block_size: int, count: int, src_step: int) -> Extent:
    return Extent(
        src_block=src_block,
        dst_block=dst_block,
        first=0,
        num_tokens=block_size,
        count=count,
        src_step=src_step if count > 1 else 1,
    )


def _append(runs: list[Run], src: int, dst: int, length: int, *, count: int, strides: tuple[int, int]) -> None:
    """Add a run in its simplest form; extend the last one when the bytes go on from it on both sides."""
    if strides == (length, length):
        length, count = length * count, 1
    if count > 1:
        local_stride, remote_stride = strides
        run = Run(
            local_offset=src,
            remote_offset=dst,
            length=length,
            count=count,
            local_stride=local_stride,
            remote_stride=remote_stride,
        )
        runs.append(run)
    elif runs and _continues(runs[-1], src, dst):
        last = runs[-1]
        runs[-1] = Run(local_offset=last.local_offset, remote_offset=last.remote_offset, length=last.length + length)
    else:
        runs.append(Run(local_offset=src, remote_offset=dst, length=length))


def _continues(last: Run, src: int, dst: int) -> bool:
    return last.count == 1 and last.local_offset + last.length == src and last.remote_offset + last.length == dst


def _check_id(field: str, first: int, steps: int, count: int) -> None:
    if first < 0 or first + steps >= count:
        raise InvalidValueError(
            field=field, value=first if not steps else (first, first + steps), rule=f"0 to {count - 1}"
        )
