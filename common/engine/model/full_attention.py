"""The full-attention mixer of a layer, of the model's own and of the draft head's, on one rank's heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from common.engine.device.port import Device
from common.engine.model.attention import paged_attention, write_paged
from common.engine.model.attention_metadata import AttentionMetadata
from common.engine.model.context_group import ContextGroup
from common.engine.model.norm import rms_norm
from common.engine.model.rotary import Rotary
from common.engine.model.shard import RankShard
from common.engine.model.weights import FullAttentionWeights


class PagedCache(NamedTuple):
    """A layer's caches, `[num_blocks, kv_heads, block_size, head_dim]` each."""

    key: torch.Tensor
    value: torch.Tensor


class Asked(NamedTuple):
    """What tokens ask of the cache: queries `[T, heads, head_dim]`, and the gates `[T, heads * head_dim]` of their answers."""

    query: torch.Tensor
    gate: torch.Tensor

    def rows(self, index: torch.Tensor) -> Asked:
        """Those of some rows."""
        return Asked(self.query.index_select(0, index), self.gate.index_select(0, index))


class FullAttention:
    """The mixer of all full-attention layers of a rank; weights and caches are given with each call.

    `context` is the rank's group where several share the blocks of a KV head.
    """

    def __init__(self, shard: RankShard, device: Device, context: ContextGroup | None) -> None:
        self._config = shard.config
        self._num_heads = len(shard.query_heads)
        self._num_kv_heads = len(shard.kv_heads)
        self._device = device
        self._context = context
        self.rotary = Rotary(shard.config, device.torch_device)

    def write(
        self,
        weights: FullAttentionWeights,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache: PagedCache,
        metadata: AttentionMetadata,
    ) -> Asked:
        """Project `x [T, hidden]` and store its keys and values; `rope` is `rotary.table` of its positions."""
        heads, kv_heads, dim = self._num_heads, self._num_kv_heads, self._config.head_dim
        projected = functional.linear(x, weights.in_proj)
        turned, value, gate = projected.split_with_sizes([(heads + kv_heads) * dim, kv_heads * dim, heads * dim], -1)
        turned = rms_norm(turned.view(-1, heads + kv_heads, dim), None, self._config.rms_norm_eps).mul_(weights.qk_norm)
        self.rotary.apply_(turned, rope)
        query, key = turned.split_with_sizes([heads, kv_heads], 1)
        write_paged(cache.key, cache.value, key, value.view(-1, kv_heads, dim), metadata)
        return Asked(query, gate)

    def attend(self, asked: Asked, cache: PagedCache, metadata: AttentionMetadata) -> torch.Tensor:
        """What goes into the output projection, `[T, heads * head_dim]`, in the dtype of the gates."""
        query, gate = asked
        if self._context is not None:
            query = self._context.gather_queries(query)
        found = paged_attention(query, cache.key, cache.value, metadata, self._device)
        if self._context is not None:
            found = self._context.merge_own(found)
        return found.output.flatten(1).to(gate.dtype).mul_(gate.sigmoid())
