"""Seeded faults for the in-memory bus: the same seed gives the same losses, repeats, delays and lost answers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class Trip:
    """What becomes of one call to the store on its way there and back."""

    there_s: float = 0.0
    """Seconds until the server does what is asked."""
    lost: bool = False
    """The call never arrives: nothing is done, and the caller hears nothing."""
    back_s: float = 0.0
    """Seconds until the answer is back."""
    unanswered: bool = False
    """The server does what is asked, and the answer is lost: to the caller it looks like `lost`."""


DIRECT: Final = Trip()
"""There and back at once."""


class Faults(Protocol):
    """Decides what becomes of each delivery of a core message, and of each call to a bucket or stream."""

    def deliveries(self, subject: str) -> Sequence[float]:
        """Return the delay in seconds of each copy that arrives: `(0.0,)` is ordinary, `()` is lost."""
        ...

    def trip(self, subject: str) -> Trip:
        """Return what happens to a call about this subject; `$KV.BUCKET.key` is a key's."""
        ...


class NoFaults:
    """Everything arrives once and at once."""

    def deliveries(self, _subject: str) -> Sequence[float]:
        """See `Faults.deliveries`."""
        return (0.0,)

    def trip(self, _subject: str) -> Trip:
        """See `Faults.trip`."""
        return DIRECT


@dataclass
class SeededFaults:
    """Loses, repeats and delays at random. Different delays are what reorders.

    Messages and calls to the store draw from `rng` in the order in which they are made, so a run is repeatable.
    """

    rng: random.Random
    loss: float = 0.0
    """Probability that a delivery is lost."""
    repeat: float = 0.0
    """Probability that one that is not lost comes twice."""
    max_delay_s: float = 0.0
    """Delays of deliveries are uniform between 0 and this."""
    store_loss: float = 0.0
    """Probability that a call to the store never arrives."""
    answer_loss: float = 0.0
    """Probability that one that arrives is done, and its answer lost: the ambiguous outcome."""
    store_delay_s: float = 0.0
    """Delays of calls and of their answers are uniform between 0 and this."""
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

    def trip(self, subject: str) -> Trip:
        """See `Faults.trip`. Draws nothing while no fault of the store is asked for."""
        if not (self.store_loss or self.answer_loss or self.store_delay_s):
            return DIRECT
        lost, unanswered, there, back = (self.rng.random() for _ in range(4))
        if subject.startswith(self.protected):
            return DIRECT
        return Trip(
            there_s=there * self.store_delay_s,
            lost=lost < self.store_loss,
            back_s=back * self.store_delay_s,
            unanswered=unanswered < self.answer_loss,
        )
