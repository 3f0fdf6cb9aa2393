"""A worker counts whom the ranks of its replicas have turned away, and says so in its log once in a while."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from structlog.testing import capture_logs

from common.engine.fake.engine import FakeEngine
from common.engine.port import Refused
from common.runtime.metrics import Metrics
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.refused_transfers import LOG_EVERY_S, RefusedTransfers
from contracts.dataplane import Asked, RefusalReason

STALE = (Asked.WRITE, RefusalReason.STALE)
SECRET = (Asked.READ, RefusalReason.SECRET)


class WatchedEngine(FakeEngine):
    """One whose ranks refuse what a test says."""

    told: Callable[[Refused], None]

    def watch_refused(self, told: Callable[[Refused], None]) -> None:
        """See `Engine.watch_refused`."""
        self.told = told


def counted(metrics: Metrics) -> list[str]:
    """The series."""
    lines = metrics.exposition().decode().splitlines()
    return sorted(line for line in lines if line.startswith("pdmesh_worker_transfers_refused_total{"))


def test_what_is_new_is_counted_for_each_replica_and_logged_once_a_minute() -> None:
    """Every word says all since the start: the same one twice counts nothing. What was not logged is in the next line."""

    async def scenario(clock: VirtualClock) -> None:
        metrics = Metrics()
        first, second = (WatchedEngine(clock, worker_id="decode-0", incarnation="i0") for _ in range(2))
        RefusedTransfers(metrics, structlog.get_logger(), clock, (first, second))
        with capture_logs() as lines:
            first.told({STALE: 2})
            first.told({STALE: 2})
            second.told({STALE: 1, SECRET: 4})
            first.told({STALE: 5})
            await clock.sleep(LOG_EVERY_S)
            second.told({STALE: 1, SECRET: 5})
            await clock.sleep(LOG_EVERY_S)
            second.told({STALE: 1, SECRET: 5})
        assert counted(metrics) == [
            'pdmesh_worker_transfers_refused_total{asked="read",reason="secret"} 5.0',
            'pdmesh_worker_transfers_refused_total{asked="write",reason="stale"} 6.0',
        ]
        assert lines == [
            {"event": "transfers_refused", "log_level": "error", "write_stale": 2},
            {"event": "transfers_refused", "log_level": "error", "write_stale": 4, "read_secret": 5},
        ]

    run_virtual(scenario)
