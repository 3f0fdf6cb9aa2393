"""Seeded faults for the in-memory bus: the same seed gives the same losses, repeats and delays."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Faults(Protocol):
    """Decides what becomes of each delivery of a core message."""

    def deliveries(self, subject: str) -> Sequence[float]:
        """Return the delay in seconds of each copy that arrives: `(0.0,)` is ordinary, `()` is lost."""
        ...


class NoFaults:
    """Everything arrives once and at once."""

    def deliveries(self, _subject: str) -> Sequence[float]:
        """See `Faults.deliveries`."""
        return (0.0,)


@dataclass
class SeededFaults:
    """Loses, repeats and delays at random. Different delays are what reorders."""

    rng: random.Random
    loss: float = 0.0
    """Probability that a delivery is lost."""
    repeat: float = 0.0
    """Probability that one that is not lost comes twice."""
    max_delay_s: float = 0.0
    """Delays are uniform between 0 and this."""
    protected: tuple[str, ...] = field(default=())
    """Prefixes of subjects that are left alone."""

    def deliveries(self, subject: str) -> Sequence[float]:
        """See `Faults.deliveries`. Draws the same count of numbers whatever they say, so that runs stay comparable."""
        lost, repeated, first, second = (self.rng.random() for _ in range(4))
        if subject.startswith(self.protected):
            return (0.0,)
        if lost < self.loss:
            return ()
        delays = (first * self.max_delay_s, second * self.max_delay_s)
        return delays if repeated < self.repeat else delays[:1]
