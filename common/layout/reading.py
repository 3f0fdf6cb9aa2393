"""Copies turned round for a destination that reads them: what is local to the writer is remote to the reader."""

from __future__ import annotations

from collections.abc import Iterable

from common.layout.run import Run, as_reader
from common.layout.run_batch import Placed, RunPattern, Scatter


def placed_for_reader(placed: Iterable[Placed]) -> list[Placed]:
    """The same copies, for the other side. A pattern that is placed several times is turned once."""
    turned: dict[int, RunPattern] = {}
    found = []
    for each in placed:
        pattern = turned.get(id(each.pattern))
        if pattern is None:
            pattern = turned[id(each.pattern)] = RunPattern(_turned(piece) for piece in each.pattern.pieces)
        found.append(Placed(pattern, each.remote_base, each.local_base))
    return found


def _turned(piece: Run | Scatter) -> Run | Scatter:
    if isinstance(piece, Scatter):
        return Scatter(piece.length, piece.remote, piece.local)
    (run,) = as_reader((piece,))
    return run
