"""The multi-token-prediction head: one full-attention layer that guesses the token after next.

The pair of h_t, the model's state at position t after its final norm, and x_{t+1} gives
x = combine [norm_e(embedding of x_{t+1}) ; norm_h(h_t)], the layer, and a last norm; from that the model's own lm_head guesses
x_{t+2}, and it is the h of the next pair of a chain. The pair is turned by position t, and kept at position t + 1 of the draft's
cache, so that what a block of it holds depends on tokens of that block and before alone; position 0 stays empty.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from common.engine.model.attention_metadata import AttentionMetadata
from common.engine.model.full_attention import FullAttention, PagedCache
from common.engine.model.norm import rms_norm
from common.engine.model.tensor_parallel import TensorParallel
from common.engine.model.weights import FullAttentionWeights, ModelWeights, MtpWeights
from contracts.manifest import Namespace

FIRST_KEY: Final = Namespace.DRAFT.first_token
"""The first position of the draft's cache that holds anything."""


class MtpHead:
    """One rank's head. `body` are the ranks that share its layer, `ranks` those that share embedding and lm_head with the model."""

    def __init__(
        self,
        weights: MtpWeights,
        shared: ModelWeights,
        cache: PagedCache,
        *,
        body: TensorParallel,
        ranks: TensorParallel,
        attention: FullAttention,
        eps: float,
    ) -> None:
        self.weights: Final = weights
        self._shared = shared
        self._cache = cache
        self._body = body
        self._ranks = ranks
        self._attention = attention
        self._eps = eps

    @torch.inference_mode()
    def forward(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Compute pairs, and keep their keys and values: `hidden [n, hidden]` at `positions [n]`, each with the token behind it.

        `metadata` are of positions + 1, by a geometry whose `first_key` is FIRST_KEY. Returns what `logits` and the next pair of
        a chain take, `[n, hidden]`.
        """
        layer, eps = self.weights.layer, self._eps
        mixer = layer.mixer
        assert isinstance(mixer, FullAttentionWeights)  # noqa: S101 - as it was loaded
        embedded = rms_norm(self._ranks.embed(self._shared.embedding, token_ids), self.weights.embedding_norm, eps)
        before = rms_norm(hidden, self.weights.hidden_norm, eps)
        x = functional.linear(torch.cat((embedded, before), -1), self.weights.combine)
        rope = self._attention.rotary.table(positions, x.dtype)
        asked = self._attention.write(mixer, rms_norm(x, layer.input_norm, eps), rope, self._cache, metadata)
        mixed = self._attention.attend(asked, self._cache, metadata)
        x = self._body.add_projected(x, mixed, mixer.out_proj)
        x = self._body.add_mlp(layer, x, rms_norm(x, layer.mlp_norm, eps))
        return rms_norm(x, self.weights.norm, eps)

    def logits(self, output: torch.Tensor) -> torch.Tensor | None:
        """Logits `[n, vocab_size]` of the tokens that are guessed, on the sampling rank; None on others."""
        return self._ranks.logits(self._shared.lm_head, output)
