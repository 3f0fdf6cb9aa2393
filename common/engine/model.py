"""The forward pass of a dense Qwen3.5 on one tensor-parallel rank, over a flattened batch of chunks and single tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from common.engine.attention import paged_attention, write_paged
from common.engine.cache import LayerCaches
from common.engine.collectives.port import Collectives
from common.engine.context_group import ContextGroup
from common.engine.device.port import Device
from common.engine.linear_attention import LinearAttention
from common.engine.norm import rms_norm
from common.engine.rotary import Rotary
from common.engine.shard import RankShard
from common.engine.step_buffers import StepInput
from common.engine.weights import FullAttentionWeights, LayerWeights, LinearAttentionWeights, ModelWeights
from contracts.errors import InvalidValueError

SAMPLING_RANK: Final = 0

LayerHook = Callable[[int], None]


def ignore_layer(layer: int) -> None:
    """Do nothing: what a hook is when nobody listens."""


class _Pass(NamedTuple):
    """What all layers of one forward pass share."""

    step: StepInput
    rope: tuple[torch.Tensor, torch.Tensor]
    on_layer_written: LayerHook


class Model:
    """One rank's model. Not safe for use by two threads at once.

    `collectives` may be None for tensor parallel 1; `context` is the rank's group where several share the blocks of a KV head.
    """

    def __init__(
        self,
        shard: RankShard,
        weights: ModelWeights,
        caches: LayerCaches,
        collectives: Collectives | None,
        device: Device,
        *,
        context: ContextGroup | None = None,
    ) -> None:
        if shard.tp_size > 1 and (
            collectives is None or (collectives.rank, collectives.size) != (shard.tp_rank, shard.tp_size)
        ):
            raise InvalidValueError(field="collectives", value=collectives, rule="a group of the tensor-parallel ranks")
        if shard.dcp_size != (1 if context is None else context.size):
            raise InvalidValueError(field="context", value=context, rule=f"a group of {shard.dcp_size} ranks")
        self.shard = shard
        self.config = shard.config
        self.weights = weights
        self.caches = caches
        self.device = device
        self._group = collectives if shard.tp_size > 1 else None
        self._context = context
        self._linear = LinearAttention(shard)
        self._rotary = Rotary(shard.config, device.torch_device)

    @torch.inference_mode()
    def forward(
        self, step: StepInput, *, on_layer_start: LayerHook = ignore_layer, on_layer_written: LayerHook = ignore_layer
    ) -> torch.Tensor | None:
        """Run the step, extend the caches, and return logits `[len(step.logit_rows), vocab_size]` on the sampling rank.

        Other ranks, and steps without logit rows, get None. Behind the caches of the last layer only rows with logits are computed.
        `on_layer_start(i)` is called when layer i begins,
        `on_layer_written(i)` as soon as what this step adds to layer i's caches is complete: its readers may start.
        """
        hidden = self._embed(step.token_ids)
        rope = self._rotary.table(step.positions, hidden.dtype)
        run = _Pass(step=step, rope=rope, on_layer_written=on_layer_written)
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            on_layer_start(index)
            x = rms_norm(hidden, layer.input_norm, self.config.rms_norm_eps)
            mixer = layer.mixer
            narrow = index == last and len(step.logit_rows) < len(hidden)
            if isinstance(mixer, FullAttentionWeights):
                mixed = self._attention(index, mixer, x, run, narrow=narrow)
            else:
                mixed = self._linear_attention(index, mixer, x, run, narrow=narrow)
            if narrow:
                if not len(step.logit_rows):
                    return None
                hidden = hidden.index_select(0, step.logit_rows)
            hidden = self._add_projected(hidden, mixed, mixer.out_proj)
            hidden = self._mlp(layer, hidden)
        return self._logits(hidden.index_select(0, step.logit_order))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return self.weights.embedding.index_select(0, token_ids)
        local = token_ids - self.shard.vocab_rows.start
        foreign = (local < 0) | (local >= len(self.shard.vocab_rows))
        hidden = self.weights.embedding.index_select(0, local.masked_fill_(foreign, 0))
        hidden.masked_fill_(foreign[:, None], 0.0)
        self._group.all_reduce_sum(hidden)
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        hidden = rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
        logits = functional.linear(hidden, self.weights.lm_head)
        if self._group is None:
            return logits
        gathered = self._group.gather_to(SAMPLING_RANK, logits)
        return None if gathered is None else gathered[:, : self.config.vocab_size]

    def _add_projected(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return hidden + x weight^T, summed over the ranks: rank 0 brings `hidden` into the sum."""
        if self._group is None:
            return torch.addmm(hidden, x, weight.mT)
        partial = torch.addmm(hidden, x, weight.mT) if self._group.rank == 0 else torch.mm(x, weight.mT)
        self._group.all_reduce_sum(partial)
        return partial

    def _mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        x = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
        gate, up = functional.linear(x, layer.gate_up).chunk(2, -1)
        return self._add_projected(hidden, functional.silu(gate).mul_(up), layer.down)

    def _attention(
        self, index: int, weights: FullAttentionWeights, x: torch.Tensor, run: _Pass, *, narrow: bool
    ) -> torch.Tensor:
        """Full attention up to its output projection: `[T, heads * head_dim]`; `narrow` gives the rows with logits alone."""
        query, gate = self._write_attention(index, weights, x, run)
        run.on_layer_written(index)
        metadata = run.step.attention
        if narrow:
            metadata = run.step.last_attention
            query, gate = query.index_select(0, run.step.logit_rows), gate.index_select(0, run.step.logit_rows)
            if not len(query):
                return gate
        if self._context is not None:
            query = self._context.gather_queries(query)
        found = paged_attention(query, self.caches.key[index], self.caches.value[index], metadata, self.device)
        if self._context is not None:
            found = self._context.merge_own(found)
        return found.output.flatten(1).to(x.dtype).mul_(gate.sigmoid())

    def _linear_attention(
        self, index: int, weights: LinearAttentionWeights, x: torch.Tensor, run: _Pass, *, narrow: bool
    ) -> torch.Tensor:
        mixed = self._linear.mix(weights, x, self.caches.conv[index], self.caches.ssm[index], run.step)
        run.on_layer_written(index)
        return mixed.index_select(0, run.step.logit_rows) if narrow else mixed

    def _write_attention(
        self, index: int, weights: FullAttentionWeights, x: torch.Tensor, run: _Pass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's K and V; returns q `[T, heads, head_dim]` and the gate `[T, heads * head_dim]`."""
        heads, kv_heads, dim = len(self.shard.query_heads), len(self.shard.kv_heads), self.config.head_dim
        projected = functional.linear(x, weights.in_proj)
        turned, value, gate = projected.split_with_sizes([(heads + kv_heads) * dim, kv_heads * dim, heads * dim], -1)
        turned = rms_norm(turned.view(-1, heads + kv_heads, dim), None, self.config.rms_norm_eps).mul_(weights.qk_norm)
        self._rotary.apply_(turned, run.rope)
        query, key = turned.split_with_sizes([heads, kv_heads], 1)
        value = value.view(-1, kv_heads, dim)
        write_paged(self.caches.key[index], self.caches.value[index], key, value, run.step.attention)
        return query, gate
