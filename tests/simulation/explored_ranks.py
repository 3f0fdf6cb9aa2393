"""Ranks that are alike: what becomes of an item when source ranks, and destination ranks, change places.

Every source rank owes every destination rank one part, so nothing but their numbers tells them apart: of lives that differ only
in which rank is which, one is enough. Ranks of one request have nothing to do with those of another: each may change places alone.
"""

from __future__ import annotations

from itertools import permutations, product

import msgspec

from services.broker.core import events as ev
from tests.simulation.explored_items import Item, Told, Write


class RankSymmetry:
    """The ways in which the ranks of both sides can change places, by number; number 0 leaves them where they are."""

    def __init__(self, num_ranks: int) -> None:
        orders = list(permutations(range(num_ranks)))
        self._ways = list(product(orders, orders))
        self._then = [[self._ways.index(_after(first, second)) for second in self._ways] for first in self._ways]

    def __len__(self) -> int:
        return len(self._ways)

    def then(self, first: int, second: int) -> int:
        """The way that is the same as one and then another."""
        return self._then[first][second]

    def pairs(self, way: int, pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Pairs of a source and a destination rank, sorted again."""
        sources, destinations = self._ways[way]
        return tuple(sorted((sources[source], destinations[destination]) for source, destination in pairs))

    def item(self, way: int, item: Item) -> Item:
        """What is on its way."""
        sources, destinations = self._ways[way]
        match item:
            case Write():
                return msgspec.structs.replace(
                    item, source=sources[item.source], destination=destinations[item.destination]
                )
            case Told(event=event):
                return Told(event=self.event(way, event))
            case _:
                return item

    def event(self, way: int, event: ev.Event) -> ev.Event:
        """What happens at the broker: reports of parts alone name ranks."""
        if not isinstance(event, ev.PartsReported):
            return event
        sources, destinations = self._ways[way]
        parts = (
            msgspec.structs.replace(part, destination_rank=destinations[part.destination_rank])
            for part in event.report.parts
        )
        report = msgspec.structs.replace(
            event.report,
            source_rank=sources[event.report.source_rank],
            parts=tuple(sorted(parts, key=lambda part: part.destination_rank)),
        )
        return msgspec.structs.replace(event, report=report)


Way = tuple[tuple[int, ...], tuple[int, ...]]


def _after(first: Way, second: Way) -> Way:
    """First one way, then the other."""
    sources, destinations = (
        tuple(later[place] for place in earlier) for earlier, later in zip(first, second, strict=True)
    )
    return sources, destinations
