"""Prompts that nobody has asked to run for a while: how long that is, and which answer about one lets it go. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from contracts.errors import ErrorCode
from contracts.requests import Accepted, Refused, TokenFrame

UNCLAIMED_S: Final = 30.0
"""How long a prompt lies before it is asked about, and before it is asked about again.

A router submits the request right behind the last frame; a bus that does not answer holds it up for less than that.
"""

Outcome: TypeAlias = TokenFrame | Accepted | Refused
"""What the broker says of a handoff."""


class Needless(StrEnum):
    """Why a prompt will not be run."""

    UNKNOWN = "unknown"
    """The broker knows no such handoff: it was never submitted, or refused."""
    ENDED = "ended"
    """The handoff is over; its release was not heard here."""


class Unclaimed(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to be asked about: when its last frame came, and until when it may be run, on the clock of whoever keeps it."""

    handoff_id: str
    heard_at: float
    deadline: float


def why_needless(handoff_id: str, outcome: Outcome | None) -> Needless | None:
    """Why the prompt of a handoff can go, as the broker's answer has it; None while it may still be asked to run, or nobody knows.

    An answer about another handoff, or a refusal for any other reason than not to know it, tells nothing.
    """
    if outcome is None or outcome.handoff_id != handoff_id:
        return None
    match outcome:
        case TokenFrame(final=True):
            return Needless.ENDED
        case Refused(error=error) if error.code is ErrorCode.UNKNOWN_HANDOFF:
            return Needless.UNKNOWN
        case _:
            return None
