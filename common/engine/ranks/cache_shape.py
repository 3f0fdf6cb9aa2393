"""Which caches a model keeps, from its configuration. No torch: a worker plans its memory before any rank loads it."""

from __future__ import annotations

from common.engine.model.config import CONV_KERNEL, ModelConfig
from common.layout.shape import CacheShape, LayerType
from contracts.manifest import CacheDtypes, Dtype


def cache_shape(
    config: ModelConfig,
    *,
    dtype: Dtype,
    block_size: int,
    num_blocks: int,
    num_slots: int,
    num_speculative_tokens: int = 0,
    keeps_draft: bool = False,
    draft_whole: bool = False,
) -> CacheShape:
    """The dimensions of a model's caches, with `num_speculative_tokens` more rows of states than one.

    The counts are those of one rank. With `keeps_draft` the draft head has a cache too, with `draft_whole` on each rank all of it.
    """
    return CacheShape(
        layer_types=tuple(LayerType(kind) for kind in config.layer_types),
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_head_dim=config.linear_key_head_dim,
        value_head_dim=config.linear_value_head_dim,
        conv_kernel=CONV_KERNEL,
        dtypes=CacheDtypes(key=dtype, value=dtype, conv=dtype),
        block_size=block_size,
        num_blocks=num_blocks,
        num_slots=num_slots,
        num_speculative_tokens=num_speculative_tokens,
        num_draft_layers=config.num_mtp_layers if keeps_draft else 0,
        draft_whole=draft_whole and keeps_draft,
        hidden_size=config.hidden_size,
    )
