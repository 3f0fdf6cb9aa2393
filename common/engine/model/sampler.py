"""Choosing the next token: deterministic for given logits, parameters, seed and position, whatever else is in the batch.

A token is drawn by a race that all tokens run (`common.engine.model.race`): the share of its weight is its probability to win. Whoever
draws at the same place from other weights, as a draft does, runs the same race.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from common.engine.model.race import arrival_times
from contracts.requests import SamplingParams

NO_TOKEN: Final = -1
"""Stands where no token could be chosen."""

_NUMBERS_AT_ONCE: Final = 1 << 18
"""Rows are drawn in batches of so many weights, which stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One token to choose, at `position` of its sequence; `num_generated` tokens have been generated before it."""

    sampling: SamplingParams
    position: int
    num_generated: int

    @classmethod
    def at(cls, position: int, sampling: SamplingParams, num_prompt_tokens: int) -> Draw:
        """The draw of the token at `position` behind a prompt. Model and draft must make the same one."""
        return cls(sampling=sampling, position=position, num_generated=max(0, position - num_prompt_tokens))


class Sampler:
    """Chooses tokens on the sampling rank. `eos_token_ids` are what `min_tokens` forbids."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos = torch.tensor(sorted(eos_token_ids), dtype=torch.int64)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """Choose one token for each row of `logits [n, vocab]`, which may be overwritten.

        `NO_TOKEN` for a row whose best logit is not finite: something went wrong before, and not with its neighbours.
        """
        logits = logits.float()
        for row, draw in enumerate(draws):
            if draw.num_generated < draw.sampling.min_tokens and not draw.sampling.ignore_eos:
                logits[row, self._eos] = -torch.inf
        best, tokens = logits.max(-1)
        sound = best.isfinite()
        tokens[~sound] = NO_TOKEN
        drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and sound[row]]
        size = logits.shape[-1]
        count = max(1, _NUMBERS_AT_ONCE // size)
        for first in range(0, len(drawn), count):
            rows = drawn[first : first + count]
            places = [(draws[row].sampling.seed, draws[row].position) for row in rows]
            params = [draws[row].sampling for row in rows]
            tokens[rows] = choose(logits[rows], params, arrival_times(places, size))
        chosen: list[int] = tokens.tolist()
        return chosen


def choose(logits: torch.Tensor, params: Sequence[SamplingParams], times: torch.Tensor) -> torch.Tensor:
    """Draw each row from softmax(logits / temperature) after `top_k`, then `top_p`: whose time over its weight is least.

    `times [n, vocab]` are those of `arrival_times`. A token that is filtered out, or without weight, is never drawn.
    """
    temperatures = torch.tensor([sampling.temperature for sampling in params], dtype=torch.float64)[:, None]
    # A row is handled by its own parameters, never by its neighbours': rounding must not depend on the batch.
    weights = (logits.double() - logits.max(-1, keepdim=True).values).div_(temperatures).exp_()
    filtered = [row for row, sampling in enumerate(params) if sampling.top_k > 0 or sampling.top_p < 1]
    if filtered:
        weights[filtered] = _filter(logits[filtered], weights[filtered], [params[row] for row in filtered])
    return (weights / times).argmax(-1)


def _filter(logits: torch.Tensor, weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """`weights` of `logits` after `top_k` and `top_p`: of the k likeliest the fewest likeliest with at least p of what these weigh.

    All others weigh nothing. Equal logits rank by token id.
    """
    order = logits.argsort(dim=-1, descending=True, stable=True)
    ranked = weights.gather(-1, order)
    size = logits.shape[-1]
    limits = torch.tensor([sampling.top_k if sampling.top_k > 0 else size for sampling in params])
    ranked.masked_fill_(torch.arange(size) >= limits[:, None], 0.0)
    shares = torch.tensor([sampling.top_p for sampling in params], dtype=torch.float64)[:, None]
    sums = ranked.cumsum(-1)
    # With a share of 1 nothing is cut, although rounding may have brought the sum there early.
    surplus = (sums - ranked >= shares * sums[:, -1:]) & (shares < 1)
    surplus[:, 0] = False
    ranked.masked_fill_(surplus, 0.0)
    return torch.zeros_like(weights).scatter_(-1, order, ranked)
