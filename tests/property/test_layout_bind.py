"""Binding a template to block ids, against a copy that goes token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.layout.bind import bind_tokens
from common.layout.run import Run
from common.layout.templates import PagedTemplate, Piece
from contracts.manifest import Namespace, PlannedPart, Role

NUM_BLOCKS = 12
TOKEN_BYTES = 2
Binding = tuple[PagedTemplate, list[int], list[int], int, int, int]


@st.composite
def bindings(draw: st.DrawFn) -> Binding:
    """A template with any heads on either side, ids in any order, and a token range."""
    block_size = draw(st.integers(1, 4))
    modulus = draw(st.sampled_from((1, 1, 2, 4)))
    num_heads = draw(st.integers(1, 3))
    head_bytes = block_size * TOKEN_BYTES
    strides = [(num_heads + draw(st.integers(0, 2))) * head_bytes for _ in range(2)]
    template = PagedTemplate(
        part=PlannedPart(
            namespace=Namespace.TARGET,
            role=Role.KEY,
            layer=0,
            src_rank=0,
            dst_rank=0,
            modulus=modulus,
            residue=draw(st.integers(0, modulus - 1)),
        ),
        piece=Piece(start=0, length=num_heads),
        src_offset=draw(st.integers(0, 8)) * head_bytes,
        dst_offset=draw(st.integers(0, 8)) * head_bytes,
        src_block_stride=strides[0],
        dst_block_stride=strides[1],
        src_num_blocks=NUM_BLOCKS,
        dst_num_blocks=NUM_BLOCKS,
        head_bytes=head_bytes,
        token_bytes=TOKEN_BYTES,
    )
    ids = st.one_of(st.just(list(range(NUM_BLOCKS))), st.permutations(range(NUM_BLOCKS)))
    end = draw(st.integers(0, NUM_BLOCKS * block_size))
    return template, list(draw(ids)), list(draw(ids)), draw(st.integers(0, end)), end, block_size


def copied(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """(source byte, destination byte) of every byte that the runs move, sorted; a byte moved twice stands twice."""
    return sorted(
        (run.local_offset + i * run.local_stride + byte, run.remote_offset + i * run.remote_stride + byte)
        for run in runs
        for i in range(run.count)
        for byte in range(run.length)
    )


def token_by_token(bound: Binding) -> list[tuple[int, int]]:
    """The same, straight from the layout `[block, head, token]`."""
    template, src_ids, dst_ids, start, end, block_size = bound
    part = template.part
    pairs = []
    for token in range(start, end):
        block, inside = divmod(token, block_size)
        if block % part.modulus != part.residue:
            continue
        for head in range(template.piece.length):
            at = head * template.head_bytes + inside * TOKEN_BYTES
            src = template.src_offset + src_ids[block] * template.src_block_stride + at
            dst = template.dst_offset + dst_ids[block // part.modulus] * template.dst_block_stride + at
            pairs += [(src + byte, dst + byte) for byte in range(TOKEN_BYTES)]
    return sorted(pairs)


@settings(deadline=None)
@given(bindings())
def test_bound_runs_move_exactly_the_bytes_of_the_tokens(
    bound: Binding,
) -> None:
    """Any ids, any range, any heads: the same (source, destination) byte pairs as a copy token by token."""
    assert copied(bind_tokens(*bound)) == token_by_token(bound)


@settings(deadline=None)
@given(bindings())
def test_consecutive_ids_need_no_more_than_three_runs(
    bound: Binding,
) -> None:
    """With ids in a row there are a head piece, one strided run of full blocks and a tail piece."""
    template, _, _, start, end, block_size = bound
    ids = list(range(NUM_BLOCKS))
    assert len(bind_tokens(template, ids, ids, start, end, block_size)) <= 3


ORDERS = {
    "in order": (0, 1, 2, 3, 4, 5),
    "begins and ends in order": (0, 1, 3, 2, 4, 5),
    "every second": (0, 2, 4, 6, 8, 10),
    "begins and ends every second": (1, 3, 7, 5, 9, 11),
    "backwards": (8, 7, 6, 5, 4, 3),
    "jumps": (0, 1, 2, 9, 10, 11),
}


@pytest.mark.parametrize("src", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("dst", ORDERS.values(), ids=ORDERS.keys())
def test_order_on_one_side_is_not_taken_for_order(src: tuple[int, ...], dst: tuple[int, ...]) -> None:
    """Ids that only look regular, at one side or both, are still bound block by block."""
    template = PagedTemplate(
        part=PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=0, src_rank=0, dst_rank=0),
        piece=Piece(start=0, length=2),
        src_offset=0,
        dst_offset=16,
        src_block_stride=8,
        dst_block_stride=16,
        src_num_blocks=NUM_BLOCKS,
        dst_num_blocks=NUM_BLOCKS,
        head_bytes=4,
        token_bytes=TOKEN_BYTES,
    )
    for start, end in ((0, 12), (1, 11), (2, 10)):
        bound = (template, list(src), list(dst), start, end, 2)
        assert copied(bind_tokens(*bound)) == token_by_token(bound)
