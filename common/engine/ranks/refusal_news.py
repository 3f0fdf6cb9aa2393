"""What the ranks of an engine have refused peers, summed up for whoever counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from common.engine.port import Refused
from contracts.dataplane import Asked, RefusalReason
from contracts.rank import RefusedTransfers


class RefusalNews:
    """The latest word of each rank. Each says all since its start: one that is overtaken by the next is no loss."""

    def __init__(self) -> None:
        self._latest: dict[int, RefusedTransfers] = {}
        self._listener: Callable[[Refused], None] | None = None

    def put(self, rank: int, report: RefusedTransfers) -> None:
        """Take one rank's word."""
        self._latest[rank] = report
        if self._listener is not None:
            self._listener(self._total())

    def listen(self, listener: Callable[[Refused], None]) -> None:
        """See `Engine.watch_refused`."""
        self._listener = listener
        if self._latest:
            listener(self._total())

    def _total(self) -> Refused:
        total: Counter[tuple[Asked, RefusalReason]] = Counter()
        for report in self._latest.values():
            for each in report.counts:
                total[each.asked, each.reason] += each.count
        return total
