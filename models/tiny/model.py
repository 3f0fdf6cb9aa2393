"""Qwen3.5 for training: whole sequences, no cache, parameters named as in a checkpoint.

The formulas are those of `transformers` 5.24 (`Qwen3_5ForCausalLM`), against which `tests/unit/test_tiny_model.py` checks them. Shapes:
b sequences, t tokens, h hidden; k-heads and v-heads are the key and value heads of the gated delta net (GDN).
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_CHUNK = 32
"""Tokens solved at once by the delta rule. The result does not depend on it; 32 is the fastest on a CPU at these head sizes."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes, named as in `Qwen3_5TextConfig`."""

    vocab_size: int = 2304
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    full_attention_interval: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    linear_num_key_heads: int = 8
    linear_num_value_heads: int = 8
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 1e7
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192

    def is_full_attention(self, layer: int) -> bool:
        """Return whether this layer attends to all earlier tokens; the others are GDN layers."""
        return (layer + 1) % self.full_attention_interval == 0

    def to_hf(self) -> dict[str, Any]:
        """Return the keyword arguments of `Qwen3_5TextConfig`."""
        sizes = asdict(self)
        rotary = {
            "rope_type": "default",
            "rope_theta": sizes.pop("rope_theta"),
            "partial_rotary_factor": sizes.pop("partial_rotary_factor"),
        }
        return {**sizes, "rope_parameters": rotary, "tie_word_embeddings": True}


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight) over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x, same shape."""
        return functional.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


class GatedRMSNorm(nn.Module):
    """x / rms(x) * weight * silu(z) over the last dimension: the GDN's own norm, without the 1 +."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the gated, normalised x, same shape."""
        return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps) * functional.silu(z)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.5 / math.sqrt(inputs))
    return layer


