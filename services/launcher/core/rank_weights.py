"""How many bytes of weights a rank holds: from the shapes that the configuration implies, without a checkpoint's files.

Matrices have the worker's dtype. Norms, the decay and the bias of the time step are float32, whatever that is. The draft (MTP)
head is loaded where its cache is kept.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from common.engine.model.config import CONV_KERNEL, FULL_ATTENTION, ModelConfig
from common.engine.model.shard import RankShard
from contracts.manifest import Dtype


class _Numbers(NamedTuple):
    """Elements in the worker's dtype, and in float32."""

    matrices: int
    small: int


_FLOAT32_BYTES: Final = Dtype.FLOAT32.itemsize


def rank_weight_bytes(shard: RankShard, dtype: Dtype, draft: RankShard | None = None) -> int:
    """Bytes of all weights of one rank; with the `draft` head as that shard cuts it, where there is one."""
    config, hidden = shard.config, shard.config.hidden_size
    tables = 1 if config.tie_word_embeddings else 2
    found = [_Numbers(tables * shard.vocab_size * hidden, hidden)]
    for kind in config.layer_types:
        found += [_mlp(shard), _full(shard) if kind == FULL_ATTENTION else _linear(shard)]
    if draft is not None:
        found += [_Numbers(2 * hidden * hidden, 3 * hidden), _mlp(draft), _full(draft)]
    matrices, small = map(sum, zip(*found, strict=True))
    return matrices * dtype.itemsize + small * _FLOAT32_BYTES


def num_draft_parameters(config: ModelConfig) -> int:
    """Parameters of the draft head, without the tables that it shares with the model; 0 where the checkpoint has none."""
    if not config.num_mtp_layers:
        return 0
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layer = (3 * queries + 2 * keys) * hidden + 2 * dim + 3 * config.intermediate_size * hidden + 2 * hidden
    return 2 * hidden * hidden + 3 * hidden + config.num_mtp_layers * layer


def num_parameters(config: ModelConfig) -> int:
    """Parameters of the language model, without vision tower and draft head; a tied table counts once."""
    hidden, inner = config.hidden_size, config.intermediate_size
    tables = 1 if config.tie_word_embeddings else 2
    total = tables * config.vocab_size * hidden + hidden
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    heads, values = config.linear_num_value_heads, config.value_dim
    full = (3 * queries + 2 * keys) * hidden + 2 * config.head_dim
    linear = (config.conv_channels + 2 * values + 2 * heads) * hidden + CONV_KERNEL * config.conv_channels
    linear += 2 * heads + config.linear_value_head_dim
    for kind in config.layer_types:
        total += 3 * inner * hidden + 2 * hidden + (full if kind == FULL_ATTENTION else linear)
    return total


def _mlp(shard: RankShard) -> _Numbers:
    hidden = shard.config.hidden_size
    return _Numbers(3 * len(shard.mlp_rows) * hidden, 2 * hidden)


def _full(shard: RankShard) -> _Numbers:
    """The norms of queries and keys are kept once a head."""
    dim, hidden = shard.config.head_dim, shard.config.hidden_size
    queries, keys = len(shard.query_heads), len(shard.kv_heads)
    return _Numbers((3 * queries + 2 * keys) * dim * hidden, (queries + keys) * dim)


def _linear(shard: RankShard) -> _Numbers:
    hidden, heads = shard.config.hidden_size, len(shard.linear_value_heads)
    rows = shard.conv_channels + 2 * shard.value_channels + 2 * heads
    small = 2 * heads + shard.config.linear_value_head_dim
    return _Numbers(rows * hidden + CONV_KERNEL * shard.conv_channels, small)
