"""The recurrence of a Gated DeltaNet layer, one token at a time and in chunks, and the causal convolution before it.

With S the state `[dk, dv]` of a value head, decay exp(g) and write strength beta, a token with q, k, v does

    S := exp(g) S;  d = beta (v - k^T S);  S := S + k d^T;  o = q^T S / sqrt(dk)

Both forms here take unit-length q and k and give the same result; the chunk form solves a chunk's tokens at once.
Everything is fp32: the state forgets slowly and would gather rounding errors.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch.nn import functional

from common.engine.model.norm import rms_norm

CHUNK: Final = 64
L2_EPS: Final = 1e-6


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Scale to length one over the last dim: x * rsqrt(sum x^2 + 1e-6)."""
    dim = x.shape[-1]
    return rms_norm(x, None, L2_EPS / dim).mul_(dim**-0.5)


class DeltaTokens(NamedTuple):
    """What the rule needs of tokens, all fp32.

    Unit-length `query` and `key` `[..., dk]`, `value` `[..., dv]`, and one number each, `[...]`, for the write strength `beta`
    and for `log_decay` (g).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    beta: torch.Tensor
    log_decay: torch.Tensor

    def rows(self, first: int, count: int) -> DeltaTokens:
        """The tokens `[first, first + count)` of dim 0."""
        if count == self.beta.shape[0]:
            return self
        return DeltaTokens(*(part.narrow(0, first, count) for part in self))


def step_rule(tokens: DeltaTokens, state: torch.Tensor) -> torch.Tensor:
    """One token for each of N heads (sequences times value heads); `state [N, dk, dv]` is updated in place.

    The leading shape of `tokens` is `[N]`. Returns `[N, dv]`.
    """
    query, key, value, beta, log_decay = tokens
    key_row = key[:, None]
    state.mul_(log_decay.exp()[:, None, None])
    delta = torch.baddbmm(value[:, None], key_row, state, alpha=-1).mul_(beta[:, None, None])
    state.baddbmm_(key_row.mT, delta)
    scale = key.shape[-1] ** -0.5
    return torch.baddbmm(delta, query[:, None], state, beta=0, alpha=scale)[:, 0]


def chunk_rule(tokens: DeltaTokens, state: torch.Tensor) -> torch.Tensor:
    """T successive tokens of one sequence; `state [H, dk, dv]` is updated in place.

    The leading shape of `tokens` is `[H, T]`. Returns `[H, T, dv]`. With G the running sum of g inside a chunk and
    D_ij = exp(G_i - G_j) for j <= i: (I + tril((beta K) K^T D, -1)) [U | W] = beta [V | K exp G], and from chunk to chunk
    V' = U - W S, O = (Q exp G) S + (Q K^T D) V', S := S exp G_last + (K exp(G_last - G))^T V'.
    """
    query, key, value, beta, log_decay = tokens
    heads, length, dim = key.shape
    size = min(CHUNK, length)
    num_chunks = -(-length // size)
    # Padding tokens are inert: k, v and beta 0 write nothing, g 0 forgets nothing.
    padding = num_chunks * size - length
    if padding:
        query, key, value = (functional.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
        beta, log_decay = (functional.pad(x, (0, padding)) for x in (beta, log_decay))
    query, key, value = (x.reshape(heads, num_chunks, size, -1) for x in (query, key, value))
    beta = beta.reshape(heads, num_chunks, size, 1)
    total = log_decay.reshape(heads, num_chunks, size).cumsum(-1)
    grown = total.exp()[..., None]
    last = total[..., -1:]

    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu_(1)
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill_(later, -torch.inf).exp_()
    weighted = key * beta
    mixing = (weighted @ key.mT).mul_(decay)
    right = torch.cat((value * beta, weighted * grown), -1)
    solved = torch.linalg.solve_triangular(mixing, right, upper=False, unitriangular=True)
    fresh, carried = solved.split((value.shape[-1], dim), -1)
    scores = (query @ key.mT).mul_(decay)
    grown_query = query * grown
    faded_key = key * (last - total).exp()[..., None]
    kept = last.exp()[..., None]

    outputs = []
    for i in range(num_chunks):
        written = torch.baddbmm(fresh[:, i], carried[:, i], state, alpha=-1)
        output = torch.bmm(scores[:, i], written)
        outputs.append(output.baddbmm_(grown_query[:, i], state))
        state.mul_(kept[:, i]).baddbmm_(faded_key[:, i].mT, written)
    result = torch.cat(outputs, 1) if num_chunks > 1 else outputs[0]
    return result[:, :length].mul(dim**-0.5)


def convolve_step(window: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution at the last of four tokens: `window [B, 4, C]`, `weight [4, C]`; returns `[B, C]`."""
    if window.dtype != torch.float32:
        return convolve_round(window, weight)[:, 0]
    return (window * weight).sum(1)


def convolve_round(window: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same for T successive tokens of each of B sequences: `window [B, 3 + T, C]` begins with three older ones; `[B, T, C]`.

    It sums in fp32 and rounds once: in a narrower type a token would come out otherwise with others beside it than alone, and guesses
    would change what is said.
    """
    taps = weight.shape[0]
    length = window.shape[1] - taps + 1
    wide, weight = window.float(), weight.float()
    output = wide[:, :length] * weight[0]
    for i in range(1, taps):
        output.addcmul_(wide[:, i : i + length], weight[i])
    return output.to(window.dtype)


def convolve_chunk(padded: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same for successive tokens of one sequence: `padded [3 + T, C]` begins with the three tokens before; returns `[T, C]`."""
    return convolve_round(padded[None], weight)[0]
