"""Plots: faults that belong together, and requests to suit them. They lead to places that faults by chance hardly ever find.

Every handoff has moments that last no longer than a message is under way. Something rare happens there only when messages, the
store or a broker's takeover are slow at that very time: a plot makes them so, and chance does the rest.
"""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Final

import msgspec

_LEASE_S: Final = 10.0


class FaultKind(StrEnum):
    """What goes wrong. Each lasts `for_s`."""

    NOISE = "noise"  # messages are lost, repeated, late and out of order; store calls and their answers, too
    LATE = "late"  # messages and answers are late, and out of order; hardly one is lost
    STORE = "store"  # the store is slow, and loses calls and answers
    WRITES = "writes"  # the same, but of the records of single handoffs only: who leads goes on leading
    BLINK = "blink"  # the bus is down for an instant, again and again
    CRASH = "crash"  # a process is killed, and started again after that time
    DRAIN = "drain"  # a worker or a broker is told to end in order, within that time; it is started again
    FREEZE = "freeze"  # a process stands still, then wakes up
    OVERLAP = "overlap"  # the broker that leads stands still, and wakes up in the middle of another one's takeover
    RANK = "rank"  # one rank of a worker dies: its worker ends and is started again
    STEP = "step"  # a step fails on all ranks alike: once
    PARTITION = "partition"  # one process is cut off from the bus
    OUTAGE = "outage"  # the bus is down
    STANDSTILL = "standstill"  # the bus stands still, and then does all that it was sent
    SLOW_LINK = "slow_link"  # transfers between workers take a hundred times as long
    BLACK_HOLE = "black_hole"  # transfers between workers do not arrive; senders give up, some arrive afterwards
    RAGGED_LINK = "ragged_link"  # transfers arrive twice, half, not at all, or after their sender gave up
    STALL = "stall"  # one rank of a worker stands still, and with it every command to all of them
    REFUSAL = "refusal"  # one rank of a worker refuses a command that the others obey
    WIPE = "wipe"  # the bus is down, and comes back with an empty store


LINK_FAULTS: Final = (FaultKind.SLOW_LINK, FaultKind.BLACK_HOLE, FaultKind.RAGGED_LINK)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. `whom` names a process or is empty; `severity` from 0 to 1 is how bad it is.

    With a `peer` a link fault is of the link between the two workers alone.
    """

    kind: FaultKind
    whom: str
    peer: str = ""
    at_s: float
    for_s: float
    severity: float


class Plot(StrEnum):
    """What a schedule is about, beside faults by chance."""

    CHANCE = "chance"  # nothing more
    LATE_ANSWERS = "late_answers"  # whatever was asked is answered when something else has happened
    SLOW_STORE = "slow_store"  # ends wait for the store, past deadlines, too
    TAKEOVER = "takeover"  # the leader is gone, and the next one has slow answers
    OVERLAP = "overlap"  # the leader was frozen, and is back while the next one begins
    ROUTERS = "routers"  # routers die while messages are late
    INHERITED = "inherited"  # the leader is gone while messages were late: workers have told nobody how prompts ended
    AWAKENING = "awakening"  # the leader was frozen, and wakes up when another one has done all of its work


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What requests are like, as shares of all: tight deadlines, a single token, few tokens, clients that leave."""

    tight: float = 0.15
    tight_s: tuple[float, float] = (0.05, 0.8)
    single: float = 0.15
    short: float = 0.0
    leaves: float = 0.2
    span_s: float = 6.0
    deadlines_s: tuple[float, ...] = (8.0, 12.0, 18.0)


WISHES: Final[dict[Plot, Wishes]] = {
    Plot.CHANCE: Wishes(),
    Plot.LATE_ANSWERS: Wishes(short=0.6, leaves=0.3),
    Plot.SLOW_STORE: Wishes(tight=0.7, tight_s=(0.1, 2.0), single=0.3, short=0.5),
    Plot.TAKEOVER: Wishes(tight=0.0, single=0.5, short=0.4, leaves=0.1, deadlines_s=(14.0, 18.0, 24.0)),
    Plot.OVERLAP: Wishes(tight=0.0, single=0.0, short=0.8, leaves=0.05, deadlines_s=(18.0, 24.0)),
    Plot.ROUTERS: Wishes(tight=0.0, short=0.5, leaves=0.0),
    Plot.INHERITED: Wishes(tight=0.0, single=0.75, short=1.0, leaves=0.05, span_s=3.5, deadlines_s=(18.0, 24.0)),
    Plot.AWAKENING: Wishes(tight=0.0, single=0.0, short=1.0, leaves=0.05, span_s=3.5, deadlines_s=(24.0, 30.0)),
}


