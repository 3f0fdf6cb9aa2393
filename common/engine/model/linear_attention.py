"""The Gated DeltaNet mixer of a layer: projections, convolution, recurrence and gated norm, on one rank's heads."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from common.engine.model.gated_delta_net import (
    DeltaTokens,
    chunk_rule,
    convolve_chunk,
    convolve_round,
    convolve_step,
    step_rule,
    unit_length,
)
from common.engine.model.norm import rms_norm
from common.engine.model.shard import RankShard
from common.engine.model.weights import LinearAttentionWeights
from common.engine.ranks.cache import state_view
from common.engine.ranks.step_buffers import Round, StepInput

CONV_ROWS: Final = 3


class LinearAttention:
    """The mixer of all linear layers of a rank; weights and caches are given with each call."""

    def __init__(self, shard: RankShard) -> None:
        config = shard.config
        self.eps = config.rms_norm_eps
        self.heads = len(shard.linear_value_heads)
        self.key_heads = len(shard.linear_key_heads)
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        self.projections = [shard.conv_channels, shard.value_channels, self.heads, self.heads]
        self.segments = [2 * shard.key_channels, shard.value_channels]

    def mix(
        self, weights: LinearAttentionWeights, x: torch.Tensor, conv: torch.Tensor, ssm: torch.Tensor, step: StepInput
    ) -> torch.Tensor:
        """Mix `x [T, hidden]` and advance the states of the step's sequences.

        `conv` and `ssm` are the layer's caches (`LayerCaches`). Returns what goes into the output projection, `[T, value
        channels]`.
        """
        projected = functional.linear(x, weights.in_proj)
        raw, z, b, a = projected.split_with_sizes(self.projections, -1)
        mixed = functional.silu(_convolve(conv, raw, weights.conv, step)).float()
        qk, value = mixed.split_with_sizes(self.segments, -1)
        # Value head j reads with key head j // (heads / key_heads).
        qk = unit_length(qk.view(-1, 2, self.key_heads, 1, self.key_dim))
        qk = qk.expand(-1, -1, -1, self.heads // self.key_heads, -1).reshape(-1, 2, self.heads, self.key_dim)
        tokens = DeltaTokens(
            query=qk[:, 0],
            key=qk[:, 1],
            value=value.view(-1, self.heads, self.value_dim),
            beta=b.float().sigmoid(),
            log_decay=functional.softplus(a.float() + weights.dt_bias).mul_(weights.decay),
        )
        output = rms_norm(_recur(ssm, tokens, step), weights.norm, self.eps)
        output.mul_(functional.silu(z.float()).view(-1, self.heads, self.value_dim))
        return output.flatten(1).to(x.dtype)


def _convolve(cache: torch.Tensor, raw: torch.Tensor, weight: torch.Tensor, step: StepInput) -> torch.Tensor:
    """Convolve `raw [T, C]`, the projections before SiLU, with what each sequence's slot remembers, and remember the rest."""
    outputs = []
    for each in step.rounds:
        rows = raw.narrow(0, each.first, len(each.slots) * each.num_tokens)
        if each.num_tokens == 1 and each.state_rows is None:
            outputs.append(_convolve_step(cache, rows, weight, each))
        else:
            outputs.append(_convolve_round(cache, rows, weight, each))
    for chunk in step.chunks:
        state = cache[chunk.slot, chunk.state_row : chunk.state_row + CONV_ROWS]
        padded = torch.cat((state, raw.narrow(0, chunk.first, chunk.num_tokens)))
        outputs.append(convolve_chunk(padded, weight))
        cache[chunk.slot, :CONV_ROWS].copy_(padded[-CONV_ROWS:])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _convolve_step(cache: torch.Tensor, raw: torch.Tensor, weight: torch.Tensor, each: Round) -> torch.Tensor:
    """One token a sequence, states in row 0: in place where slots lie side by side."""
    held = state_view(cache, each.slots)
    before = (cache.index_select(0, each.slot_index) if held is None else held)[:, :CONV_ROWS]
    window = torch.cat((before, raw[:, None]), 1)
    if held is None:
        cache[:, :CONV_ROWS].index_copy_(0, each.slot_index, window[:, 1:])
    else:
        before.copy_(window[:, 1:])
    return convolve_step(window, weight)


def _convolve_round(cache: torch.Tensor, raw: torch.Tensor, weight: torch.Tensor, each: Round) -> torch.Tensor:
    """Several tokens, all of which the slot remembers: the state behind token t are the columns from t on."""
    size, count = len(each.slots), each.num_tokens
    columns = torch.arange(CONV_ROWS)
    if each.state_rows is not None:
        columns = each.state_rows[:, None] + columns
    before = cache[each.slot_index[:, None], columns]
    window = torch.cat((before, raw.view(size, count, -1)), 1)
    cache[:, : CONV_ROWS + count - 1].index_copy_(0, each.slot_index, window[:, 1:])
    return convolve_round(window, weight).flatten(0, 1)


def _recur(cache: torch.Tensor, tokens: DeltaTokens, step: StepInput) -> torch.Tensor:
    """Run the recurrence over all sequences of the step: `[T, heads, dv]`."""
    outputs = []
    for each in step.rounds:
        rows = tokens.rows(each.first, len(each.slots) * each.num_tokens)
        if each.num_tokens == 1 and each.state_rows is None:
            outputs.append(_step(cache[:, 0], rows, each))
        else:
            outputs.append(_round(cache, rows, each))
    for chunk in step.chunks:
        rows = tokens.rows(chunk.first, chunk.num_tokens)
        state = cache[chunk.slot, 0]
        if chunk.state_row:
            state.copy_(cache[chunk.slot, chunk.state_row])
        output = chunk_rule(DeltaTokens(*(part.transpose(0, 1) for part in rows)), state)
        outputs.append(output.transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _step(current: torch.Tensor, rows: DeltaTokens, each: Round) -> torch.Tensor:
    """One token a sequence; `current [slots, heads, dk, dv]` are the states of row 0."""
    held = state_view(current, each.slots)
    state = current.index_select(0, each.slot_index) if held is None else held
    # With more than one row a slot the view has gaps between sequences: then this is a copy, and is written back.
    flat = state.reshape(-1, *state.shape[2:])
    output = step_rule(DeltaTokens(*(part.flatten(0, 1) for part in rows)), flat)
    if held is None:
        current.index_copy_(0, each.slot_index, flat.view_as(state))
    elif not held.is_contiguous():
        held.copy_(flat.view_as(held))
    return output.view(len(each.slots), -1, output.shape[-1])


def _round(cache: torch.Tensor, rows: DeltaTokens, each: Round) -> torch.Tensor:
    """Several tokens a sequence, and the state behind each of them is kept."""
    size, count = len(each.slots), each.num_tokens
    begin = cache[each.slot_index, 0 if each.state_rows is None else each.state_rows]
    state = begin.flatten(0, 1)
    by_token = (part.view(size, count, *part.shape[1:]).transpose(0, 1).flatten(1, 2).unbind() for part in rows)
    outputs = []
    for t, now in enumerate(zip(*by_token, strict=True)):
        outputs.append(step_rule(DeltaTokens(*now), state))
        cache[:, t].index_copy_(0, each.slot_index, state.view_as(begin))
    return torch.stack(outputs).view(count, size, -1, outputs[0].shape[-1]).transpose(0, 1).flatten(0, 1)
