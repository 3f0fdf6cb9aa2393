"""What a model's caches look like before they are cut over ranks."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from contracts.errors import InvalidValueError
from contracts.manifest import CacheDtypes, Dtype, Namespace


class LayerType(StrEnum):
    """What mixes tokens in a layer, by the names of the model's configuration."""

    FULL = "full_attention"
    LINEAR = "linear_attention"


class CacheShape(msgspec.Struct, frozen=True, kw_only=True):
    """The dimensions that decide a layout. Counts of blocks and slots are those of one rank.

    `conv_kernel` is the width of the depthwise convolution (its state keeps one row less); `num_draft_layers` are full
    attention layers of the draft head, held like the target's or, with `draft_whole`, with all their heads on every rank; what it
    goes on from is a hidden state of `hidden_size` elements. A draft that is a model of its own has KV heads of its own:
    `draft_num_kv_heads` of `draft_head_dim` elements, 0 for those of the target.
    """

    layer_types: tuple[LayerType, ...]
    num_kv_heads: int
    head_dim: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    dtypes: CacheDtypes
    block_size: int
    num_blocks: int
    num_slots: int
    num_speculative_tokens: int = 0
    num_draft_layers: int = 0
    draft_whole: bool = False
    hidden_size: int = 0
    draft_num_kv_heads: int = 0
    draft_head_dim: int = 0

    def __post_init__(self) -> None:
        """Raise `InvalidValueError` for a count below its minimum or an SSM state that is not float32."""
        at_least_one = (
            "num_kv_heads",
            "head_dim",
            "num_key_heads",
            "num_value_heads",
            "key_head_dim",
            "value_head_dim",
            "block_size",
            "num_blocks",
            "num_slots",
        )
        minimum = dict.fromkeys(at_least_one, 1) | {
            "conv_kernel": 2,
            "num_speculative_tokens": 0,
            "num_draft_layers": 0,
            "draft_num_kv_heads": 0,
            "draft_head_dim": 0,
            "hidden_size": 1 if self.num_draft_layers else 0,
        }
        for name, least in minimum.items():
            value = getattr(self, name)
            if value < least:
                raise InvalidValueError(field=name, value=value, rule=f"{least} or more")
        if not self.layer_types:
            raise InvalidValueError(field="layer_types", value=self.layer_types, rule="at least one layer")
        if self.dtypes.ssm is not Dtype.FLOAT32:
            raise InvalidValueError(field="dtypes.ssm", value=self.dtypes.ssm, rule="float32")

    def num_kv_heads_of(self, namespace: Namespace) -> int:
        """KV heads of each full-attention layer, over all ranks."""
        return self.draft_num_kv_heads or self.num_kv_heads if namespace is Namespace.DRAFT else self.num_kv_heads

    def head_dim_of(self, namespace: Namespace) -> int:
        """Elements of a key, and of a value, of one KV head."""
        return self.draft_head_dim or self.head_dim if namespace is Namespace.DRAFT else self.head_dim

    @property
    def moved_conv_rows(self) -> int:
        """Rows of a CONV slot that are the state of one sequence; a slot has `num_speculative_tokens` more."""
        return self.conv_kernel - 1
