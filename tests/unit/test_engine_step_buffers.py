"""Laying out a step: order, rows, limits."""

from __future__ import annotations

import pytest
import torch

from common.engine.model.attention_metadata import AttentionGeometry
from common.engine.ranks.step_buffers import Chunk, StepBuffers, StepSequence
from contracts.errors import InvalidValueError


def buffers(dcp_size: int = 1) -> StepBuffers:
    """Room for 20 tokens of 3 sequences, blocks of 4."""
    geometry = AttentionGeometry(num_query_heads=4, num_kv_heads=2, block_size=4, dcp_size=dcp_size)
    return StepBuffers(geometry, max_tokens=20, max_sequences=3, device=torch.device("cpu"))


def sequence(slot: int, start: int, token_ids: list[int], num_logits: int = 1, num_blocks: int = 9) -> StepSequence:
    """A sequence with blocks slot * 10 and up."""
    block_ids = range(slot * 10, slot * 10 + num_blocks)
    return StepSequence(slot=slot, block_ids=block_ids, start=start, token_ids=token_ids, num_logits=num_logits)


def test_single_tokens_come_first_and_logits_keep_the_given_order() -> None:
    """Rows are decodes, then chunks; logit rows follow the order in which the sequences were given."""
    step = buffers().fill([sequence(2, 8, [1, 2, 3], num_logits=2), sequence(1, 5, [7]), sequence(0, 6, [9])])
    assert step.token_ids.tolist() == [7, 9, 1, 2, 3]
    assert step.positions.tolist() == [5, 6, 8, 9, 10]
    (first,) = step.rounds
    assert (first.first, first.num_tokens, first.slots, first.state_rows) == (0, 1, (1, 0), None)
    assert first.slot_index.tolist() == [1, 0]
    assert step.chunks == (Chunk(slot=2, first=2, num_tokens=3),)
    assert step.logit_rows.tolist() == [0, 1, 3, 4]
    assert step.logit_order.tolist() == [2, 3, 0, 1]
    assert [(group.first, group.batch, group.num_queries) for group in step.last_attention.groups] == [
        (0, 2, 1),
        (2, 1, 2),
    ]
    # Block b, head h, offset o of a cache of 2 heads and blocks of 4 is row (b * 2 + h) * 4 + o.
    assert step.attention.write_rows.tolist()[:2] == [(11 * 2) * 4 + 1, (11 * 2 + 1) * 4 + 1]


def test_the_inputs_stay_where_they_are() -> None:
    """Graph capture needs the same memory in every step."""
    held = buffers()
    first = held.fill([sequence(0, 0, [1, 2])])
    address = first.token_ids.data_ptr()
    assert held.fill([sequence(0, 2, [3])]).token_ids.data_ptr() == address
    assert first.token_ids.tolist() == [3, 2]


@pytest.mark.parametrize(
    ("sequences", "rule"),
    [
        ([], "tokens of a step"),
        ([sequence(0, 0, list(range(21)))], "tokens of a step"),
        ([sequence(i, 0, [1]) for i in range(4)], "sequences of a step"),
        ([sequence(0, 0, [1]), sequence(1, 0, [], num_logits=0)], "step sequence"),
        ([sequence(0, 0, [1], num_logits=2)], "step sequence"),
        ([sequence(0, 4, [1], num_blocks=1)], "blocks of a sequence"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(sequences: list[StepSequence], rule: str) -> None:
    """The error names what does not fit; nothing is computed from half a step."""
    with pytest.raises(InvalidValueError, match=rule):
        buffers().fill(sequences)


def test_ranks_of_a_context_parallel_group_need_fewer_blocks() -> None:
    """Two ranks share the blocks of a sequence: 8 tokens need one block on each."""
    step = buffers(dcp_size=2).fill([sequence(0, 0, list(range(8)), num_blocks=1)])
    assert step.attention.written is not None
    assert step.attention.written.tolist() == [0, 1, 2, 3]
