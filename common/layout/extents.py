"""Which blocks of both sides hold some tokens of a sequence: whole ones, and those of which only a part counts.

A request's block ids are listed in the order of its tokens: `src_block_ids[g]` holds block g of the sequence. The destination
lists only the blocks that it owns: block g is `dst_block_ids[g // modulus]` (equal to g without context parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.layout.context_parallel import owned_blocks
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
    blocks = owned_blocks(start, end, block_size, modulus, residue)
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
