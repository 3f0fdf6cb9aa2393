"""Paged attention against plain attention, whatever the batch, the blocks, the tiles and the context-parallel cut."""

from __future__ import annotations

import pytest
import torch

from common.engine.device.cpu import CpuDevice
from common.engine.model import attention_metadata
from common.engine.model.attention import paged_attention, write_paged
from common.engine.model.attention_metadata import AttentionGeometry, SequenceView
from common.engine.model.partial import NaturalLse, Partial, merge_partials

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4
NUM_BLOCKS = 64


class World:
    """Sequences with known keys and values, written into caches whose other memory is NaN."""

    def __init__(self, lengths: list[int], dcp_size: int = 1) -> None:
        g = torch.Generator().manual_seed(5)
        self.lengths = lengths
        self.keys = [torch.randn(n, KV_HEADS, DIM, generator=g) for n in lengths]
        self.values = [torch.randn(n, KV_HEADS, DIM, generator=g) for n in lengths]
        self.dcp_size = dcp_size
        order = torch.randperm(NUM_BLOCKS, generator=g).tolist()
        self.blocks = [[order.pop() for _ in range(-(-n // (BLOCK * dcp_size)))] for n in lengths]
        self.generator = g
        self.caches = []
        for rank in range(dcp_size):
            caches = [torch.full((NUM_BLOCKS, KV_HEADS, BLOCK, DIM), torch.nan) for _ in range(2)]
            views = [
                SequenceView(block_ids=b, start=0, num_tokens=n) for b, n in zip(self.blocks, lengths, strict=True)
            ]
            views.sort(key=lambda view: view.num_tokens > 1)
            order_of = sorted(range(len(lengths)), key=lambda i: lengths[i] > 1)
            metadata = self.geometry(rank).build(views)
            write_paged(
                caches[0],
                caches[1],
                torch.cat([self.keys[i] for i in order_of]),
                torch.cat([self.values[i] for i in order_of]),
                metadata,
            )
            self.caches.append(caches)

    def geometry(self, rank: int = 0) -> AttentionGeometry:
        """The geometry of one rank of the group."""
        return AttentionGeometry(
            num_query_heads=HEADS, num_kv_heads=KV_HEADS, block_size=BLOCK, dcp_rank=rank, dcp_size=self.dcp_size
        )

    def attend(self, views: list[SequenceView], query: torch.Tensor, rank: int = 0) -> Partial:
        """What one rank computes."""
        key_cache, value_cache = self.caches[rank]
        return paged_attention(query, key_cache, value_cache, self.geometry(rank).build(views), CpuDevice())

    def expected(self, index: int, position: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain attention in fp64 of one query `[HEADS, DIM]` at `position` of sequence `index`."""
        repeats = HEADS // KV_HEADS
        keys = self.keys[index][: position + 1].repeat_interleave(repeats, 1).double()
        values = self.values[index][: position + 1].repeat_interleave(repeats, 1).double()
        scores = torch.einsum("hd,shd->hs", query.double(), keys) / DIM**0.5
        return torch.einsum("hs,shd->hd", scores.softmax(-1), values), scores.logsumexp(-1)


def check(world: World, starts: list[int], counts: list[int]) -> None:
    """Compare every row of a step: sequence i attends from positions [starts[i], starts[i] + counts[i])."""
    views = [
        SequenceView(block_ids=b, start=s, num_tokens=c) for b, s, c in zip(world.blocks, starts, counts, strict=True)
    ]
    query = torch.randn(sum(counts), HEADS, DIM, generator=world.generator)
    parts = [world.attend(views, query, rank) for rank in range(world.dcp_size)]
    output, lse = merge_partials(
        Partial(torch.stack([o for o, _ in parts]), NaturalLse(torch.stack([lse.values for _, lse in parts])))
    )
    row = 0
    for index, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for position in range(start, start + count):
            wanted, wanted_lse = world.expected(index, position, query[row])
            assert torch.allclose(output[row].double(), wanted, atol=2e-6)
            assert torch.allclose(lse.values[row].double(), wanted_lse, atol=2e-6)
            row += 1


@pytest.mark.parametrize("tile", [4, 8, 2048])
@pytest.mark.parametrize("dcp_size", [1, 2, 4])
def test_mixed_steps_equal_plain_attention(monkeypatch: pytest.MonkeyPatch, tile: int, dcp_size: int) -> None:
    """Decodes of different lengths beside chunks, over one or many key tiles and any number of context-parallel ranks.

    Memory that holds no token of the sequence is NaN, and does not show.
    """
    monkeypatch.setattr(attention_metadata, "KEY_TILE", tile)
    monkeypatch.setattr(attention_metadata, "QUERY_TILE", 5)
    world = World([1, 9, 30, 17, 23], dcp_size)
    check(world, [0, 8, 29, 0, 11], [1, 1, 1, 17, 12])


def test_equal_lengths_need_no_mask() -> None:
    """A batch of equal lengths, as of one sequence, slices instead of masking."""
    world = World([7, 7])
    check(world, [6, 6], [1, 1])
    views = [SequenceView(block_ids=b, start=6, num_tokens=1) for b in world.blocks]
    (group,) = world.geometry().build(views).groups
    assert [tile.mask for tile in group.tiles] == [None]


@pytest.mark.parametrize("length", [BLOCK * 6, BLOCK * 6 - 1, 3])
def test_blocks_side_by_side_are_read_in_place(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one KV head and adjacent blocks a tile is a view; what lies behind the end is not seen, and nothing is changed."""
    monkeypatch.setattr(attention_metadata, "KEY_TILE", BLOCK * 2)
    g = torch.Generator().manual_seed(2)
    caches = [torch.randn(12, 1, BLOCK, DIM, generator=g) for _ in range(2)]
    for cache in caches:
        cache.view(-1, DIM)[BLOCK * 3 + length :] = torch.nan
    query = torch.randn(1, HEADS, DIM, generator=g)
    before = [cache.clone() for cache in caches]
    geometry = AttentionGeometry(num_query_heads=HEADS, num_kv_heads=1, block_size=BLOCK)
    metadata = geometry.build([SequenceView(block_ids=range(3, 9), start=length - 1, num_tokens=1)])
    runs = [tile.run for tile in metadata.groups[0].tiles]
    assert runs == {BLOCK * 6: [3, 5, 7], BLOCK * 6 - 1: [3, 5, 7], 3: [3]}[length]
    output, lse = paged_attention(query, caches[0], caches[1], metadata, CpuDevice())
    keys, values = (cache.view(-1, DIM)[BLOCK * 3 : BLOCK * 3 + length].double() for cache in caches)
    scores = query[0].double() @ keys.mT / DIM**0.5
    assert torch.allclose(output[0].double(), scores.softmax(-1) @ values, atol=1e-5)
    assert torch.allclose(lse.values[0].double(), scores.logsumexp(-1), atol=1e-5)
    assert all(torch.equal(now.nan_to_num(), then.nan_to_num()) for now, then in zip(caches, before, strict=True))
    moved = geometry.build([SequenceView(block_ids=(3, 5, 4, 6, 7, 8), start=length - 1, num_tokens=1)])
    assert length == 3 or [tile.run for tile in moved.groups[0].tiles][:2] == [None, None]
