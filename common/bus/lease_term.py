"""One holding of a lease, judged by the holder's own clock. Pure.

The server forgets a value `ttl_s` after its last write. A write happens at the server after it was sent, so a holder that
counts from the moment of sending ends its term before the server does, as long as its clock loses less than
`1 - STEP_DOWN_SHARE` of the time.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

RENEW_SHARE: Final = 0.25
OVERDUE_SHARE: Final = 0.35
STEP_DOWN_SHARE: Final = 0.7
REVISION_BITS: Final = 32
_NANOSECONDS: Final = 1_000_000_000


def fence_of(epoch: int, revision: int) -> int:
    """The number of a term: larger than that of every earlier one, also of those from before the store was lost.

    `epoch` is in nanoseconds, as `port.Bucket.epoch` gives it; `revision` is that of the write that began the term.
    """
    if not 0 <= revision < 1 << REVISION_BITS:
        raise ValueError(f"revision: {revision} is not allowed; the rule is: 0 or more, below 2**{REVISION_BITS}")
    return epoch // _NANOSECONDS << REVISION_BITS | revision


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Held from the acknowledgement of a write that was sent at `renewed_at`. Times are monotonic seconds."""

    ttl_s: float
    fence: int
    revision: int
    """Of the last write that was acknowledged."""
    renewed_at: float

    @property
    def renew_at(self) -> float:
        """When to write again."""
        return self.renewed_at + RENEW_SHARE * self.ttl_s

    @property
    def ends_at(self) -> float:
        """When it is over unless it was renewed. From then on nothing may be done in its name."""
        return self.renewed_at + STEP_DOWN_SHARE * self.ttl_s

    def is_held(self, now: float) -> bool:
        """Whether the holder may still act."""
        return now < self.ends_at

    def is_overdue(self, now: float) -> bool:
        """Whether a write that was due has not been acknowledged: nothing tells that the store still answers."""
        return now >= self.renewed_at + OVERDUE_SHARE * self.ttl_s

    def renewed(self, *, revision: int, sent_at: float) -> Self:
        """The same term after one more write."""
        return replace(self, revision=revision, renewed_at=sent_at)
