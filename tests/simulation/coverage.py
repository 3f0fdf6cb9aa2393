"""Which (state, event) pairs of a handoff at the broker have been reached, and which cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, get_args

from contracts.handoff import HandoffState
from services.broker.core.events import Event
from tests.simulation.campaign import Campaign

UNREACHABLE: Final[dict[tuple[str, str], str]] = {}
"""Pairs that no schedule can reach, and why."""


def every_pair() -> Iterator[tuple[str, str]]:
    """Every state with every event."""
    for state in HandoffState:
        for event in get_args(Event):
            yield state.value, event.__name__


def never_reached(pairs: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs that should have been reached and were not."""
    return [pair for pair in every_pair() if pair not in pairs and pair not in UNREACHABLE]


def coverage_lines(total: Campaign) -> Iterator[str]:
    """What people read after a campaign."""
    pairs = list(every_pair())
    yield f"{len(total.pairs)} of {len(pairs)} pairs of a state and an event were reached:"
    for state in HandoffState:
        events = sorted(event for of, event in total.pairs if of == state.value)
        yield f"    {state.value}: {', '.join(events)}"
    for pair, reason in UNREACHABLE.items():
        yield f"    cannot be reached: {pair[0]}, {pair[1]}: {reason}"
    for missed in never_reached(total.pairs):
        yield f"    never reached: {missed[0]}, {missed[1]}"
    yield "what happened:"
    for what in sorted(total.seen):
        yield f"    {total.seen[what]:8d} {what}"
