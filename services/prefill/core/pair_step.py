"""The life of a link, as one pure function: met, linked or refused, unlinked, met again; met again at once when it is doubted.

Whatever happens is first noted, then `_settle` compares what is with what ought to be and begins the next thing, if none is
under way. So at most one thing is done for a pair at a time, and news that comes meanwhile is acted on when it has ended.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from contracts.links import LinkEventName
from services.prefill.core.pair import (
    GRACE_S,
    MAX_FAILURES,
    UNREACHABLE,
    Doing,
    Pair,
    Phase,
    Refusal,
    pause_s,
)
from services.prefill.core.pair_events import (
    Connect,
    Connected,
    Disconnect,
    Disconnected,
    Doubted,
    Meet,
    Met,
    OwnDrain,
    PairEffect,
    PairEvent,
    PairRefused,
    PeerLost,
    PeerSeen,
    Tell,
    Tick,
    TryFailed,
)

Stepped = tuple[Pair, tuple[PairEffect, ...]]


def step(pair: Pair, event: PairEvent) -> Stepped:
    """The pair after an event, and what to do. The outcome of something that is not being done changes nothing."""
    num_transfers: int | None = None
    effects: tuple[PairEffect, ...] = ()
    match event:
        case PeerSeen(incarnation=incarnation, is_ready=is_ready):
            pair = replace(pair, alive=incarnation, is_ready=is_ready)
        case PeerLost():
            pair = replace(pair, alive="", is_ready=False)
        case OwnDrain():
            pair = replace(pair, is_closed=True)
        case Tick():
            num_transfers = event.num_transfers
        case Doubted(incarnation=incarnation, reason=reason):
            if pair.phase is Phase.LINKED and pair.incarnation == incarnation and not pair.doubt:
                pair = replace(pair, doubt=reason)
        case Met() | PairRefused() | TryFailed() | Connected() | Disconnected():
            if not _awaited(pair, event):
                return pair, ()
            pair, effects = _end(pair, event)
        case _:
            assert_never(event)
    pair, more = _settle(pair, event.at, num_transfers)
    return pair, (*effects, *more)


def _awaited(pair: Pair, event: Met | PairRefused | TryFailed | Connected | Disconnected) -> bool:
    if event.incarnation != pair.incarnation:
        return False
    match event:
        case Met():
            return pair.doing is Doing.MEETING
        case PairRefused() | TryFailed():
            return pair.doing in {Doing.MEETING, Doing.CONNECTING}
        case Connected():
            return pair.doing is Doing.CONNECTING
        case Disconnected():
            return pair.doing is Doing.DISCONNECTING


def _end(pair: Pair, event: Met | PairRefused | TryFailed | Connected | Disconnected) -> Stepped:
    """What was being done has ended. Whether the decode worker is still wanted is looked at by `_settle`."""
    pair = replace(pair, doing=Doing.NOTHING)
    is_wanted = pair.wanted == pair.incarnation
    match event:
        case Met(terms=terms):
            if not is_wanted:
                return pair, ()
            return replace(pair, doing=Doing.CONNECTING, terms=terms), (Connect(incarnation=pair.incarnation),)
        case PairRefused(refusal=refusal):
            return _refuse(replace(pair, retry_at=None), refusal) if is_wanted else (pair, ())
        case TryFailed(at=at, reason=reason):
            num_failures = pair.num_failures + 1
            pair = replace(pair, num_failures=num_failures, retry_at=at + pause_s(num_failures))
            if num_failures >= MAX_FAILURES and is_wanted:
                text = f"{num_failures} tries failed, the last one: {reason} (rule {UNREACHABLE}: mend that, it is tried again)"
                return _refuse(pair, Refusal(rule=UNREACHABLE, reason=text))
            return replace(pair, refusal=Refusal(rule="", reason=reason)), ()
        case Connected():
            pair = replace(pair, phase=Phase.LINKED, refusal=None, num_failures=0, retry_at=None)
            if not is_wanted:
                return pair, ()
            return replace(pair, was_linked=True), (
                Tell(event=LinkEventName.LINKED, incarnation=pair.incarnation, terms=pair.terms),
            )
        case Disconnected():
            return _gone(pair)


def _refuse(pair: Pair, refusal: Refusal) -> Stepped:
    is_news = pair.phase is not Phase.REFUSED
    pair = replace(pair, phase=Phase.REFUSED, refusal=refusal)
    tell = Tell(event=LinkEventName.LINK_REFUSED, incarnation=pair.incarnation, terms=pair.terms, refusal=refusal)
    return pair, (tell,) if is_news else ()


def _settle(pair: Pair, at: float, num_transfers: int | None) -> Stepped:
    """Begin what brings the pair closer to what ought to be. `num_transfers` is None when it is not known now."""
    if pair.doing is not Doing.NOTHING:
        return pair, ()
    is_wanted = pair.wanted == pair.incarnation
    match pair.phase:
        case Phase.GONE:
            return _meet(pair, pair.wanted) if pair.wanted else (pair, ())
        case Phase.MEETING | Phase.REFUSED:
            if not is_wanted:
                pair, effects = _gone(pair)
                return _meet(pair, pair.wanted) if pair.wanted else (pair, effects)
            if pair.retry_at is not None and at >= pair.retry_at:
                return replace(pair, doing=Doing.MEETING, retry_at=None), (Meet(incarnation=pair.incarnation),)
            return pair, ()
        case Phase.LINKED:
            if pair.doubt and pair.alive == pair.incarnation:
                pair = replace(pair, phase=Phase.UNLINKING, doing=Doing.DISCONNECTING)
                return pair, (Disconnect(incarnation=pair.incarnation),)
            if is_wanted:
                return pair, ()
            linger_until = at if pair.is_closed else at + GRACE_S
            return _unlink(replace(pair, phase=Phase.UNLINKING, linger_until=linger_until), at, num_transfers)
        case Phase.UNLINKING:
            return _unlink(pair, at, num_transfers)
        case _:
            assert_never(pair.phase)


def _unlink(pair: Pair, at: float, num_transfers: int | None) -> Stepped:
    """A dead peer's link ends at once; one that drains, or whose own side does, when its last transfer has ended."""
    is_over = not pair.was_linked or (at >= pair.linger_until and num_transfers == 0)
    if pair.alive == pair.incarnation and not is_over:
        return pair, ()
    return replace(pair, doing=Doing.DISCONNECTING), (Disconnect(incarnation=pair.incarnation),)


def _meet(pair: Pair, incarnation: str) -> Stepped:
    pair = replace(pair, phase=Phase.MEETING, incarnation=incarnation, doing=Doing.MEETING)
    return pair, (Meet(incarnation=incarnation),)


def _gone(pair: Pair) -> Stepped:
    """Nothing is left of the start that the pair was about."""
    left = Pair(alive=pair.alive, is_ready=pair.is_ready, is_closed=pair.is_closed)
    if not pair.was_linked:
        return left, ()
    return left, (
        Tell(event=LinkEventName.UNLINKED, incarnation=pair.incarnation, terms=pair.terms, reason=_why(pair)),
    )


def _why(pair: Pair) -> str:
    if not pair.alive:
        return "the decode worker is gone"
    if pair.alive != pair.incarnation:
        return "the decode worker has restarted"
    if pair.doubt:
        return pair.doubt
    return "the prefill worker drains" if pair.is_closed else "the decode worker drains"
