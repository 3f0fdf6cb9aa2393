"""Choosing the next token: deterministic for given logits, parameters, seed and position, whatever else is in the batch.

Random numbers are counter-based, so that a request that is dispatched again continues with the same draws: with M the
finaliser of SplitMix64 (Steele, Lea, Flood 2014) and c its increment, draw(seed, position, purpose) is the upper 53 bits of
M(M(M(seed + c) + position + c) + purpose + c), as a fraction of 2^53.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch

from contracts.errors import ErrorCode, PdmeshError
from contracts.requests import SamplingParams

_MASK: Final = 2**64 - 1
_INCREMENT: Final = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a random number is for: numbers of different purposes at one position are independent."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2


class BadLogitsError(PdmeshError):
    """The logits of a sequence are not finite: something went wrong before."""

    code = ErrorCode.WORKER_FAILED


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One token to choose, at `position` of its sequence; `num_generated` tokens have been generated before it."""

    sampling: SamplingParams
    position: int
    num_generated: int


def _finalise(word: int) -> int:
    word = (word + _INCREMENT) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def uniform(seed: int, position: int, purpose: Purpose = Purpose.TOKEN) -> float:
    """A number in [0, 1) that depends on its arguments alone; see the module's text for the formula."""
    word = _finalise(seed & _MASK)
    word = _finalise((word + position) & _MASK)
    word = _finalise((word + purpose) & _MASK)
    return (word >> 11) / 2.0**53


class Sampler:
    """Chooses tokens on the sampling rank. `eos_token_ids` are what `min_tokens` forbids."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos = torch.tensor(sorted(eos_token_ids), dtype=torch.int64)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """Choose one token for each row of `logits [n, vocab]`, which may be overwritten.

        Raises `BadLogitsError` when the best logit of a row is not finite.
        """
        logits = logits.float()
        for row, draw in enumerate(draws):
            if draw.num_generated < draw.sampling.min_tokens and not draw.sampling.ignore_eos:
                logits[row, self._eos] = -torch.inf
        best, tokens = logits.max(-1)
        if not bool(best.isfinite().all()):
            raise BadLogitsError("the logits of a sequence are not finite")
        plain = [
            row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and not _filtered(draw.sampling)
        ]
        filtered = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and _filtered(draw.sampling)]
        # A row is handled by its own parameters, never by its neighbours': rounding must not depend on the batch.
        for rows, choose in ((plain, choose_any), (filtered, choose_filtered)):
            if rows:
                some = [draws[row] for row in rows]
                numbers = torch.tensor(
                    [uniform(draw.sampling.seed, draw.position) for draw in some], dtype=torch.float64
                )
                tokens[rows] = choose(logits[rows], [draw.sampling for draw in some], numbers)
        chosen: list[int] = tokens.tolist()
        return chosen


def _filtered(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1


def _probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    temperatures = torch.tensor([sampling.temperature for sampling in params], dtype=torch.float64)
    return torch.softmax(logits.double() / temperatures[:, None], -1)


def _invert(probabilities: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Index of the first entry at which the running sum exceeds `numbers` times the whole sum; never an entry of weight 0."""
    sums = probabilities.cumsum(-1)
    targets = numbers[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, targets, right=True)[:, 0]
    last = (sums < sums[:, -1:]).sum(-1)
    return torch.minimum(found, last)


def choose_any(logits: torch.Tensor, params: Sequence[SamplingParams], numbers: torch.Tensor) -> torch.Tensor:
    """Draw each row from softmax(logits / temperature), by inverting the distribution in the order of token ids."""
    return _invert(_probabilities(logits, params), numbers)


def choose_filtered(logits: torch.Tensor, params: Sequence[SamplingParams], numbers: torch.Tensor) -> torch.Tensor:
    """The same after `top_k`, then `top_p`: the fewest likeliest tokens that have at least `top_p` of what top_k left.

    Equal logits rank by token id; the distribution is inverted in the order of rank.
    """
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = _probabilities(ranked, params)
    size = logits.shape[-1]
    limits = torch.tensor([sampling.top_k if sampling.top_k > 0 else size for sampling in params])
    probabilities.masked_fill_(torch.arange(size) >= limits[:, None], 0.0)
    shares = torch.tensor([sampling.top_p for sampling in params], dtype=torch.float64)[:, None]
    sums = probabilities.cumsum(-1)
    # With a share of 1 nothing is cut, although rounding may have brought the sum there early.
    surplus = (sums - probabilities >= shares * sums[:, -1:]) & (shares < 1)
    surplus[:, 0] = False
    probabilities.masked_fill_(surplus, 0.0)
    return order.gather(-1, _invert(probabilities, numbers)[:, None])[:, 0]
