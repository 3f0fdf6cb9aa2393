"""Which handoffs a worker knows: those that live in it, and those that are over and must not come back. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Final

from common.worker.core.sequence import Sequence

MAX_REMEMBERED: Final = 65_536


class HandoffTable:
    """Sequences by handoff id and by number, and tombstones of released handoffs, each until its own moment.

    A release may overtake the request that it ends; its tombstone makes the late request a refusal instead of a leak.
    """

    def __init__(self) -> None:
        self._by_handoff: dict[str, Sequence] = {}
        self._by_seq: dict[int, Sequence] = {}
        self._tombstones: OrderedDict[str, float] = OrderedDict()
        self._last_seq = 0
        self._highest_fence = 0

    def __len__(self) -> int:
        return len(self._by_handoff)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Every sequence that lives."""
        return tuple(self._by_handoff.values())

    def next_seq(self) -> int:
        """A number for a new sequence, never given twice."""
        self._last_seq += 1
        return self._last_seq

    def add(self, sequence: Sequence) -> None:
        """Let a sequence live."""
        self._by_handoff[sequence.handoff_id] = sequence
        self._by_seq[sequence.seq] = sequence

    def get(self, handoff_id: str) -> Sequence | None:
        """The sequence of a handoff."""
        return self._by_handoff.get(handoff_id)

    def by_seq(self, seq: int) -> Sequence | None:
        """The sequence with a number."""
        return self._by_seq.get(seq)

    def remove(self, handoff_id: str, *, until: float) -> Sequence | None:
        """End a handoff, known or not, and refuse it until then. Returns the sequence that lived."""
        self._tombstones[handoff_id] = max(until, self._tombstones.pop(handoff_id, 0.0))
        while len(self._tombstones) > MAX_REMEMBERED:
            self._tombstones.popitem(last=False)
        sequence = self._by_handoff.pop(handoff_id, None)
        if sequence is not None:
            del self._by_seq[sequence.seq]
        return sequence

    def is_buried(self, handoff_id: str) -> bool:
        """Whether a handoff is over."""
        return handoff_id in self._tombstones

    def expire(self, now: float, but: Container[str] = ()) -> None:
        """Forget tombstones whose moment has passed, `but` those of handoffs that are still being ended."""
        for handoff_id in [key for key, until in self._tombstones.items() if until <= now and key not in but]:
            del self._tombstones[handoff_id]

    def is_deposed(self, fence: int) -> bool:
        """Whether a higher fence has been seen. Raises none itself."""
        return fence < self._highest_fence

    def is_news(self, fence: int) -> bool:
        """Whether no fence as high has been seen: a command that bears it would depose whoever leads."""
        return fence > self._highest_fence

    def admits_fence(self, fence: int) -> bool:
        """Whether a command of this fence may be obeyed; a lower one than the highest seen comes from a deposed broker."""
        self._highest_fence = max(self._highest_fence, fence)
        return fence == self._highest_fence
