"""Range sets and context-parallel ownership, against sets of single integers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.layout.context_parallel import held_range, local_block, local_length, owner
from common.layout.ranges import RangeSet

ranges = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def members(held: RangeSet) -> set[int]:
    """The integers of a range set."""
    return {number for start, end in held.ranges for number in range(start, end)}


@settings(deadline=None)
@given(st.lists(ranges), ranges)
def test_a_range_set_is_a_set(parts: list[tuple[int, int]], probe: tuple[int, int]) -> None:
    """`add`, `merge`, `covers`, `overlaps`, `missing`, `total` and `tiles` agree with a set of integers."""
    held, model = RangeSet(), set[int]()
    for start, end in parts:
        held = held.add(start, end)
        model |= set(range(start, end))
    wanted = set(range(*probe))
    assert members(held) == model
    assert held == RangeSet.of(parts)
    assert held.merge(RangeSet.of([probe])) == held.add(*probe)
    assert held.total == len(model)
    assert held.covers(*probe) == (wanted <= model)
    assert held.overlaps(*probe) == bool(wanted & model)
    assert {n for low, high in held.missing(*probe) for n in range(low, high)} == wanted - model
    assert held.tiles(*probe) == (model == wanted)
    assert all(end < start for (_, end), (start, _) in zip(held.ranges, held.ranges[1:], strict=False))


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 9), st.sampled_from((1, 2, 4, 8)))
def test_local_lengths_count_the_owned_tokens(length: int, block_size: int, dcp_size: int) -> None:
    """The closed formula equals counting, and the ranks of a group share every token."""
    counts = [sum(owner(p, block_size, dcp_size) == rank for p in range(length)) for rank in range(dcp_size)]
    assert [local_length(length, block_size, dcp_size, rank) for rank in range(dcp_size)] == counts


@settings(deadline=None)
@given(ranges, st.integers(1, 5), st.sampled_from((1, 2, 4, 8)))
def test_held_ranges_are_the_owned_tokens_by_their_own_positions(
    span: tuple[int, int], block_size: int, dcp_size: int
) -> None:
    """One range a rank, or none: the places that the tokens of the span have among all tokens of their rank."""
    start, end = span
    for rank in range(dcp_size):
        held = held_range(start, end, block_size, dcp_size, rank)
        kept = [p for p in range(end) if owner(p, block_size, dcp_size) == rank]
        assert members(RangeSet.of(held)) == {place for place, p in enumerate(kept) if p >= start}
        assert len(held) <= 1


@settings(deadline=None)
@given(st.integers(0, 100), st.sampled_from((1, 2, 4, 8)))
def test_local_blocks_are_dense(num_blocks: int, dcp_size: int) -> None:
    """A rank's blocks are numbered 0, 1, 2, ... without a hole."""
    for rank in range(dcp_size):
        local = [local_block(block, dcp_size) for block in range(num_blocks) if owner(block, 1, dcp_size) == rank]
        assert local == list(range(len(local)))
