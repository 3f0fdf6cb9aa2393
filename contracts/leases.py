"""Leases: which of several processes that could do a thing does it now."""

from __future__ import annotations

from contracts.codec import Versioned


class LeaseValue(Versioned, frozen=True, kw_only=True, tag="lease"):
    """What a key of `PD_LEASES` shows of the holder.

    `start` names one start of one process, so that nobody takes another's lease for his.
    """

    holder: str
    start: str
