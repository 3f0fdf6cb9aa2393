"""Attention that is shared out over ranks is attention: the merge of any partition of the keys, in fp64, to 1e-10."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.model import attention_metadata
from common.engine.model.attention_metadata import KeyTile
from common.engine.model.partial import NaturalLse, Partial
from tests.property.sharded_attention import (
    BinaryDevice,
    Float64Device,
    LyingDevice,
    ShardedWorld,
    distance,
    stack,
)

CLOSE = 1e-10
ROWS, WIDTH = 3, 5
LEFT_BEHIND = (-torch.inf, torch.inf, torch.nan)


@settings(deadline=None)
@given(
    owners=st.lists(st.integers(0, 3), max_size=12),
    empty=st.lists(st.sampled_from(LEFT_BEHIND), min_size=4, max_size=4),
    garbage=st.sampled_from((*LEFT_BEHIND, 0.0, 1e300)),
    is_padded=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    scale=st.sampled_from((0.1, 5.0, 300.0)),
    seed=st.integers(0, 1000),
)
def test_the_merge_of_any_partition_is_the_whole(  # noqa: PLR0917 - what is drawn
    owners: list[int], empty: list[float], garbage: float, is_padded: list[bool], scale: float, seed: int
) -> None:
    """Keys go to four ranks in any way, none among them. Ranks without keys, and rows that are padding, hold anything.

    Rows of padding come out as (0, -inf), and so do all rows where no rank has a key.
    """
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(ROWS, len(owners), generator=random, dtype=torch.float64) * scale
    values = torch.randn(len(owners), WIDTH, generator=random, dtype=torch.float64)
    padded = torch.tensor(is_padded)
    parts = []
    for rank, left_behind in enumerate(empty):
        held = [key for key, owner in enumerate(owners) if owner == rank]
        output, lse = scores[:, held].softmax(-1) @ values[held], scores[:, held].logsumexp(-1)
        if not held:
            output, lse = torch.full((ROWS, WIDTH), torch.nan), torch.full((ROWS,), left_behind)
        output = output.double().masked_fill(padded[:, None], garbage)
        part = Partial(output, NaturalLse(lse.double().masked_fill(padded, garbage)))
        parts.append(part.cleared(padded))
    whole = Partial(scores.softmax(-1) @ values, NaturalLse(scores.logsumexp(-1))).cleared(padded)
    assert distance(stack(parts), whole) < CLOSE


def test_nobody_has_a_key() -> None:
    """Never 0/0: output 0, LSE -inf."""
    parts = [Partial(torch.full((3, 4), torch.nan), NaturalLse(torch.full((3,), at))) for at in LEFT_BEHIND]
    output, lse = stack(parts)
    assert bool((output == 0).all())
    assert bool((lse.values == -torch.inf).all())


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Lengths of some sequences, and what of each a step attends from: one token, a few alike, or a chunk; few before many."""
    lengths, starts, counts = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        lengths.append(draw(st.integers(1, 34)))
        counted = draw(st.one_of(st.sampled_from((1, 3)), st.integers(1, lengths[-1])))
        starts.append(max(0, lengths[-1] - counted))
        counts.append(lengths[-1] - starts[-1])
    order = sorted(range(len(lengths)), key=lambda i: counts[i])
    return [lengths[i] for i in order], [starts[i] for i in order], [counts[i] for i in order]


@settings(deadline=None, max_examples=40)
@given(
    step=steps(),
    dcp_size=st.sampled_from((1, 2, 4, 8)),
    block_size=st.sampled_from((1, 2, 4)),
    key_tile=st.sampled_from((4, 2048)),
    max_batched=st.sampled_from((1, 7)),
    device=st.sampled_from((Float64Device(), BinaryDevice())),
    seed=st.integers(0, 1000),
)
def test_ranks_that_share_blocks_attend_like_one_that_has_them_all(  # noqa: PLR0917 - what is drawn
    step: tuple[list[int], list[int], list[int]],
    dcp_size: int,
    block_size: int,
    key_tile: int,
    max_batched: int,
    device: Float64Device,
    seed: int,
) -> None:
    """Decodes and chunks in one step, sequences below one interleave included, whatever base the kernel's logarithms have.

    Memory that holds no token of a sequence is NaN, and does not show.
    """
    lengths, starts, counts = step
    with (
        patch.object(attention_metadata, "KEY_TILE", key_tile),
        patch.object(attention_metadata, "QUERY_TILE", 7),
        patch.object(attention_metadata, "MAX_BATCHED_TOKENS", max_batched),
    ):
        world = ShardedWorld(lengths=lengths, dcp_size=dcp_size, block_size=block_size, device=device, seed=seed)
        query = world.query(counts)
        assert distance(world.merged(query, starts, counts), world.plain(query, starts, counts)) < CLOSE


STEP: dict[str, Any] = {"starts": [2, 9, 0], "counts": [1, 1, 5]}
"""With blocks of 2 on 4 ranks: the first sequence reaches two ranks, the second all of them, the third three."""


def error_of(device: Float64Device) -> float:
    """How far the result of a fixed step is from the truth."""
    world = ShardedWorld(lengths=[3, 10, 5], dcp_size=4, block_size=2, device=device)
    query = world.query(STEP["counts"])
    return distance(world.merged(query, **STEP), world.plain(query, **STEP))


def test_a_logarithm_of_another_base_is_seen() -> None:
    """The check can fail: a kernel with base 2 that says e gives another result; one that says 2 gives the right one."""
    assert error_of(Float64Device()) < CLOSE
    assert error_of(BinaryDevice()) < CLOSE
    assert error_of(LyingDevice()) > 1e-2


def test_rows_that_are_not_cleared_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: without clearing, the NaN of a rank that has no key for a row spoils the sum."""
    monkeypatch.setattr(Partial, "cleared", lambda self, _: self)
    assert error_of(Float64Device()) == torch.inf


def test_foreign_memory_that_is_not_cleared_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a NaN that an earlier owner left in a block spoils the sum although its weight is zero."""

    def forget(**values: Any) -> KeyTile:
        return KeyTile(**values | {"foreign": None})

    monkeypatch.setattr(attention_metadata, "KeyTile", forget)
    assert error_of(Float64Device()) == torch.inf
