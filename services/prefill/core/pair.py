"""A prefill worker and one decode worker that it knows of: where they stand with each other."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

GRACE_S: Final = 1.0
"""How long a link outlives the word that its peer drains: what the peer had granted by then may be on its way still."""

MAX_FAILURES: Final = 5
"""Failed tries in a row after which a pair counts as refused; it is tried on."""

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
UNREACHABLE: Final = "reachable"
"""The rule that a pair breaks which could not be linked in `MAX_FAILURES` tries."""


class Phase(StrEnum):
    """Where a pair stands. GONE pairs have no record, the others' is the `LinkState` of the same name."""

    MEETING = "meeting"
    LINKED = "linked"
    REFUSED = "refused"
    UNLINKING = "unlinking"
    GONE = "gone"


class Doing(StrEnum):
    """What the shell is doing for a pair. It is one thing at a time, and it always ends with an event."""

    NOTHING = "nothing"
    MEETING = "meeting"
    CONNECTING = "connecting"
    DISCONNECTING = "disconnecting"


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What two workers found when they met: see `contracts.links.LinkRecord`."""

    topology: str
    transport: str
    num_parts: int
    token_bytes: int
    state_bytes: int
    has_drafts: bool = False
    why_no_drafts: str = ""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a pair is not linked: the rule that it breaks, and in words what differs and what to change."""

    rule: str
    reason: str


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One pair. `phase`, `doing`, `terms` and `refusal` are about the start `incarnation` of the decode worker.

    `alive` is the start that lives as far as is known ("" for none), `is_ready` whether it takes new requests. `is_closed`
    says that the prefill worker itself drains, `doubt` why the link is undone though both want it. Moments are seconds of one monotonic clock.
    """

    phase: Phase = Phase.GONE
    incarnation: str = ""
    doing: Doing = Doing.NOTHING
    alive: str = ""
    is_ready: bool = False
    is_closed: bool = False
    was_linked: bool = False
    terms: Terms | None = None
    refusal: Refusal | None = None
    num_failures: int = 0
    retry_at: float | None = None
    linger_until: float = 0.0
    doubt: str = ""

    @property
    def wanted(self) -> str:
        """The start that this worker should be linked with; "" for none."""
        return self.alive if self.is_ready and not self.is_closed else ""

    @property
    def may_transfer(self) -> bool:
        """Whether a grant of the start `incarnation` can be written to: also while the link waits for its last transfers."""
        connected = self.phase is Phase.LINKED or (self.phase is Phase.UNLINKING and self.doing is Doing.NOTHING)
        return connected and self.alive == self.incarnation

    @property
    def is_forgotten(self) -> bool:
        """Whether nothing is left to know of the pair."""
        return self.phase is Phase.GONE and self.doing is Doing.NOTHING and not self.alive


def pause_s(num_failures: int) -> float:
    """How long to wait after so many failures in a row: each time twice as long, up to a bound."""
    return min(FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 16), LONGEST_PAUSE_S)
