"""The space of random numbers of one position, cut into cells in which a choice and a guess are what they are: exact measures.

Each token i has a time E_i ~ Exp(1). The choice by weights p is the i with the least E_i / p_i, the guess by weights q likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

LATE = 1e9
"""A time that wins no race against those near 1."""


@dataclass(frozen=True)
class Cell:
    """Where the choice and the guess are these: its measure, and times of all tokens that lie inside."""

    choice: int
    guess: int
    measure: float
    times: tuple[float, ...]


def cells(p: Sequence[float], q: Sequence[float]) -> Iterator[Cell]:
    """All cells that are not empty: for each pair of tokens one way round, and each token with itself."""
    for i in range(len(p)):
        for j in range(len(p)):
            low, high = p[j] / p[i], q[j] / q[i]
            if i == j:
                yield Cell(i, i, agreement(p, q, i), _times(len(p), {i: 1.0}))
            elif low < high:
                yield Cell(i, j, _measure(p, q, i, j), _times(len(p), {i: 1.0, j: (low * high) ** 0.5}))


def agreement(p: Sequence[float], q: Sequence[float], i: int) -> float:
    """The measure of both being i: E_k >= E_i max(p_k / p_i, q_k / q_i) for all k."""
    return 1 / sum(max(p[k] / p[i], q[k] / q[i]) for k in range(len(p)))


def _measure(p: Sequence[float], q: Sequence[float], i: int, j: int) -> float:
    """The integral over r = E_j / E_i, from p_j / p_i to q_j / q_i, of 1 / A(r)^2 with A(r) = 1 + r + sum_k max(p_k / p_i, r q_k / q_j).

    A is linear between the points where a maximum changes sides, and there the integral is (r2 - r1) / (A(r1) A(r2)).
    """
    others = [(p[k] / p[i], q[k] / q[j]) for k in range(len(p)) if k not in {i, j}]

    def height(r: float) -> float:
        return 1 + r + sum(max(fixed, r * slope) for fixed, slope in others)

    low, high = p[j] / p[i], q[j] / q[i]
    points = [low, *sorted(r for fixed, slope in others if low < (r := fixed / slope) < high), high]
    return sum((end - begin) / (height(begin) * height(end)) for begin, end in pairwise(points))


def _times(size: int, early: dict[int, float]) -> tuple[float, ...]:
    return tuple(early.get(k, LATE) for k in range(size))
