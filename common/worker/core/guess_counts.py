"""How many steps a sequence took, and how many of its tokens were guessed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.guesses import Guesses


@dataclass(slots=True)
class GuessCounts:
    """Steps that gave a sequence tokens, and what became of the guesses that they verified.

    `drafted_at[i]` counts the steps that verified a guess number `i + 1`, `accepted_at[i]` those in which it was right, with all before
    it. Both have as many entries as the longest run of guesses.
    """

    num_steps: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    @property
    def num_drafted(self) -> int:
        """Guesses that were verified."""
        return sum(self.drafted_at)

    @property
    def num_accepted(self) -> int:
        """Guesses that were right: tokens that took no step of their own."""
        return sum(self.accepted_at)

    @property
    def told(self) -> Guesses | None:
        """As others are told of it; None where nothing was guessed."""
        if not self.num_drafted:
            return None
        return Guesses(num_steps=self.num_steps, drafted=tuple(self.drafted_at), accepted=tuple(self.accepted_at))

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count a step that verified so many guesses, of which the first `num_accepted` were right."""
        self.num_steps += 1
        self.drafted_at += [0] * (num_drafted - len(self.drafted_at))
        self.accepted_at += [0] * (num_drafted - len(self.accepted_at))
        for at in range(num_drafted):
            self.drafted_at[at] += 1
            self.accepted_at[at] += at < num_accepted
