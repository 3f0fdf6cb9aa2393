"""Which part of the model one tensor-parallel rank owns. Pure arithmetic; the rules are those of the cache layout."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.model.config import ModelConfig
from common.layout import context_parallel
from common.layout.heads import kv_shard
from contracts.errors import InvalidValueError


@dataclass(frozen=True, kw_only=True)
class RankShard:
    """Rank `tp_rank` of `tp_size`, each `dcp_size` of which share the blocks of a KV head.

    Raises `InvalidValueError` when the model cannot be cut that way.
    """

    config: ModelConfig
    tp_rank: int = 0
    tp_size: int = 1
    dcp_size: int = 1

    def __post_init__(self) -> None:
        self.config.check_tensor_parallel(self.tp_size)
        self.config.check_context_parallel(self.tp_size, self.dcp_size)
        if not 0 <= self.tp_rank < self.tp_size:
            raise InvalidValueError(field="tp_rank", value=self.tp_rank, rule=f"0 to tp_size - 1 ({self.tp_size - 1})")

    def _even(self, total: int) -> range:
        size = total // self.tp_size
        return range(self.tp_rank * size, (self.tp_rank + 1) * size)

    @property
    def dcp_rank(self) -> int:
        """The rank's place among those that share its KV head's blocks."""
        return context_parallel.dcp_rank(self.tp_rank, self.dcp_size)

    @property
    def num_attending_heads(self) -> int:
        """Query heads that attend to this rank's keys: those of all ranks that share the KV head's blocks."""
        return len(self.query_heads) * self.dcp_size

    @property
    def query_heads(self) -> range:
        """Query heads of this rank."""
        return self._even(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> range:
        """KV heads of this rank; with fewer heads than ranks, neighbours share one."""
        held = kv_shard(self.config.num_key_value_heads, self.tp_size, self.tp_rank)
        return range(held.start, held.start + held.length)

    @property
    def linear_key_heads(self) -> range:
        """Key heads (of Q and of K) of the linear layers."""
        return self._even(self.config.linear_num_key_heads)

    @property
    def linear_value_heads(self) -> range:
        """Value heads of the linear layers."""
        return self._even(self.config.linear_num_value_heads)

    @property
    def mlp_rows(self) -> range:
        """Rows of gate and up, columns of down."""
        return self._even(self.config.intermediate_size)

    @property
    def vocab_size(self) -> int:
        """Vocabulary rows of every rank: the last rank's are padded with zeros when the division leaves a rest."""
        return -(-self.config.vocab_size // self.tp_size)

    @property
    def vocab_rows(self) -> range:
        """Real vocabulary rows of this rank (without padding)."""
        start = min(self.tp_rank * self.vocab_size, self.config.vocab_size)
        return range(start, min(start + self.vocab_size, self.config.vocab_size))

    @property
    def key_channels(self) -> int:
        """Channels of Q, and of K, in the conv state of this rank."""
        return len(self.linear_key_heads) * self.config.linear_key_head_dim

    @property
    def value_channels(self) -> int:
        """Channels of V in the conv state of this rank."""
        return len(self.linear_value_heads) * self.config.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """All channels of the conv state of this rank: [Q | K | V]."""
        return 2 * self.key_channels + self.value_channels
