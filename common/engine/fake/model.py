"""The model that fake engines pretend to have: its caches, and over how many ranks it can be cut. No torch."""

from __future__ import annotations

from typing import Final

from common.layout.context_parallel import check_group
from common.layout.heads import even_shard, num_replicas
from common.layout.shape import CacheShape, LayerType
from contracts.errors import InvalidValueError
from contracts.manifest import CacheDtypes, Dtype

_HIDDEN: Final = 16


def fake_shape(
    *,
    block_size: int = 16,
    num_blocks: int = 1,
    num_slots: int = 1,
    num_speculative_tokens: int = 0,
    keeps_draft: bool = False,
    draft_whole: bool = False,
) -> CacheShape:
    """One linear and one full-attention layer, with two KV heads and four of each other kind; with `keeps_draft` one of a draft head."""
    return CacheShape(
        layer_types=(LayerType.LINEAR, LayerType.FULL),
        num_kv_heads=2,
        head_dim=8,
        num_key_heads=4,
        num_value_heads=4,
        key_head_dim=8,
        value_head_dim=8,
        conv_kernel=4,
        dtypes=CacheDtypes(key=Dtype.FLOAT32, value=Dtype.FLOAT32, conv=Dtype.FLOAT32),
        block_size=block_size,
        num_blocks=num_blocks,
        num_slots=num_slots,
        hidden_size=_HIDDEN,
        num_speculative_tokens=num_speculative_tokens,
        num_draft_layers=FakeModel.num_mtp_layers if keeps_draft else 0,
        draft_whole=draft_whole and keeps_draft,
    )


class FakeModel:
    """Says what can be cut, as `common.engine.model.config.ModelConfig` does for a real one."""

    num_mtp_layers: Final = 1

    def __init__(self) -> None:
        self._shape = fake_shape()

    def check_tensor_parallel(self, tp: int) -> None:
        """Raise `InvalidValueError` unless the heads can be cut over `tp` ranks."""
        try:
            for name in ("num_key_heads", "num_value_heads"):
                even_shard(name, getattr(self._shape, name), tp, 0)
            num_replicas(self._shape.num_kv_heads, tp)
        except InvalidValueError as error:
            raise InvalidValueError(field="tp", value=tp, rule=error.rule_text) from error

    def check_context_parallel(self, tp: int, dcp: int) -> None:
        """Raise `InvalidValueError` unless `dcp` ranks out of `tp` hold the same KV head."""
        try:
            check_group(self._shape.num_kv_heads, tp, dcp)
        except InvalidValueError as error:
            raise InvalidValueError(field="dcp", value=dcp, rule=error.rule_text) from error
