"""The forward pass of a dense Qwen3.5 on one tensor-parallel rank, over a flattened batch of chunks and single tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from common.engine.collectives.port import Collectives
from common.engine.device.port import Device
from common.engine.model.context_group import ContextGroup
from common.engine.model.full_attention import FullAttention, PagedCache
from common.engine.model.linear_attention import LinearAttention
from common.engine.model.norm import rms_norm
from common.engine.model.shard import RankShard
from common.engine.model.tensor_parallel import TensorParallel
from common.engine.model.weights import FullAttentionWeights, LinearAttentionWeights, ModelWeights
from common.engine.ranks.cache import LayerCaches
from common.engine.ranks.step_buffers import StepInput
from contracts.errors import InvalidValueError

LayerHook = Callable[[int], None]


def ignore_layer(layer: int) -> None:
    """Do nothing: what a hook is when nobody listens."""


class Output(NamedTuple):
    """What a pass gives: logits `[L, vocab_size]` of the wanted rows, on the sampling rank if there are any, None elsewhere.

    `hidden` `[T, hidden]` are all rows after the final norm, None unless they were asked for.
    """

    logits: torch.Tensor | None
    hidden: torch.Tensor | None


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
        if shard.dcp_size != (1 if context is None else context.size):
            raise InvalidValueError(field="context", value=context, rule=f"a group of {shard.dcp_size} ranks")
        self.shard = shard
        self.config = shard.config
        self.weights = weights
        self.caches = caches
        self.ranks = TensorParallel(shard, collectives)
        self.attention = FullAttention(shard, device, context)
        self._linear = LinearAttention(shard)

    @torch.inference_mode()
    def forward(
        self,
        step: StepInput,
        *,
        on_layer_start: LayerHook = ignore_layer,
        on_layer_written: LayerHook = ignore_layer,
        keep_hidden: bool = False,
    ) -> Output:
        """Run the step, and extend the caches.

        Behind the caches of the last layer only rows with logits are computed, unless `keep_hidden` asks for all.
        `on_layer_start(i)` is called when layer i begins,
        `on_layer_written(i)` as soon as what this step adds to layer i's caches is complete: its readers may start.
        """
        hidden = self.ranks.embed(self.weights.embedding, step.token_ids)
        rope = self.attention.rotary.table(step.positions, hidden.dtype)
        run = _Pass(step=step, rope=rope, on_layer_written=on_layer_written)
        last = len(self.weights.layers) - 1
        eps = self.config.rms_norm_eps
        wanted = step.logit_rows
        for index, layer in enumerate(self.weights.layers):
            on_layer_start(index)
            x = rms_norm(hidden, layer.input_norm, eps)
            mixer = layer.mixer
            narrow = index == last and len(wanted) < len(hidden) and not keep_hidden
            if isinstance(mixer, FullAttentionWeights):
                mixed = self._full_attention(index, mixer, x, run, narrow=narrow)
            else:
                mixed = self._linear_attention(index, mixer, x, run, narrow=narrow)
            if narrow:
                if not len(wanted):
                    return Output(None, None)
                hidden = hidden.index_select(0, wanted)
            hidden = self.ranks.add_projected(hidden, mixed, mixer.out_proj)
            hidden = self.ranks.add_mlp(layer, hidden, rms_norm(hidden, layer.mlp_norm, eps))
        hidden = rms_norm(hidden, self.weights.final_norm, eps)
        if not len(wanted):
            return Output(None, hidden)
        rows = step.logit_order if len(hidden) == len(wanted) else wanted.index_select(0, step.logit_order)
        logits = self.ranks.logits(self.weights.lm_head, hidden.index_select(0, rows))
        return Output(logits, hidden if keep_hidden else None)

    def _full_attention(
        self, index: int, weights: FullAttentionWeights, x: torch.Tensor, run: _Pass, *, narrow: bool
    ) -> torch.Tensor:
        """Up to the output projection: `[T, heads * head_dim]`; `narrow` gives the rows with logits alone."""
        cache = PagedCache(self.caches.key[index], self.caches.value[index])
        asked = self.attention.write(weights, x, run.rope, cache, run.step.attention)
        run.on_layer_written(index)
        if not narrow:
            return self.attention.attend(asked, cache, run.step.attention)
        asked = asked.rows(run.step.logit_rows)
        return self.attention.attend(asked, cache, run.step.last_attention) if len(asked.query) else asked.gate

    def _linear_attention(
        self, index: int, weights: LinearAttentionWeights, x: torch.Tensor, run: _Pass, *, narrow: bool
    ) -> torch.Tensor:
        mixed = self._linear.mix(weights, x, self.caches.conv[index], self.caches.ssm[index], run.step)
        run.on_layer_written(index)
        return mixed.index_select(0, run.step.logit_rows) if narrow else mixed