def _output(inputs: int, outputs: int) -> nn.Linear:
    """Return a projection into the residual stream, zero at first.

    Layers then start as the identity, and which token stands where is not drowned in their noise: without this, recall was not learned.
    """
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def rotate(x: Tensor, config: ModelConfig) -> Tensor:
    """Apply rotary position embedding to x `[b, heads, t, head_dim]`, positions 0 to t - 1, on the first quarter of each head."""
    size = int(config.head_dim * config.partial_rotary_factor)
    frequencies = config.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class Attention(nn.Module):
    """Causal attention with grouped queries, normalised queries and keys, and a gate on its output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = _linear(config.hidden_size, heads * size * 2)
        self.k_proj = _linear(config.hidden_size, kv_heads * size)
        self.v_proj = _linear(config.hidden_size, kv_heads * size)
        self.o_proj = _output(heads * size, config.hidden_size)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[b, t, h]` from x `[b, t, h]`."""
        shape = (x.shape[0], x.shape[1], -1)
        size = self.config.head_dim
        query, gate = self.q_proj(x).view(*shape, 2 * size).split(size, -1)
        query = rotate(self.q_norm(query).transpose(1, 2), self.config)
        key = rotate(self.k_norm(self.k_proj(x).view(*shape, size)).transpose(1, 2), self.config)
        value = self.v_proj(x).view(*shape, size).transpose(1, 2)
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(shape) * torch.sigmoid(gate.reshape(shape)))
        return projected


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Run the gated delta rule from an empty state, in chunks.

    query and key `[b, v-heads, t, dk]` (already normalised and scaled), value `[b, v-heads, t, dv]`, decay (logarithm, at most 0) and beta
    `[b, v-heads, t]`; returns `[b, v-heads, t, dv]`. Per token: S *= exp(decay); S += k (beta (v - k^T S))^T; out = q^T S. A chunk solves
    for all its corrections at once (Yang et al. 2024, "Parallelizing linear transformers with the delta rule", section 3).
    """
    tokens = query.shape[2]
    padding = -tokens % _CHUNK
    # Padding on the right writes nothing: its keys and betas are zero.
    query, key, value = (
        functional.pad(x, (0, 0, 0, padding)).reshape(*x.shape[:2], -1, _CHUNK, x.shape[-1])
        for x in (query, key, value)
    )
    decay, beta = (functional.pad(x, (0, padding)).reshape(*x.shape[:2], -1, _CHUNK) for x in (decay, beta))
    total = decay.cumsum(-1)
    above = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool).triu(1)
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(above, -math.inf).exp()
    grown = total.exp()[..., None]
    system = (key * beta[..., None]) @ key.transpose(-1, -2) * between
    sides = torch.cat([value, key * grown], -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    new_values, read_keys = solved.split([value.shape[-1], key.shape[-1]], -1)
    within = query @ key.transpose(-1, -2) * between
    query = query * grown
    key = (key * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    last = total[..., -1].exp()[..., None, None]
    state = value.new_zeros(*value.shape[:2], key.shape[-2], value.shape[-1])
    outputs = []
    for chunk in range(query.shape[2]):
        correction = new_values[:, :, chunk] - read_keys[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + within[:, :, chunk] @ correction)
        state = state * last[:, :, chunk] + key[:, :, chunk] @ correction
    return torch.cat(outputs, 2)[:, :, :tokens]


class GatedDeltaNet(nn.Module):
    """Linear attention: a short causal convolution, then the gated delta rule per value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.linear_num_value_heads
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = heads * config.linear_value_head_dim
        self.sizes = [keys, keys, values]
        width = sum(self.sizes)
        self.in_proj_qkv = _linear(hidden, width)
        self.in_proj_z = _linear(hidden, values)
        self.in_proj_b = _linear(hidden, heads)
        self.in_proj_a = _linear(hidden, heads)
        self.conv1d = nn.Conv1d(width, width, config.linear_conv_kernel_dim, groups=width, bias=False)
        # Initial decays span memories of a few to a thousand tokens.
        step = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 8).log())
        self.norm = GatedRMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = _output(values, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[b, t, h]` from x `[b, t, h]`."""
        shape = (x.shape[0], x.shape[1], -1)
        config = self.config
        left = config.linear_conv_kernel_dim - 1
        projected = functional.pad(self.in_proj_qkv(x), (0, 0, left, 0))
        # Four shifted products; torch's depthwise convolution is several times slower on a CPU.
        taps = self.conv1d.weight[:, 0]
        mixed = sum((projected[:, i : i + x.shape[1]] * taps[:, i] for i in range(left + 1)), start=torch.zeros(()))
        query, key, value = torch.split(functional.silu(mixed), self.sizes, -1)
        query, key = (part.view(*shape, config.linear_key_head_dim).transpose(1, 2) for part in (query, key))
        value = value.view(*shape, config.linear_value_head_dim).transpose(1, 2)
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        query = query / math.sqrt(config.linear_key_head_dim)
        groups = config.linear_num_value_heads // config.linear_num_key_heads
        if groups > 1:
            query, key = query.repeat_interleave(groups, 1), key.repeat_interleave(groups, 1)
        decay = -self.A_log.exp() * functional.softplus(self.in_proj_a(x) + self.dt_bias)
        beta = torch.sigmoid(self.in_proj_b(x))
        out = delta_rule(query, key, value, decay.transpose(1, 2), beta.transpose(1, 2)).transpose(1, 2)
        out = self.norm(out, self.in_proj_z(x).view(*shape, config.linear_value_head_dim))
        result: Tensor = self.out_proj(out.reshape(shape))
        return result


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _output(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[b, t, h]` from x `[b, t, h]`."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A mixer (attention or GDN) and an MLP, each on a normalised input and added to the stream."""

    def __init__(self, config: ModelConfig, *, full_attention: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if full_attention:
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.full_attention = full_attention
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[b, t, h]` from x `[b, t, h]`."""
        mixer = self.self_attn if self.full_attention else self.linear_attn
        x = x + mixer(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embedding, layers and final norm: the part under `model.` of a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.2)
        self.layers = nn.ModuleList(
            Layer(config, full_attention=config.is_full_attention(i)) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Embeddings large enough to carry the stream would give large logits, as they are the output weights too.
        nn.init.constant_(self.norm.weight, -0.9)


class DraftHead(nn.Module):
    """The MTP head, the part under `mtp.`: from the hidden state of token t and token t + 1 it guesses token t + 2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = _linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, full_attention=True)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        nn.init.constant_(self.norm.weight, -0.9)


class TinyQwen(nn.Module):
    """A dense Qwen3.5 with one MTP layer and tied embeddings; `state_dict()` is the checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.mtp = DraftHead(config)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the hidden states after the final norm, `[b, t, h]`, of tokens `[b, t]`."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        out: Tensor = self.model.norm(x)
        return out

    def draft(self, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        """Return the draft head's hidden states, `[b, t, h]`.

        `hidden` is that of tokens 0 to t - 1 (from `hidden`, or from an earlier `draft` when chained), `next_tokens` the tokens 1 to t.
        """
        embedded = self.mtp.pre_fc_norm_embedding(self.model.embed_tokens(next_tokens))
        x = self.mtp.fc(torch.cat([embedded, self.mtp.pre_fc_norm_hidden(hidden)], -1))
        for layer in self.mtp.layers:
            x = layer(x)
        out: Tensor = self.mtp.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores over the vocabulary, `[..., vocab]`, of hidden states `[..., h]`."""
        return functional.linear(hidden, self.model.embed_tokens.weight)
