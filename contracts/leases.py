"""Leases: which of several processes that could do a thing does it now."""

from __future__ import annotations

from contracts.codec import Versioned
from contracts.numbers import Whole


class LeaseValue(Versioned, frozen=True, kw_only=True, tag="lease"):
    """What a key of `PD_LEASES` shows of the holder.

    `start` names one start of one process, so that nobody takes another's lease for his. `fence` is the number of the term that is
    held; 0 in the write that begins the term, since the number is made of that write's own revision.
    """

    holder: str
    start: str
    fence: Whole = 0
