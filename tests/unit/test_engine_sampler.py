"""Sampling: exact shares by the points at which races turn, random numbers, determinism, limits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from common.engine.model.race import arrival_times, uniform_numbers
from common.engine.model.sampler import NO_TOKEN, Draw, Sampler, choose
from contracts.requests import SamplingParams

PROBABILITIES = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2], dtype=torch.float64)
LATE = 1e6
"""A time that wins no race among these tokens against one near 1."""


def params(**changes: float) -> SamplingParams:
    """Sampling parameters with `changes`."""
    values: dict[str, float] = {"max_tokens": 9, "seed": 1, "temperature": 1.0} | changes
    return SamplingParams(**values)  # type: ignore[arg-type]


def draw(position: int = 10, num_generated: int = 0, **changes: float) -> Draw:
    """A draw with sampling `changes`."""
    return Draw(sampling=params(**changes), position=position, num_generated=num_generated)


def turning_points(sampling: SamplingParams, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """For each pair of tokens, of which the first arrives at 1: at which time the second stops to win."""
    count = len(pairs)
    rows = torch.arange(count)
    firsts, seconds = torch.tensor(pairs).unbind(1)
    low = torch.zeros(count, dtype=torch.float64)
    high = torch.full((count,), 1e4, dtype=torch.float64)
    for _ in range(80):
        middle = (low + high) / 2
        times = torch.full((count, len(PROBABILITIES)), LATE, dtype=torch.float64)
        times[rows, firsts] = 1.0
        times[rows, seconds] = middle
        wins = choose(PROBABILITIES.log().repeat(count, 1), [sampling] * count, times) == seconds
        low, high = torch.where(wins, middle, low), torch.where(wins, high, middle)
    found: list[float] = low.tolist()
    return found


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
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0, "top_k": 3}, [1, 3, 4]),
    ],
)
def test_each_race_turns_where_the_weights_say(changes: dict[str, float], kept: list[int]) -> None:
    """Among what the filters leave token j beats i up to the ratio of their weights; what they cut loses to everybody.

    With independent exponential times that gives each token its share: the least of E_i / w_i is that of i with w_i / sum w.
    """
    sampling = params(**changes)
    weights = PROBABILITIES ** (1 / sampling.temperature)
    pairs = [(one, other) for one in kept for other in range(len(PROBABILITIES)) if other != one]
    expected = [float(weights[other] / weights[one]) if other in kept else 0.0 for one, other in pairs]
    assert turning_points(sampling, pairs) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_all_tokens_run_in_one_race() -> None:
    """The winner of all is who would win against each other one: whoever has the least time over its weight."""
    times = torch.empty(500, 5, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(7))
    chosen = choose(PROBABILITIES.log().repeat(500, 1), [params()] * 500, times)
    assert chosen.equal((times / PROBABILITIES).argmin(-1))
    assert set(chosen.tolist()) == set(range(5))


@pytest.mark.parametrize("time", [2.0**-53, 40.0])
@pytest.mark.parametrize("changes", [{}, {"top_k": 3}])
def test_tokens_without_probability_are_never_drawn(time: float, changes: dict[str, float]) -> None:
    """Not even by the smallest and the largest random number."""
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    times = torch.tensor([[time, 1.0, 1.0, time]], dtype=torch.float64)
    assert int(choose(logits, [params(**changes)], times)[0]) == 2


def _finalise(word: int) -> int:
    """SplitMix64's step, written a second time."""
    mask = 2**64 - 1
    word = (word + 0x9E3779B97F4A7C15) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return word ^ (word >> 31)


def test_random_numbers_follow_the_documented_generator() -> None:
    """The formula of the module's text; its first steps are the first outputs of SplitMix64."""
    assert [_finalise(0), _finalise(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    places = [(seed, position) for seed in (0, 5, 2**63, -1) for position in (0, 7, 262_143)]
    found = uniform_numbers(places, 40)
    for (seed, position), row in zip(places, found.tolist(), strict=True):
        word = _finalise((_finalise(seed % 2**64) + position) % 2**64)
        assert row == [((_finalise((word + token) % 2**64) >> 11) | 1) / 2**53 for token in range(40)]
    assert len(set(found.flatten().tolist())) == found.numel()
    assert arrival_times(places, 40).equal(-found.log())
    # Whatever else is asked for, and for however large a vocabulary, a token's number is its own.
    assert uniform_numbers(places[3:4], 9).equal(found[3:4, :9])


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds"])
def test_random_numbers_look_independent(axis: str) -> None:
    """Neighbours in each direction: pairs of them fall into all squares of a chessboard alike (chi-square, once in a million)."""
    places = {
        "tokens": [(3, 4)],
        "positions": [(3, position) for position in range(40_000)],
        "seeds": [(seed, 4) for seed in range(40_000)],
    }[axis]
    size = 40_000 if axis == "tokens" else 2
    numbers = uniform_numbers(places, size).numpy()
    row = numbers.reshape(-1) if axis == "tokens" else numbers[:, 0]
    squares = (row[:-1] * 8).astype(int) * 8 + (row[1:] * 8).astype(int)
    counts = np.bincount(squares, minlength=64)
    expected = counts.sum() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 130


@pytest.mark.parametrize("size", [50, 90_000])
def test_a_token_does_not_depend_on_its_batch(size: int) -> None:
    """Each row of a mixed batch gets what it gets alone: greedy, plain and filtered, also where a race runs two rows at a time."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, size, generator=generator) * 2
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
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_not_finite_give_no_token_to_their_own_row(bad: float, temperature: float) -> None:
    """A NaN or an infinity is never turned into a token, and the other rows draw as ever."""
    sound = torch.tensor([0.0, 1.0])
    logits = torch.stack((sound, torch.tensor([bad, 0.0]), torch.full((2,), -torch.inf), sound))
    draws = [draw(position=at, temperature=temperature) for at in range(4)]
    alone = [Sampler([]).sample(sound[None].clone(), [draws[at]])[0] for at in (0, 3)]
    assert Sampler([]).sample(logits, draws) == [alone[0], NO_TOKEN, NO_TOKEN, alone[1]]
