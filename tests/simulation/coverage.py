"""What schedules must have reached: (state, event) pairs of a handoff at the broker, and what faults do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, get_args

from contracts.handoff import HandoffState
from services.broker.core.events import Event
from services.broker.core.handoff import Handoff
from tests.simulation.plots import LINK_FAULTS, FaultKind

Pair = tuple[str, str]

ENOUGH_SCHEDULES: Final = 50_000
"""A campaign of so many must have reached every pair that can be reached; some are met once in ten thousand schedules."""

ENOUGH_FOR_EFFECTS: Final = 10_000
"""A campaign of so many must have seen everything that its faults are there for: the rarest happen once in a thousand schedules."""

EFFECTS: Final = (
    *(f"fault:{kind}" for kind in FaultKind),
    *(f"fault:{kind}:pair" for kind in LINK_FAULTS),
    *(f"refused_{command}" for command in ("bind", "extend", "link", "digest")),
    *(f"shard_{what}" for what in ("pulled", "failed", "half", "late", "hung")),
    *(f"transfer_{what}" for what in ("late", "twice", "half", "refused", "indeterminate", "hung")),
    "command_held",
    "drained",
    "drain_cut_short",
    "handoff_adopted",
    "orphan_released",
    "parts_unanswered",
    "quarantined",
    "request:left",
    "request:length",
    "request:draining",
    "router_drained",
    "router_gone",
    "sequence_preempted",
    "step_failed",
    "takeover",
    "takeover_by_ranks_that_share",
    "takeover_with_draft",
    "worker_gone",
)
"""What must have happened: every fault has found somebody, and has done what it is there for."""

_ONE_PLAN: Final = "a plan is looked for before decode is asked to reserve, and nothing is committed without its answer"
_ONE_GRANT: Final = "decode is asked to reserve once, and nothing is committed without its answer"
_SWEPT: Final = "the sweep that tells of the deadline passes over what has ended, in the same turn of the loop"

UNREACHABLE: Final[dict[Pair, str]] = {
    ("reserving", "PullAccepted"): "decode is asked to pull once prefill has ended, and nothing reserves again",
    (
        "reserving",
        "CommitAccepted",
    ): "decode is asked to commit once the record says COMMITTED, and nothing reserves again",
    ("reserving", "PartsUnanswered"): "parts are asked for once decode has reserved, and nothing reserves again",
    ("reserving", "PartsOverdue"): "parts are waited for once decode has reserved, and nothing reserves again",
    (
        "prefilling",
        "CommitAccepted",
    ): "decode is asked to commit once the record says COMMITTED, and nothing prefills again",
    ("committed", "PlanFound"): _ONE_PLAN,
    ("committed", "DecodeReserved"): _ONE_GRANT,
    ("decoding", "PlanFound"): _ONE_PLAN,
    ("decoding", "DecodeReserved"): _ONE_GRANT,
    ("finished", "DeadlinePassed"): _SWEPT,
    ("cancelled", "DeadlinePassed"): _SWEPT,
    ("failed", "DeadlinePassed"): _SWEPT,
}
"""Pairs that no schedule can reach, and why: each event answers what was asked in some state, and states never go back."""


def pair_of(handoff: Handoff, event: Event) -> Pair | None:
    """The state in which a handoff meets an event.

    None where it made way for what another broker wrote: `step` drops all that comes then, in whatever state that one is.
    """
    if handoff.forgotten and not handoff.terminal:
        return None
    return handoff.state.value, type(event).__name__


def every_pair() -> Iterator[Pair]:
    """Every state with every event."""
    for state in HandoffState:
        for event in get_args(Event):
            yield state.value, event.__name__


def never_reached(pairs: set[Pair]) -> list[Pair]:
    """The pairs that should have been reached and were not."""
    return [pair for pair in every_pair() if pair not in pairs and pair not in UNREACHABLE]


def owed(num_schedules: int, pairs: set[Pair]) -> list[Pair]:
    """The pairs whose absence is a failure of a campaign: a small one owes none."""
    return never_reached(pairs) if num_schedules >= ENOUGH_SCHEDULES else []


def not_seen(num_schedules: int, seen: Counter[str]) -> list[str]:
    """The effects whose absence is a failure of a campaign: a small one owes none."""
    return [effect for effect in EFFECTS if not seen[effect]] if num_schedules >= ENOUGH_FOR_EFFECTS else []


def coverage_lines(pairs: Counter[Pair], seen: Counter[str]) -> Iterator[str]:
    """What people read after a campaign: in how many schedules each pair was reached, and what happened how often."""
    every = list(every_pair())
    yield f"{len(pairs)} of {len(every) - len(UNREACHABLE)} pairs of a state and an event that can be reached were reached:"
    for state in HandoffState:
        events = sorted((event, count) for (of, event), count in pairs.items() if of == state.value)
        yield f"    {state.value}: {', '.join(f'{event} {count}' for event, count in events)}"
    for pair, reason in UNREACHABLE.items():
        yield f"    cannot be reached: {pair[0]}, {pair[1]}: {reason}"
    for missed in never_reached(set(pairs)):
        yield f"    never reached: {missed[0]}, {missed[1]}"
    yield "what happened:"
    for what in sorted(seen):
        yield f"    {seen[what]:8d} {what}"
