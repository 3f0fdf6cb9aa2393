"""The parts of a forward pass in which the ranks of a tensor-parallel group speak to each other."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from common.engine.collectives.port import Collectives
from common.engine.model.shard import RankShard
from common.engine.model.weights import LayerWeights
from contracts.errors import InvalidValueError

SAMPLING_RANK: Final = 0


class TensorParallel:
    """One rank's end. `collectives` may be None for tensor parallel 1, and are not used then."""

    def __init__(self, shard: RankShard, collectives: Collectives | None) -> None:
        if shard.tp_size > 1 and (
            collectives is None or (collectives.rank, collectives.size) != (shard.tp_rank, shard.tp_size)
        ):
            raise InvalidValueError(field="collectives", value=collectives, rule="a group of the tensor-parallel ranks")
        self._shard = shard
        self._group = collectives if shard.tp_size > 1 else None

    def embed(self, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows `[T, hidden]` of an embedding of which each rank has `[shard.vocab_size, hidden]`."""
        if self._group is None:
            return embedding.index_select(0, token_ids)
        rows = self._shard.vocab_rows
        local = token_ids - rows.start
        foreign = (local < 0) | (local >= len(rows))
        hidden = embedding.index_select(0, local.masked_fill_(foreign, 0))
        hidden.masked_fill_(foreign[:, None], 0.0)
        self._group.all_reduce_sum(hidden)
        return hidden

    def add_projected(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return hidden + x weight^T, summed over the ranks: rank 0 brings `hidden` into the sum."""
        if self._group is None:
            return torch.addmm(hidden, x, weight.mT)
        partial = torch.addmm(hidden, x, weight.mT) if self._group.rank == 0 else torch.mm(x, weight.mT)
        self._group.all_reduce_sum(partial)
        return partial

    def add_mlp(self, layer: LayerWeights, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return hidden + the gated MLP of `x`, which is `hidden` after the layer's second norm."""
        gate, up = functional.linear(x, layer.gate_up).chunk(2, -1)
        return self.add_projected(hidden, functional.silu(gate).mul_(up), layer.down)

    def logits(self, lm_head: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits `[T, vocab_size]` of normed rows `[T, hidden]` on the sampling rank, None on others."""
        logits = functional.linear(hidden, lm_head)
        if self._group is None:
            return logits
        gathered = self._group.gather_to(SAMPLING_RANK, logits)
        return None if gathered is None else gathered[:, : self._shard.config.vocab_size]
