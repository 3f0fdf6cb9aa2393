"""The drafter port: who guesses tokens that the model then verifies, several in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from contracts.requests import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Advance:
    """How far a step brought a sequence: it has computed `token_ids` at positions from `start` on, as far as they were right.

    `next_token` is the one behind them, None while nobody knows it. `block_ids` are this rank's blocks of the sequence, `first_row`
    is where the step's hidden states of its tokens begin. `num_drafts` are wanted for the positions behind `next_token`.
    """

    seq: int
    block_ids: Sequence[int]
    start: int
    token_ids: Sequence[int]
    next_token: int | None
    first_row: int
    num_drafts: int
    sampling: SamplingParams
    num_prompt_tokens: int

    @property
    def end(self) -> int:
        """Where `next_token` stands."""
        return self.start + len(self.token_ids)


class Drafter(Protocol):
    """Guesses. Every rank makes the same calls, and gets the same guesses."""

    @property
    def needs_hidden(self) -> bool:
        """Whether it reads the model's hidden states: then a step computes all rows to the end."""
        ...

    def advance(self, hidden: torch.Tensor | None, advances: Sequence[Advance]) -> list[list[int]]:
        """Take in what a step has computed, and guess at most `num_drafts` tokens for each.

        `hidden [T, hidden]` are the step's rows after the final norm; None unless they are needed. A wrong guess costs time, and
        nothing else.
        """
        ...

    def forget(self, seq: int) -> None:
        """The sequence has lost its memory. Unknown ones are no error."""
        ...


def num_accepted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """How many guesses were right: as many of `drafts` as begin `chosen`, the tokens that the model itself chose there."""
    for at, (draft, token) in enumerate(zip(drafts, chosen, strict=False)):
        if draft != token:
            return at
    return min(len(drafts), len(chosen))
