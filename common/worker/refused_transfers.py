"""What a worker shows of the peers that its ranks have turned away from their memory."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from common.engine.port import Engine, Refused
from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from common.runtime.metrics import Metrics

LOG_EVERY_S: Final = 60.0


class RefusedTransfers:
    """A counter, and one line in the log once in a while. Nothing comes of it over shared memory, where peers check grants themselves."""

    def __init__(self, metrics: Metrics, log: Log, clock: Clock, engines: Iterable[Engine]) -> None:
        """Watch the engines of a worker's replicas, given in the order of their dp rank."""
        self._log = log
        self._clock = clock
        self._counter = metrics.counter(
            "worker_transfers_refused_total",
            "What peers asked of this worker's memory over tcp and its ranks refused, by what they asked (connect: nothing yet) and why: "
            "region (not here, or of another start), cells (there are none such), stale (the grant was taken back, or never given), "
            "secret (not the grant's), bounds, revoked (the grant was taken back meanwhile, as when a request is cancelled), "
            "malformed (no peer of ours). Over shared memory the peer itself refuses, and counts.",
            ("asked", "reason"),
        )
        self._counted: dict[int, Refused] = {}
        self._unlogged: dict[str, int] = {}
        self._silent_until = 0.0
        for dp_rank, engine in enumerate(engines):
            engine.watch_refused(partial(self._told, dp_rank))

    def _told(self, dp_rank: int, counts: Refused) -> None:
        """Add what a replica's ranks have refused since they said so last."""
        before = self._counted.get(dp_rank, {})
        self._counted[dp_rank] = counts
        for key, count in counts.items():
            new = count - before.get(key, 0)
            if new > 0:
                asked, reason = key
                self._counter.labels(asked, reason).inc(new)
                name = f"{asked}_{reason}"
                self._unlogged[name] = self._unlogged.get(name, 0) + new
        now = self._clock.monotonic()
        if self._unlogged and now >= self._silent_until:
            self._log.error("transfers_refused", **self._unlogged)
            self._unlogged, self._silent_until = {}, now + LOG_EVERY_S
