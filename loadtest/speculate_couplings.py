"""How often a guess from one distribution equals a choice from another, by the way in which both are drawn: exact, from the weights.

A guess is drawn from `guessed`, the model's choice from `chosen`: each `[n, vocab]`, rows that sum to one, fp64.
"""

from __future__ import annotations

import torch

from loadtest.speculate_times import Coupling


def by_rejection(guessed: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What speculative sampling accepts, sum of min(p, q) (Leviathan, Kalman, Matias 2023): no way of drawing does better. `[n]`."""
    return torch.minimum(guessed, chosen).sum(-1)


def by_shared_race(guessed: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Both take the token that wins the same race: token i arrives after E_i / weight_i, with shared E_i ~ Exp(1). `[n]`.

    Token i wins both races iff E_j >= E_i max(p_j / p_i, q_j / q_i) for all j, which has the probability
    1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri, Musco, Suresh 2024); their sum is at least (1 - TV) / (1 + TV).
    """
    found = torch.zeros(len(guessed), dtype=torch.float64)
    for row, pair in enumerate(zip(guessed, chosen, strict=True)):
        # sum_j max(p_j / p_i, q_j / q_i) = (sum of p_j where p_j / q_j >= p_i / q_i) / p_i + (sum of the other q_j) / q_i.
        order = torch.argsort(torch.where(pair[1] > 0, pair[0] / pair[1], torch.inf), descending=True)
        p, q = (each[order] for each in pair)
        total = p.cumsum(0) / p + (q.sum() - q.cumsum(0)) / q
        found[row] = total[(p > 0) & (q > 0)].reciprocal().sum()
    return found


def by_one_number(guessed: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Both invert their own running sums in the order of token ids at the same number of [0, 1). `[n]`."""
    ends = [each.cumsum(-1) for each in (guessed, chosen)]
    begins = [end - each for end, each in zip(ends, (guessed, chosen), strict=True)]
    return (torch.minimum(*ends) - torch.maximum(*begins)).clamp_min(0).sum(-1)


def coupling_of(guessed: torch.Tensor, chosen: torch.Tensor) -> Coupling:
    """All three, summed over the rows."""
    return Coupling(
        count=len(guessed),
        race=float(by_shared_race(guessed, chosen).sum()),
        rejection=float(by_rejection(guessed, chosen).sum()),
        one_number=float(by_one_number(guessed, chosen).sum()),
    )
