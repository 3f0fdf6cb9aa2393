"""What a decode worker counts of what its ranks pull."""

from __future__ import annotations

from common.engine.port import PullResult
from common.runtime.metrics import PHASE_BUCKETS, Metrics
from contracts.pull import ShardState

_ENDED = (ShardState.DONE, ShardState.FAILED)


class PullMetrics:
    """Pulls and their shards, once each pull has ended."""

    def __init__(self, metrics: Metrics) -> None:
        self._pulls = metrics.counter(
            "worker_pulls_total", "Pulls of a request's cache that ended: ok, or the code of the error.", ("code",)
        )
        self._shards = metrics.counter("worker_shard_pulls_total", "Shards of pulls, by how they ended.", ("outcome",))
        self._bytes = metrics.counter("worker_pulled_bytes_total", "Cache bytes that were read.", ("source_rank",))
        self._shard_seconds = metrics.histogram(
            "worker_shard_pull_seconds", "How long the read of one shard took.", ("source_rank",), buckets=PHASE_BUCKETS
        )
        self._wait = metrics.histogram(
            "worker_pull_wait_seconds",
            "From the beginning of a pull's first read to the end of its last.",
            ("parallel",),
            buckets=PHASE_BUCKETS,
        )
        self._merge = metrics.histogram(
            "worker_pull_merge_seconds",
            "How long the states of one role took to be merged into their slot, on the slowest rank.",
            ("role",),
            buckets=PHASE_BUCKETS,
        )
        for state in _ENDED:
            self._shards.labels(state)
        self._pulls.labels("ok")

    def count(self, result: PullResult) -> None:
        """Add a pull that has ended."""
        self._pulls.labels("ok" if result.error is None else str(result.error.code)).inc()
        for shard in result.shards:
            if shard.state not in _ENDED:
                continue
            self._shards.labels(shard.state).inc()
            if shard.state is ShardState.DONE:
                rank = str(shard.source_rank)
                self._bytes.labels(rank).inc(shard.num_bytes)
                self._shard_seconds.labels(rank).observe(shard.duration_ms / 1000)
        if result.error is None:
            self._wait.labels(str(int(result.parallel))).observe(result.wait_ms / 1000)
            for merge in result.merges:
                self._merge.labels(merge.role).observe(merge.merge_ms / 1000)
