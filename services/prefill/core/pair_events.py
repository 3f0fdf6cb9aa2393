"""What happens to a pair of workers (`PairEvent`), and what the shell is to do about it (`PairEffect`).

`at` is when, in seconds of one monotonic clock. What the shell was told to do ends with exactly one of the events that
name the `incarnation` that it was done for.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from contracts.links import LinkEventName
from services.prefill.core.pair import Refusal, Terms


class PeerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The decode worker's record: which start lives, and whether it takes new requests."""

    at: float
    incarnation: str
    is_ready: bool


class PeerLost(msgspec.Struct, frozen=True, kw_only=True):
    """The decode worker has signed off, or has not been heard of for too long."""

    at: float


class OwnDrain(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill worker itself takes nothing new from now on, for ever."""

    at: float


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time has passed, or a transfer has ended. `num_transfers` are those that still go to the pair's decode worker."""

    at: float
    num_transfers: int


class Doubted(msgspec.Struct, frozen=True, kw_only=True):
    """What was pushed to this start of the decode worker has not arrived, although it lives."""

    at: float
    incarnation: str
    reason: str


class Met(msgspec.Struct, frozen=True, kw_only=True):
    """The decode worker was described, compared, and the plan is compiled."""

    at: float
    incarnation: str
    terms: Terms


class PairRefused(msgspec.Struct, frozen=True, kw_only=True):
    """The two can never be linked as they are: by comparison, by the planner, or by the engine."""

    at: float
    incarnation: str
    refusal: Refusal


class TryFailed(msgspec.Struct, frozen=True, kw_only=True):
    """Describing or connecting did not work this time. Nothing is connected."""

    at: float
    incarnation: str
    reason: str


class Connected(msgspec.Struct, frozen=True, kw_only=True):
    """The engine is linked with the decode worker."""

    at: float
    incarnation: str


class Disconnected(msgspec.Struct, frozen=True, kw_only=True):
    """The engine has forgotten the decode worker."""

    at: float
    incarnation: str


PairEvent: TypeAlias = (
    PeerSeen | PeerLost | OwnDrain | Tick | Doubted | Met | PairRefused | TryFailed | Connected | Disconnected
)


class Meet(msgspec.Struct, frozen=True, kw_only=True):
    """Describe, compare, plan. Ends with `Met`, `PairRefused` or `TryFailed`."""

    incarnation: str


class Connect(msgspec.Struct, frozen=True, kw_only=True):
    """Link the engine. Ends with `Connected`, `PairRefused` or `TryFailed`."""

    incarnation: str


class Disconnect(msgspec.Struct, frozen=True, kw_only=True):
    """Unlink the engine. Ends with `Disconnected`."""

    incarnation: str


class Tell(msgspec.Struct, frozen=True, kw_only=True):
    """Publish an event, count it, log it."""

    event: LinkEventName
    incarnation: str
    terms: Terms | None = None
    refusal: Refusal | None = None
    reason: str = ""


PairEffect: TypeAlias = Meet | Connect | Disconnect | Tell
