"""What a prompt owes to the parts of a plan."""

from __future__ import annotations

import pytest

from contracts.manifest import Namespace, PlannedPart, Role
from services.broker.core.ledger import Ledger
from services.prefill.core.owed_ranges import owed_ranges


def part(role: Role, dst_rank: int, dcp: int) -> PlannedPart:
    """What rank 0 owes to one rank of a group of `dcp`."""
    paged = role in {Role.KEY, Role.VALUE}
    return PlannedPart(
        namespace=Namespace.TARGET,
        role=role,
        layer=0,
        src_rank=0,
        dst_rank=dst_rank,
        modulus=dcp if paged else 1,
        residue=dst_rank % dcp if paged else 0,
    )


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 40, {0: ((0, 16), (32, 40)), 1: ((16, 32),)}),
        (0, 10, {0: ((0, 10),)}),
        (20, 40, {0: ((32, 40),), 1: ((20, 32),)}),
        (40, 40, {}),
    ],
)
def test_each_rank_of_a_group_is_owed_its_blocks(
    start: int, end: int, expected: dict[int, tuple[tuple[int, int], ...]]
) -> None:
    """Parts that get nothing are left out, states are owed whole, and the broker's ledger says the same."""
    parts = [part(role, rank, 2) for role in (Role.KEY, Role.SSM) for rank in (0, 1)]
    owed = owed_ranges(parts, start, end, 16)
    states = {key: ranges for key, ranges in owed.items() if key[2] is Role.SSM}
    assert [ranges.ranges for ranges in states.values()] == [((0, 1),)] * 2
    assert {key[4]: ranges.ranges for key, ranges in owed.items() if key not in states} == expected
    ledger = Ledger.open(parts, num_cached_tokens=start, num_prompt_tokens=end, block_size=16)
    for each in parts:
        key = each.src_rank, each.namespace, each.role, each.layer, each.dst_rank
        assert ledger.owed(each) == (owed[key].ranges if key in owed else ())
