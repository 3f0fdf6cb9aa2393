"""Who sees which keys in one step: computed once a step from global lengths, used by every full-attention layer.

Without context parallelism is the case of a group of one rank, by the same formulas (`common.layout.context_parallel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from common.engine.model.shard import RankShard

QUERY_TILE: Final = 256
"""Most query rows of one sequence that meet a key tile at once."""
KEY_TILE: Final = 2048
"""Most keys of one sequence that are gathered at once."""
MAX_BATCHED_TOKENS: Final = 16
"""Most tokens of a sequence that attend together with those of others: batches are for decoding, not for prompts."""
BATCH_KEYS: Final = 16384
"""Most keys of a whole decode batch that are gathered at once."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SequenceView:
    """What attention must know of one sequence of a step: its (local) blocks, and the positions that it adds."""

    block_ids: Sequence[int]
    start: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class KeyTile:
    """Some keys of each sequence of a group.

    `rows` `[B * kv_heads * blocks]` index a cache seen as `[num_blocks * kv_heads, block_size * head_dim]`; of the keys that
    they bring, the first `num_keys` count. `mask` is None (all rows see all keys) or additive fp32 `[B, 1, R, num_keys]`.
    `empty` marks the rows, `[B, 1, R]`, that see no key of the tile; `foreign` marks the keys, `[B, 1, num_keys, 1]`, that no row
    of their sequence sees: memory that may hold anything. Both are None when there are none. `run` is the first of `rows` if they
    follow each other and all keys may be seen: then they can be read where they lie.
    """

    rows: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None
    empty: torch.Tensor | None
    foreign: torch.Tensor | None
    run: int | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionGroup:
    """Query rows `[first, first + batch * num_queries)` of the step: `batch` sequences with `num_queries` rows each."""

    first: int
    batch: int
    num_queries: int
    tiles: tuple[KeyTile, ...]


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """One step of one rank.

    `write_rows` `[tokens written * kv_heads]` say where K and V of the step's tokens go, in a cache seen as
    `[num_blocks * kv_heads * block_size, head_dim]`; `written` selects those tokens (None: all; other ranks of a
    context-parallel group hold the rest).
    """

    write_rows: torch.Tensor
    written: torch.Tensor | None
    groups: tuple[AttentionGroup, ...]


