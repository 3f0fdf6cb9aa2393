"""The recurrence: chunk form against step form against a plain loop, and the convolution."""

from __future__ import annotations

import pytest
import torch

from common.engine.model.gated_delta_net import (
    DeltaTokens,
    chunk_rule,
    convolve_chunk,
    convolve_round,
    convolve_step,
    step_rule,
    unit_length,
)

HEADS, DK, DV = 3, 16, 24


def tokens(length: int, seed: int = 0) -> DeltaTokens:
    """Random tokens with leading shape [HEADS, length]."""
    g = torch.Generator().manual_seed(seed)
    return DeltaTokens(
        query=unit_length(torch.randn(HEADS, length, DK, generator=g)),
        key=unit_length(torch.randn(HEADS, length, DK, generator=g)),
        value=torch.randn(HEADS, length, DV, generator=g),
        beta=torch.rand(HEADS, length, generator=g),
        log_decay=-torch.rand(HEADS, length, generator=g) * 3,
    )


def by_hand(given: DeltaTokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as it is written, head by head, in fp64."""
    q, k, v, beta, g = (part.double() for part in given)
    out = torch.empty_like(v)
    end = torch.empty_like(state, dtype=torch.float64)
    for h in range(HEADS):
        s = state[h].double().clone()
        for t in range(q.shape[1]):
            s *= g[h, t].exp()
            s += torch.outer(k[h, t], beta[h, t] * (v[h, t] - s.T @ k[h, t]))
            out[h, t] = s.T @ q[h, t] / DK**0.5
        end[h] = s
    return out, end


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_chunk_form_equals_the_recurrence(length: int) -> None:
    """Output and final state, for lengths below, at and beyond the chunk size, from a state that is not empty."""
    given = tokens(length)
    start = torch.randn(HEADS, DK, DV, generator=torch.Generator().manual_seed(9))
    expected, end = by_hand(given, start)
    state = start.clone()
    output = chunk_rule(given, state)
    assert float((output - expected).abs().max()) < 2e-5
    assert float((state - end).abs().max()) < 2e-5


def test_step_form_equals_the_recurrence() -> None:
    """One token at a time, all heads at once."""
    given = tokens(20)
    expected, end = by_hand(given, torch.zeros(HEADS, DK, DV))
    state = torch.zeros(HEADS, DK, DV)
    output = torch.stack([step_rule(DeltaTokens(*(p[:, t] for p in given)), state) for t in range(20)], 1)
    assert float((output - expected).abs().max()) < 1e-5
    assert float((state - end).abs().max()) < 1e-5


def test_a_prompt_may_be_cut_anywhere() -> None:
    """Chunks of odd sizes carry the state over: the same output as in one piece."""
    given = tokens(150)
    whole, state = torch.zeros(HEADS, DK, DV), torch.zeros(HEADS, DK, DV)
    expected = chunk_rule(given, whole)
    sizes = (7, 64, 1, 78)
    outputs, at = [], 0
    for size in sizes:
        outputs.append(chunk_rule(DeltaTokens(*(p[:, at : at + size] for p in given)), state))
        at += size
    assert float((torch.cat(outputs, 1) - expected).abs().max()) < 2e-5
    assert float((state - whole).abs().max()) < 2e-5


def test_strong_decay_does_not_overflow() -> None:
    """Differences above the diagonal would overflow exp if they were masked after it."""
    given = tokens(64)
    given = given._replace(log_decay=torch.full_like(given.log_decay, -30.0))
    output = chunk_rule(given, torch.ones(HEADS, DK, DV))
    assert bool(output.isfinite().all())


def test_convolution_looks_at_four_tokens() -> None:
    """Chunk and step form equal a causal depthwise convolution with the state as its past."""
    g = torch.Generator().manual_seed(1)
    padded, weight = torch.randn(13, 5, generator=g), torch.randn(4, 5, generator=g)
    expected = torch.nn.functional.conv1d(padded.T[None], weight.T[:, None], groups=5)[0].T
    assert torch.allclose(convolve_chunk(padded, weight), expected, atol=1e-6)
    windows = torch.stack([padded[t : t + 4] for t in range(10)])
    assert torch.allclose(convolve_step(windows, weight), expected, atol=1e-6)


def test_a_narrow_convolution_rounds_once_however_many_tokens_it_is_given() -> None:
    """In bfloat16 a token alone, in a round of a few, and in a prompt has the same bits: those nearest to the exact sum."""
    g = torch.Generator().manual_seed(2)
    padded = torch.randn(203, 64, generator=g).bfloat16()
    weight = torch.randn(4, 64, generator=g).bfloat16()
    windows = torch.stack([padded[t : t + 4] for t in range(200)])
    exact = (windows.double() * weight.double()).sum(1).bfloat16()
    alone = convolve_step(windows, weight)
    rounds = torch.stack([padded[t : t + 8] for t in range(0, 200, 5)])
    assert torch.equal(convolve_round(rounds, weight).flatten(0, 1), alone)
    assert torch.equal(convolve_chunk(padded, weight), alone)
    # A sum in fp32 that lies within its own rounding of the middle between two neighbours may fall to the other side.
    assert int((alone != exact).sum()) <= alone.numel() // 1000


def test_unit_length_matches_its_formula() -> None:
    """Also for vectors so short that the epsilon counts."""
    x = torch.tensor([[3.0, 4.0], [1e-4, 0.0], [0.0, 0.0]])
    assert torch.allclose(unit_length(x), x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt(), atol=1e-7)
