"""What guessing tokens came to for one request, as its worker tells it."""

from __future__ import annotations

import msgspec

from contracts.numbers import Whole


class Guesses(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that gave a request tokens at the worker that generated it, and its guesses by their place in a step.

    `drafted[i]` steps verified a guess number `i + 1`, and in `accepted[i]` of them it was right with all before it. Guesses behind the
    request's end count too: they were verified.
    In the steps that verified guesses of it, guessing took `draft_ms`, and the model's pass over tokens and guesses `verify_ms`. Who
    shared these steps is told the same times.
    """

    num_steps: Whole
    drafted: tuple[Whole, ...]
    accepted: tuple[Whole, ...]
    draft_ms: float = 0.0
    verify_ms: float = 0.0

    @property
    def num_drafted(self) -> int:
        """All guesses."""
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        """Those that were right."""
        return sum(self.accepted)
