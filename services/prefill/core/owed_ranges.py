"""What a prompt owes to each part of a pair's plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from common.layout.context_parallel import held_range
from common.layout.ranges import RangeSet
from contracts.manifest import Namespace, PlannedPart, Role

OwedKey = tuple[int, Namespace, Role, int, int]
"""Source rank, namespace, role, layer, destination rank."""

_STATE = RangeSet(((0, 1),))


def owed_ranges(parts: Iterable[PlannedPart], start: int, end: int, block_size: int) -> dict[OwedKey, RangeSet]:
    """The ranges that complete each part of a prompt whose tokens `[start, end)` are moved; parts that get none are left out.

    They count the tokens that each destination rank keeps, as reports do. Of a prompt of few blocks some ranks of a context-parallel group get none.
    A draft's cache has no token 0.
    """
    shares: dict[tuple[int, int, int], RangeSet] = {}
    owed: dict[OwedKey, RangeSet] = {}
    for part in parts:
        if not part.role.is_paged:
            ranges = _STATE
        else:
            first = max(start, part.namespace.first_token)
            share = first, part.modulus, part.residue
            if share not in shares:
                shares[share] = RangeSet(held_range(first, end, block_size, part.modulus, part.residue))
            ranges = shares[share]
        if ranges.ranges:
            owed[part.src_rank, part.namespace, part.role, part.layer, part.dst_rank] = ranges
    return owed
