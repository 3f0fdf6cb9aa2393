"""Attention over paged, head-major caches. Every path returns an fp32 output with its log-sum-exp."""

from __future__ import annotations

import torch

from common.engine.device.port import Device
from common.engine.model.attention_metadata import AttentionGroup, AttentionMetadata, KeyTile
from common.engine.model.partial import NaturalLse, Partial, merge_attended, natural


def write_paged(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    """Store the step's `key` and `value` `[T, kv_heads, head_dim]` into the blocks that they belong to."""
    dim = key.shape[-1]
    for cache, new in ((key_cache, key), (value_cache, value)):
        held = new if metadata.written is None else new.index_select(0, metadata.written)
        cache.view(-1, dim).index_copy_(0, metadata.write_rows, held.reshape(-1, dim))


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    device: Device,
) -> Partial:
    """Attend `query [T, heads, head_dim]` to the caches `[num_blocks, kv_heads, block_size, head_dim]`.

    Scores are scaled by 1 / sqrt(head_dim). The result's rows are `[T, heads]`; one that sees no key of this rank is (0, -inf).
    """
    parts = [_attend_group(query, key_cache, value_cache, group, device) for group in metadata.groups]
    if len(parts) == 1:
        return parts[0]
    lse = torch.cat([part.lse.values for part in parts])
    return Partial(torch.cat([part.output for part in parts]), NaturalLse(lse))


def _attend_group(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, group: AttentionGroup, device: Device
) -> Partial:
    heads, dim = query.shape[1:]
    batch, count = group.batch, group.num_queries
    kv_heads = key_cache.shape[1]
    repeats = heads // kv_heads
    rows = query.narrow(0, group.first, batch * count)
    rows = rows.reshape(batch, count, kv_heads, repeats, dim).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    partial = _attend_tile(rows, key_cache, value_cache, group.tiles[0], device)
    for tile in group.tiles[1:]:
        further = _attend_tile(rows, key_cache, value_cache, tile, device)
        lses = torch.stack((partial.lse.values, further.lse.values))
        partial = merge_attended(Partial(torch.stack((partial.output, further.output)), NaturalLse(lses)))
    output = partial.output.reshape(batch, kv_heads, repeats, count, dim).permute(0, 3, 1, 2, 4)
    lse = partial.lse.values.reshape(batch, kv_heads, repeats, count).permute(0, 3, 1, 2)
    return Partial(output.reshape(batch * count, heads, dim), NaturalLse(lse.reshape(batch * count, heads)))


def _attend_tile(
    rows: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tile: KeyTile, device: Device
) -> Partial:
    batch, kv_heads, _, dim = rows.shape
    # A head of a block is one contiguous run, so blocks are gathered straight into [batch, kv_heads, keys, dim].
    gathered = [
        _rows(cache.view(-1, cache.shape[2] * dim), tile).view(batch, kv_heads, -1, dim)[:, :, : tile.num_keys]
        for cache in (key_cache, value_cache)
    ]
    if tile.foreign is not None:
        # A weight of zero does not help against a NaN that an earlier owner of the block left behind.
        for part in gathered:
            part.masked_fill_(tile.foreign, 0.0)
    output, lse = device.attend(rows, gathered[0], gathered[1], tile.mask, dim**-0.5)
    partial = Partial(output, natural(lse))
    return partial if tile.empty is None else partial.cleared(tile.empty)


def _rows(blocks: torch.Tensor, tile: KeyTile) -> torch.Tensor:
    """The tile's rows of `blocks [num_blocks * kv_heads, block_size * head_dim]`: a view where they lie side by side."""
    if tile.run is None:
        return blocks.index_select(0, tile.rows)
    return blocks.narrow(0, tile.run, len(tile.rows))
