"""How many steps a sequence took, and how many of its tokens were guessed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.guesses import Guesses


@dataclass(slots=True)
class GuessCounts:
    """Steps that gave a sequence tokens, and what became of the guesses that they verified.

    `drafted_at[i]` counts the steps that verified a guess number `i + 1`, `accepted_at[i]` those in which it was right, with all before
    it. Both have as many entries as the longest run of guesses. `draft_ns` and `verify_ns` are the times of the steps that verified some.
    """

    num_steps: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_ns: int = 0
    verify_ns: int = 0

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
        return Guesses(
            num_steps=self.num_steps,
            drafted=tuple(self.drafted_at),
            accepted=tuple(self.accepted_at),
            draft_ms=self.draft_ns / 1e6,
            verify_ms=self.verify_ns / 1e6,
        )

    def add(self, num_drafted: int, num_accepted: int, *, draft_ns: int = 0, verify_ns: int = 0) -> None:
        """Count a step that verified so many guesses, of which the first `num_accepted` were right, and its times if it did."""
        self.num_steps += 1
        if num_drafted:
            self.draft_ns += draft_ns
            self.verify_ns += verify_ns
        self.drafted_at += [0] * (num_drafted - len(self.drafted_at))
        self.accepted_at += [0] * (num_drafted - len(self.accepted_at))
        for at in range(num_drafted):
            self.drafted_at[at] += 1
            self.accepted_at[at] += at < num_accepted
