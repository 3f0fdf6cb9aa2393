"""Which tokens and blocks of a sequence a rank of a context-parallel group holds.

The ranks that replicate a KV head may share its blocks instead: with `dcp_size` ranks in a group, the block g of a sequence
lies on the rank with `dcp_rank = g % dcp_size`, as its local block `g // dcp_size` (dense packing). The interleave is one block.
A group of one rank holds everything, by the same formulas.
"""

from __future__ import annotations

from common.layout.heads import num_replicas
from contracts.errors import InvalidValueError


def check_group(num_kv_heads: int, tp_size: int, dcp_size: int) -> None:
    """Raise `InvalidValueError` unless `dcp_size` divides the number of ranks that replicate one KV head."""
    replicas = num_replicas(num_kv_heads, tp_size)
    if dcp_size < 1 or replicas % dcp_size:
        rule = f"a divisor of {replicas}, the ranks that replicate a KV head"
        raise InvalidValueError(field="dcp_size", value=dcp_size, rule=rule)


def dcp_rank(tp_rank: int, dcp_size: int) -> int:
    """The place of a tensor-parallel rank in its group; the group's index is `tp_rank // dcp_size`."""
    return tp_rank % dcp_size


def owner(position: int, block_size: int, dcp_size: int) -> int:
    """The rank of the group that holds the token at `position`."""
    return position // block_size % dcp_size


def local_block(block: int, dcp_size: int) -> int:
    """Where, among its owner's blocks of the sequence, the block with global index `block` lies."""
    return block // dcp_size


def local_length(length: int, block_size: int, dcp_size: int, rank: int) -> int:
    """How many of the first `length` tokens of a sequence the rank holds.

    Always derive a local length from the global one: a query at position p sees exactly the first
    `local_length(p + 1, ...)` local keys, and after a rejection nothing is added or subtracted locally.
    """
    rounds, rest = divmod(length, block_size * dcp_size)
    return rounds * block_size + min(max(rest - rank * block_size, 0), block_size)


def owned_blocks(start: int, end: int, block_size: int, modulus: int, residue: int) -> range:
    """The blocks b of a sequence that hold some of the tokens `[start, end)`, with `b % modulus == residue`."""
    if start >= end:
        return range(0)
    first = start // block_size
    first += (residue - first) % modulus
    return range(first, (end - 1) // block_size + 1, modulus)


def held_range(start: int, end: int, block_size: int, modulus: int, residue: int) -> tuple[tuple[int, int], ...]:
    """The tokens of `[start, end)` in blocks b with `b % modulus == residue`, as a range of the positions at which their rank keeps them.

    One range, or none: counted by its own tokens, what a rank holds of a range is without gaps, however long the sequence.
    """
    low, high = (local_length(length, block_size, modulus, residue) for length in (start, end))
    return ((low, high),) if low < high else ()
