"""What a prompt owes to the parts of a plan."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.layout.context_parallel import held_range
from common.worker.core.parts import PushedParts
from contracts.codec import encode
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.rank import PartPushed, PushOutcome
from services.broker.core.ledger import Ledger
from services.prefill.core.owed_ranges import owed_ranges

DRAFT_ROLES = (Role.KEY, Role.VALUE, Role.BOOTSTRAP)


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
        (0, 40, {0: ((0, 24),), 1: ((0, 16),)}),
        (0, 10, {0: ((0, 10),)}),
        (20, 40, {0: ((16, 24),), 1: ((4, 16),)}),
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


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 2), (0, 16), (0, 17), (0, 40), (1, 40), (20, 40), (40, 40)])
def test_a_draft_is_owed_from_its_first_pair_on(start: int, end: int) -> None:
    """As the broker's ledger has it: no token 0, nothing of a prompt of one token but the bootstrap."""
    parts = [replace(part(role, rank, 2), namespace=Namespace.DRAFT) for role in DRAFT_ROLES for rank in (0, 1)]
    owed = owed_ranges(parts, start, end, 16)
    ledger = Ledger.open(parts, num_cached_tokens=start, num_prompt_tokens=end, block_size=16)
    assert sum(key[2] is Role.BOOTSTRAP for key in owed) == 2
    for each in parts:
        key = each.src_rank, each.namespace, each.role, each.layer, each.dst_rank
        assert ledger.owed(each) == (owed[key].ranges if key in owed else ())
    paged = sum(ranges.total for key, ranges in owed.items() if key[2] is Role.KEY)
    assert paged == end - max(start, 1) if end > 1 else paged == 0


def test_what_is_told_of_a_long_prompt_does_not_grow_with_its_blocks() -> None:
    """64K tokens over ranks that share them in turn: a part is one range, so that a report fits into a message."""
    parts = [part(Role.KEY, rank, 4) for rank in range(4)]
    owed = owed_ranges(parts, 0, 1 << 16, 16)
    assert [ranges.ranges for ranges in owed.values()] == [((0, 1 << 14),)] * 4
    done = PushedParts("r1-0", "i0", dp_rank=0)
    for start in range(0, 1 << 16, 256):
        for each in parts:
            for low, high in held_range(start, start + 256, 16, each.modulus, each.residue):
                done.add(_pushed(each, low, high))
    report = done.report(0)
    assert {tuple(each.ranges) for each in report.parts} == {((0, 1 << 14),)}
    assert len(encode(report)) < 1024


def _pushed(part: PlannedPart, start: int, end: int) -> PartPushed:
    return PartPushed(
        rank=part.src_rank,
        seq=1,
        handoff_id="r1-0",
        namespace=part.namespace,
        role=part.role,
        layer=part.layer,
        destination_rank=part.dst_rank,
        start=start,
        end=end,
        num_bytes=0,
        queued_ns=0,
        started_ns=0,
        done_ns=0,
        outcome=PushOutcome.DONE,
    )