def faults_of(
    plot: Plot, rng: random.Random, *, workers: tuple[str, ...], routers: tuple[str, ...], brokers: tuple[str, ...]
) -> list[Fault]:
    """The faults that a plot needs."""
    at = rng.uniform(0.3, 4.0)

    def fault(kind: FaultKind, at_s: float, for_s: float, whom: str = "") -> Fault:
        return Fault(kind=kind, whom=whom, at_s=max(0.0, at_s), for_s=for_s, severity=rng.uniform(0.3, 1.0))

    def crash(whom: tuple[str, ...], earliest_s: float, latest_s: float) -> Fault:
        return fault(FaultKind.CRASH, rng.uniform(earliest_s, latest_s), rng.uniform(0.02, 0.3), rng.choice(whom))

    match plot:
        case Plot.CHANCE:
            return []
        case Plot.LATE_ANSWERS:
            late, store = fault(FaultKind.LATE, 0.0, 8.0), fault(FaultKind.STORE, at, rng.uniform(0.5, 4.0))
            blinks = fault(FaultKind.BLINK, at, rng.uniform(0.5, 4.0))
            crashes = [crash(workers, 0.2, 6.0), crash(workers, 0.2, 6.0)]
            return [late, store, *crashes, blinks] if rng.random() < 0.5 else [late, store, *crashes]
        case Plot.SLOW_STORE:
            disturbed = [fault(FaultKind.STORE, 0.0, 8.0), fault(FaultKind.LATE, 0.0, rng.uniform(3.0, 8.0))]
            blinks = fault(FaultKind.BLINK, rng.uniform(0.0, 4.0), rng.uniform(1.0, 4.0))
            return [*disturbed, blinks] if rng.random() < 0.6 else disturbed
        case Plot.TAKEOVER:
            ends = fault(FaultKind.CRASH, at, rng.uniform(0.5, 14.0), brokers[0])
            before = fault(FaultKind.STORE, at - 1.0, 1.5)
            after = at + _LEASE_S - rng.uniform(0.0, 4.0)
            slow = [fault(FaultKind.LATE, after, 6.0), fault(FaultKind.STORE, after, 6.0)]
            return [before, ends, *slow, crash(workers, after, after + 4.0)]
        case Plot.OVERLAP:
            overlap = fault(FaultKind.OVERLAP, at, 1.5 * _LEASE_S)
            store = fault(FaultKind.STORE, at + rng.uniform(-1.0, 6.0), 1.5 * _LEASE_S)
            late = fault(FaultKind.LATE, at - 0.5, rng.choice((1.0, 1.5 * _LEASE_S)))
            return [late, overlap, store]
        case Plot.INHERITED:
            at = rng.uniform(2.3, 3.2)  # pairs have been met, and requests still come
            before = fault(FaultKind.LATE, at - 0.8, 1.0)
            ends = fault(FaultKind.CRASH, at, rng.uniform(0.5, 14.0), brokers[0])
            prefills = [worker for worker in workers if worker.startswith("prefill")]
            fails = fault(FaultKind.STEP, at + rng.uniform(-0.2, 0.2), 1.0, rng.choice(prefills))
            # Its lease was renewed once: it is free when a quarter more than its time has passed.
            late = fault(FaultKind.LATE, 1.2 * _LEASE_S, 8.0)
            # A claim that is not answered is given up when the store is quick again: ends overtake what is asked then.
            writes = fault(FaultKind.WRITES, 1.2 * _LEASE_S, rng.uniform(0.12, 0.18) * _LEASE_S)
            return [before, ends, fails, late, writes]
        case Plot.AWAKENING:
            at, for_s = rng.uniform(2.3, 3.2), rng.uniform(1.6, 1.9) * _LEASE_S
            late, frozen = fault(FaultKind.LATE, at - 0.8, 1.3), fault(FaultKind.FREEZE, at, for_s, brokers[0])
            # Behind a reconnect it is told of all workers again: when it wakes up it hears of them before anything else.
            lost = fault(FaultKind.PARTITION, at + 0.005, 0.02, brokers[0])
            # Those whom it asks are others by then, as it learns first; prefill workers come first in line.
            dead = [
                fault(FaultKind.CRASH, at + rng.uniform(1.3, 1.5) * _LEASE_S, rng.uniform(0.02, 0.3), worker)
                for worker in workers[:3]
            ]
            # Without a bus whatever it asks fails at once, before its term is over; with one, its writes are answered.
            outage = fault(FaultKind.OUTAGE, at + for_s - 0.2, 0.4)
            return [late, frozen, lost, *dead, outage] if rng.random() < 0.6 else [late, frozen, lost, *dead]
        case Plot.ROUTERS:
            return [fault(FaultKind.LATE, 0.0, 8.0), *(crash(routers, 0.2, 6.0) for _ in range(3))]
