"""The weights of one rank, cut and fused the way the forward pass wants them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from common.engine.model.checkpoint import LM_HEAD, Checkpoint, CheckpointError
from common.engine.model.config import FULL_ATTENTION
from common.engine.model.shard import RankShard


@dataclass(frozen=True, kw_only=True)
class FullAttentionWeights:
    """`in_proj` rows are [all q heads | k heads | v heads | all gate heads]; `qk_norm` is 1 + w, one row per q and k head."""

    in_proj: torch.Tensor
    qk_norm: torch.Tensor
    out_proj: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class LinearAttentionWeights:
    """`in_proj` rows are [Q_r | K_r | V_r | z | b | a]; `conv` is [4, channels], oldest token first; the rest is fp32."""

    in_proj: torch.Tensor
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out_proj: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Norms are 1 + w in fp32; `gate_up` rows are [gate | up]."""

    input_norm: torch.Tensor
    mixer: FullAttentionWeights | LinearAttentionWeights
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """The model of one rank. `embedding` and `lm_head` are [shard.vocab_size, hidden], the same tensor when tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class MtpWeights:
    """The draft head. `combine` is `[hidden, 2 * hidden]`: columns are [embedding | hidden state]. Norms are 1 + w in fp32."""

    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    combine: torch.Tensor
    layer: LayerWeights
    norm: torch.Tensor


class _Reader:
    def __init__(self, checkpoint: Checkpoint, shard: RankShard, dtype: torch.dtype) -> None:
        self.checkpoint, self.shard, self.dtype = checkpoint, shard, dtype

    def get(self, name: str, *, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        return self.checkpoint.read(name, rows=rows, columns=columns).to(self.dtype)

    def own(self, name: str, *, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """A copy: what a file hands out may be a view of its mapping, which dies with it."""
        return self.get(name, rows=rows, columns=columns).clone(memory_format=torch.contiguous_format)

    def norm(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name).float() + 1.0

    def full(self, prefix: str) -> FullAttentionWeights:
        config, shard, dim = self.shard.config, self.shard, self.shard.config.head_dim
        query = self.get(f"{prefix}q_proj.weight", rows=scaled(shard.query_heads, 2 * dim))
        query, gate = query.view(len(shard.query_heads), 2, dim, config.hidden_size).unbind(1)
        key = self.get(f"{prefix}k_proj.weight", rows=scaled(shard.kv_heads, dim))
        value = self.get(f"{prefix}v_proj.weight", rows=scaled(shard.kv_heads, dim))
        query_norm, key_norm = self.norm(f"{prefix}q_norm.weight"), self.norm(f"{prefix}k_norm.weight")
        return FullAttentionWeights(
            in_proj=torch.cat((query.flatten(0, 1), key, value, gate.flatten(0, 1))),
            qk_norm=torch.stack([query_norm] * len(shard.query_heads) + [key_norm] * len(shard.kv_heads)),
            out_proj=self.own(f"{prefix}o_proj.weight", columns=scaled(shard.query_heads, dim)),
        )

    def linear(self, prefix: str) -> LinearAttentionWeights:
        config, shard = self.shard.config, self.shard
        keys = scaled(shard.linear_key_heads, config.linear_key_head_dim)
        values = scaled(shard.linear_value_heads, config.linear_value_head_dim)
        heads = shard.linear_value_heads
        # The channels of Q, K and V are cut each on its own; one slab of all channels would mix them up.
        segments = (keys, shifted(keys, config.key_dim), shifted(values, 2 * config.key_dim))
        projections = [self.get(f"{prefix}in_proj_qkv.weight", rows=rows) for rows in segments]
        projections.append(self.get(f"{prefix}in_proj_z.weight", rows=values))
        projections += [self.get(f"{prefix}in_proj_{part}.weight", rows=heads) for part in ("b", "a")]
        conv = torch.cat([self.get(f"{prefix}conv1d.weight", rows=rows) for rows in segments])
        return LinearAttentionWeights(
            in_proj=torch.cat(projections),
            conv=conv[:, 0].t().contiguous(),
            decay=-self.checkpoint.read(f"{prefix}A_log", rows=heads).float().exp(),
            dt_bias=self.checkpoint.read(f"{prefix}dt_bias", rows=heads).float().clone(),
            norm=self.checkpoint.read(f"{prefix}norm.weight").float().clone(),
            out_proj=self.own(f"{prefix}out_proj.weight", columns=values),
        )

    def layer(self, prefix: str, *, full: bool) -> LayerWeights:
        rows = self.shard.mlp_rows
        gate, up = (self.get(f"{prefix}mlp.{part}_proj.weight", rows=rows) for part in ("gate", "up"))
        return LayerWeights(
            input_norm=self.norm(f"{prefix}input_layernorm.weight"),
            mixer=self.full(f"{prefix}self_attn.") if full else self.linear(f"{prefix}linear_attn."),
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm.weight"),
            gate_up=torch.cat((gate, up)),
            down=self.own(f"{prefix}mlp.down_proj.weight", columns=rows),
        )

    def vocabulary(self, name: str) -> torch.Tensor:
        part = self.own(name, rows=self.shard.vocab_rows)
        missing = self.shard.vocab_size - part.shape[0]
        return torch.cat((part, part.new_zeros(missing, part.shape[1]))) if missing else part


def load_weights(folder: Path, shard: RankShard, dtype: torch.dtype) -> ModelWeights:
    """Read this rank's part of the checkpoint in `folder`, widened to `dtype`.

    Raises `CheckpointError` for a checkpoint that does not fit, or for a redundant lm_head that differs from the embedding
    that it is said to be tied to.
    """
    config = shard.config
    with Checkpoint(folder, config) as checkpoint:
        reader = _Reader(checkpoint, shard, dtype)
        prefix = checkpoint.prefix
        embedding = reader.vocabulary(f"{prefix}embed_tokens.weight")
        lm_head = reader.vocabulary(LM_HEAD) if LM_HEAD in checkpoint else embedding
        if config.tie_word_embeddings:
            if not torch.equal(lm_head, embedding):
                raise CheckpointError(f"{LM_HEAD}: differs from the embedding that tie_word_embeddings ties it to")
            lm_head = embedding
        return ModelWeights(
            embedding=embedding,
            layers=tuple(
                reader.layer(f"{prefix}layers.{i}.", full=kind == FULL_ATTENTION)
                for i, kind in enumerate(config.layer_types)
            ),
            final_norm=reader.norm(f"{prefix}norm.weight"),
            lm_head=lm_head,
        )


def load_mtp_weights(folder: Path, shard: RankShard, dtype: torch.dtype) -> MtpWeights:
    """Read the draft head of the checkpoint in `folder`: the part of its layer that `shard` says, and all of the rest.

    Raises `CheckpointError` for a checkpoint that has none.
    """
    with Checkpoint(folder, shard.config) as checkpoint:
        if not shard.config.num_mtp_layers:
            raise CheckpointError("mtp.*: the checkpoint has no draft head (mtp_num_hidden_layers is 0)")
        reader = _Reader(checkpoint, shard, dtype)
        return MtpWeights(
            embedding_norm=reader.norm("mtp.pre_fc_norm_embedding.weight"),
            hidden_norm=reader.norm("mtp.pre_fc_norm_hidden.weight"),
            combine=reader.own("mtp.fc.weight"),
            layer=reader.layer("mtp.layers.0.", full=True),
            norm=reader.norm("mtp.norm.weight"),
        )


def num_weight_bytes(weights: ModelWeights, draft: MtpWeights | None = None) -> int:
    """Bytes of all tensors of a rank's weights, with those of its draft head; a shared one is counted once."""
    found: dict[int, int] = {}

    def walk(value: object) -> None:
        match value:
            case torch.Tensor():
                found[value.data_ptr()] = value.nbytes
            case tuple():
                for item in value:
                    walk(item)
            case _ if hasattr(value, "__dataclass_fields__"):
                for name in value.__dataclass_fields__:
                    walk(getattr(value, name))
            case _:
                raise TypeError(f"weights hold a {type(value).__name__}")

    walk((weights,) if draft is None else (weights, draft))
    return sum(found.values())


def scaled(heads: range, size: int) -> range:
    """The rows of `heads` when each head has `size` rows."""
    return range(heads.start * size, heads.stop * size)


def shifted(rows: range, by: int) -> range:
    """The same rows, `by` further down."""
    return range(rows.start + by, rows.stop + by)