@dataclass(frozen=True, kw_only=True)
class AttentionGeometry:
    """The sizes that metadata depend on: heads, and this rank's place in the context-parallel group.

    `num_query_heads` counts the heads whose queries meet this rank's keys: those of all ranks of its group.
    """

    num_query_heads: int
    num_kv_heads: int
    block_size: int
    dcp_rank: int = 0
    dcp_size: int = 1
    first_key: int = 0

    def local_lengths(self, lengths: Ints) -> Ints:
        """Keys that this rank holds of the first `lengths` of a sequence (vectorised `local_length`)."""
        if self.dcp_size == 1:
            return lengths
        rounds, rest = np.divmod(lengths, self.block_size * self.dcp_size)
        local: Ints = rounds * self.block_size + np.clip(rest - self.dcp_rank * self.block_size, 0, self.block_size)
        return local

    def build(self, sequences: Sequence[SequenceView]) -> AttentionMetadata:
        """Metadata of a step whose rows are the tokens of `sequences` in order.

        Neighbours with the same few tokens share a group: give them side by side.
        """
        write_rows, written = self._writes(sequences)
        groups = self._groups(sequences, [view.num_tokens for view in sequences])
        return AttentionMetadata(write_rows=write_rows, written=written, groups=groups)

    def only(
        self, metadata: AttentionMetadata, sequences: Sequence[SequenceView], wanted: Sequence[int]
    ) -> AttentionMetadata:
        """`metadata` of the same step with fewer query rows: the last `wanted[i]` tokens of sequence i, in the order of `sequences`."""
        groups = self._groups(sequences, wanted)
        return AttentionMetadata(write_rows=metadata.write_rows, written=metadata.written, groups=groups)

    def _groups(self, sequences: Sequence[SequenceView], wanted: Sequence[int]) -> tuple[AttentionGroup, ...]:
        groups = []
        row = 0
        pairs = [(view, count) for view, count in zip(sequences, wanted, strict=True) if count]
        for (num_tokens, count), members in groupby(pairs, lambda pair: (pair[0].num_tokens, pair[1])):
            views = [view for view, _ in members]
            batches = [views] if num_tokens <= min(MAX_BATCHED_TOKENS, QUERY_TILE) else [[view] for view in views]
            for batch in batches:
                for skip in range(num_tokens - count, num_tokens, QUERY_TILE):
                    size = min(QUERY_TILE, num_tokens - skip)
                    groups.append(self._group(batch, first=row, skip=skip, count=size))
                    row += len(batch) * size
        return tuple(groups)

    def _writes(self, sequences: Sequence[SequenceView]) -> tuple[torch.Tensor, torch.Tensor | None]:
        size, heads = self.block_size, self.num_kv_heads
        firsts: list[int] = []  # where the first head of each token goes that is kept here
        owned: list[int] = []
        token = 0
        for view in sequences:
            at, end = view.start, view.start + view.num_tokens
            while at < end:  # block by block: steps of decoding have few tokens, and prompts few blocks
                block, offset = divmod(at, size)
                count = min(size - offset, end - at)
                if block % self.dcp_size == self.dcp_rank:
                    first = view.block_ids[block // self.dcp_size] * heads * size + offset
                    firsts.extend(range(first, first + count))
                    owned.extend(range(token, token + count))
                token += count
                at += count
        rows = np.array(firsts, dtype=np.int64)[:, None] + np.arange(heads) * size
        write_rows = torch.from_numpy(rows.reshape(-1))
        return write_rows, None if self.dcp_size == 1 else torch.tensor(owned, dtype=torch.int64)

    def _group(self, views: Sequence[SequenceView], *, first: int, skip: int, count: int) -> AttentionGroup:
        starts = np.array([view.start + skip for view in views], dtype=np.int64)
        visible = self.local_lengths(starts[:, None] + np.arange(1, count + 1))
        longest = int(visible.max())
        tile_blocks = max(1, min(KEY_TILE, BATCH_KEYS // len(views)) // self.block_size)
        num_blocks = max(1, -(-longest // self.block_size))
        table = np.zeros((len(views), num_blocks), dtype=np.int64)
        for i, view in enumerate(views):
            held = view.block_ids[:num_blocks]
            table[i, : len(held)] = held
        tiles = tuple(
            self._tile(table[:, at : at + tile_blocks], visible, at * self.block_size, longest)
            for at in range(0, num_blocks, tile_blocks)
        )
        return AttentionGroup(first=first, batch=len(views), num_queries=count, tiles=tiles)

    def _tile(self, table: Ints, visible: Ints, start: int, longest: int) -> KeyTile:
        heads = np.arange(self.num_kv_heads)[None, :, None]
        rows = (table[:, None] * self.num_kv_heads + heads).reshape(-1)
        num_keys = max(1, min(table.shape[1] * self.block_size, longest - start))
        mask = empty = foreign = None
        low = max(0, self.first_key - start) if self.dcp_rank == 0 else 0
        shortest = int(visible.min())
        if shortest < start + num_keys or low:
            # One row a query head of the KV head's group and query: heads outside, queries inside.
            repeats = self.num_query_heads // self.num_kv_heads if visible.shape[1] > 1 else 1
            seen = torch.from_numpy(np.concatenate([visible - start] * repeats, axis=1))[:, None]
            keys = torch.arange(num_keys)
            # What all rows see, mostly nearly everything, is left as it is.
            common = min(max(shortest - start, 0), num_keys)
            mask = torch.zeros(*seen.shape, num_keys)
            mask[..., common:].masked_fill_(keys[common:] >= seen[..., None], -torch.inf)
            mask[..., :low] = -torch.inf
            empty = seen <= low if shortest <= start + low else None
            furthest = torch.from_numpy(visible.max(1) - start)
            if low or int(furthest.min()) < num_keys:
                foreign = ((keys >= furthest[:, None]) | (keys < low))[:, None, :, None]
        follows = foreign is None and len(table) == 1 and bool((np.diff(rows) == 1).all())
        return KeyTile(
            rows=torch.from_numpy(rows),
            num_keys=num_keys,
            mask=mask,
            empty=empty,
            foreign=foreign,
            run=int(rows[0]) if follows else None,
        )


def attention_geometry(shard: RankShard, block_size: int, *, first_key: int = 0) -> AttentionGeometry:
    """The geometry of a rank: the heads that it attends with, and its place among those that share a sequence's blocks."""
    return AttentionGeometry(
        num_query_heads=shard.num_attending_heads,
        num_kv_heads=len(shard.kv_heads),
        block_size=block_size,
        dcp_rank=shard.dcp_rank,
        dcp_size=shard.dcp_size,
        first_key=first_key,
    )
