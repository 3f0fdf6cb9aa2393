"""Sampling: exact frequencies by enumerating the unit interval, determinism, limits."""

from __future__ import annotations

import pytest
import torch

from common.engine.sampler import (
    BadLogitsError,
    Draw,
    Purpose,
    Sampler,
    choose_any,
    choose_filtered,
    uniform,
)
from contracts.requests import SamplingParams

N = 10_000
PROBABILITIES = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2], dtype=torch.float64)


def params(**changes: float) -> SamplingParams:
    """Sampling parameters with `changes`."""
    values: dict[str, float] = {"max_tokens": 9, "seed": 1, "temperature": 1.0} | changes
    return SamplingParams(**values)  # type: ignore[arg-type]


def draw(position: int = 10, num_generated: int = 0, **changes: float) -> Draw:
    """A draw with sampling `changes`."""
    return Draw(sampling=params(**changes), position=position, num_generated=num_generated)


def frequencies(sampling: SamplingParams, *, filtered: bool) -> list[int]:
    """How often each token is chosen over N evenly spaced numbers of the unit interval."""
    logits = PROBABILITIES.log().float().repeat(N, 1)
    numbers = (torch.arange(N, dtype=torch.float64) + 0.5) / N
    choose = choose_filtered if filtered else choose_any
    return choose(logits, [sampling] * N, numbers).bincount(minlength=5).tolist()


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.64}, [1, 3]),
        ({"top_p": 0.66}, [1, 3, 4]),
        ({"top_k": 3, "top_p": 0.75}, [1, 3]),
        ({"top_k": 3, "top_p": 0.77}, [1, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"top_k": 1}, [1]),
        ({"top_k": 50}, [0, 1, 2, 3, 4]),
    ],
)
def test_each_token_is_drawn_as_often_as_its_share_says(changes: dict[str, float], kept: list[int]) -> None:
    """The share of the unit interval that gives a token is its probability among the tokens that the filters leave."""
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    actual = torch.tensor(frequencies(params(**changes), filtered=bool(changes)), dtype=torch.float64)
    assert float((actual - expected * N).abs().max()) <= 1.01


def test_temperature_divides_the_logits() -> None:
    """At temperature 0.5 probabilities are squared and renormalised."""
    squared = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    actual = torch.tensor(frequencies(params(temperature=0.5), filtered=False), dtype=torch.float64)
    assert float((actual - squared * N).abs().max()) <= 1.01


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("filtered", [False, True])
def test_tokens_without_probability_are_never_drawn(number: float, filtered: bool) -> None:
    """Not even by the smallest and the largest random number."""
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    choose = choose_filtered if filtered else choose_any
    token = int(choose(logits, [params(top_k=3)], torch.tensor([number], dtype=torch.float64))[0])
    assert token in {1, 2}


def test_random_numbers_follow_the_documented_generator() -> None:
    """The first output of SplitMix64 for state 0 is the finaliser of seed 0; draws depend on each of their arguments."""
    known_first_outputs = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4)
    word, increment, mask = 0, 0x9E3779B97F4A7C15, 2**64 - 1
    outputs = []
    for _ in known_first_outputs:
        word = (word + increment) & mask
        z = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    assert tuple(outputs) == known_first_outputs
    draws = {uniform(s, p, q) for s in (0, 1, 2**63) for p in range(50) for q in Purpose}
    assert len(draws) == 3 * 50 * 3
    assert all(0 <= number < 1 for number in draws)
    assert uniform(5, 7) == uniform(5, 7) == uniform(5 - 2**64, 7)


def test_a_token_does_not_depend_on_its_batch() -> None:
    """Each row of a mixed batch gets what it gets alone: greedy, plain and filtered rows side by side."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 50, generator=generator) * 2
    draws = [
        draw(temperature=0.0),
        draw(seed=4),
        draw(seed=5, top_k=7),
        draw(seed=6, temperature=0.3, top_p=0.9),
        draw(seed=7, position=11),
        draw(seed=8, top_p=0.5, top_k=9),
    ]
    sampler = Sampler([0])
    together = sampler.sample(logits.clone(), draws)
    alone = [sampler.sample(logits[i : i + 1].clone(), [draws[i]])[0] for i in range(6)]
    assert alone == together
    assert together[0] == int(logits[0].argmax())


def test_the_end_of_text_is_held_back_until_min_tokens_are_there() -> None:
    """Greedy takes the best token that is no eos while fewer than min_tokens have been generated, unless eos is ignored."""
    logits = torch.tensor([[9.0, 1.0, 8.0, 3.0]])
    sampler = Sampler([0, 2])

    def choose(*, num_generated: int, min_tokens: int = 0, ignore_eos: bool = False) -> int:
        changed = draw(num_generated=num_generated, temperature=0.0, min_tokens=min_tokens, ignore_eos=ignore_eos)
        return sampler.sample(logits.clone(), [changed])[0]

    assert choose(num_generated=1, min_tokens=2) == 3
    assert choose(num_generated=2, min_tokens=2) == 0
    assert choose(num_generated=0) == 0
    assert choose(num_generated=0, min_tokens=2, ignore_eos=True) == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    """A NaN or an infinity is never turned into a token."""
    logits = torch.tensor([[0.0, 1.0], [bad, 0.0]])
    with pytest.raises(BadLogitsError):
        Sampler([]).sample(logits, [draw(), draw()])
