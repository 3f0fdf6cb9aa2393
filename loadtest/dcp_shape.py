"""The model whose decode steps `dcp` measures: eight query heads for one KV head, and room for a long context. No torch."""

from __future__ import annotations

from typing import Final

from common.engine.model.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig
from common.engine.ranks.cache_shape import cache_shape
from common.layout.context_parallel import local_length
from common.layout.region import RegionMap, lay_out
from contracts.manifest import Coordinates, Dtype

BLOCK_TOKENS: Final = 16
DTYPE: Final = Dtype.FLOAT32
_MOST_TOKENS: Final = 1 << 20


def long_context_model() -> ModelConfig:
    """Eight layers, two of them with full attention; 256 dims a head, as in the family's real models, and little of all else.

    One KV head: all ranks hold it, and any number of them may share its blocks.
    """
    return ModelConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=(LINEAR_ATTENTION, LINEAR_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION) * 2,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        rms_norm_eps=1e-6,
        max_position_embeddings=_MOST_TOKENS,
        tie_word_embeddings=True,
        num_mtp_layers=0,
        eos_token_ids=(),
    )


def blocks_for(num_tokens: int, dcp: int) -> int:
    """Blocks of each rank for a sequence, when `dcp` ranks share it."""
    return -(-num_tokens // (BLOCK_TOKENS * dcp))


def rank_region(*, rank: int, tp: int, dcp: int, num_blocks: int, num_slots: int = 1) -> RegionMap:
    """The caches of one rank."""
    shape = cache_shape(
        long_context_model(), dtype=DTYPE, block_size=BLOCK_TOKENS, num_blocks=num_blocks, num_slots=num_slots
    )
    return lay_out(shape, Coordinates(tp_rank=rank, tp_size=tp, dcp_rank=rank % dcp, dcp_size=dcp))


def attention_bytes(num_tokens: int, *, dcp: int, rank: int) -> int:
    """Bytes of keys and values that a rank has to read for one token behind `num_tokens` others, in all layers."""
    config = long_context_model()
    held = local_length(num_tokens + 1, BLOCK_TOKENS, dcp, rank % dcp)
    return 2 * len(config.full_layers) * held * config.head_dim * DTYPE.itemsize
