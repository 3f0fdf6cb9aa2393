"""The caches whose pushes are measured: a checkpoint's own, and those of a large model, where copying outweighs asking."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from common.layout.shape import CacheShape, LayerType
from contracts.manifest import CacheDtypes, Dtype

BLOCK_TOKENS: Final = 16


def large_shape(num_blocks: int, num_slots: int) -> CacheShape:
    """The caches of the 4B model of the Qwen3.5 family: 32 layers, each fourth with full attention, bf16 but for the states."""
    linear, full = LayerType.LINEAR, LayerType.FULL
    return CacheShape(
        layer_types=(linear, linear, linear, full) * 8,
        num_kv_heads=4,
        head_dim=256,
        num_key_heads=16,
        num_value_heads=32,
        key_head_dim=128,
        value_head_dim=128,
        conv_kernel=4,
        dtypes=CacheDtypes(key=Dtype.BFLOAT16, value=Dtype.BFLOAT16, conv=Dtype.BFLOAT16),
        block_size=BLOCK_TOKENS,
        num_blocks=num_blocks,
        num_slots=num_slots,
    )


def model_shape(model: Path, num_blocks: int, num_slots: int) -> CacheShape:
    """The caches of a checkpoint in float32. Raises InvalidValueError for a checkpoint that cannot be read."""
    from common.engine.model.config import load_config
    from common.engine.ranks.cache_shape import cache_shape

    return cache_shape(
        load_config(model),
        dtype=Dtype.FLOAT32,
        block_size=BLOCK_TOKENS,
        num_blocks=num_blocks,
        num_slots=num_slots,
    )
