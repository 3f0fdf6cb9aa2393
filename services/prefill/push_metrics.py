"""What a prefill worker counts of the cache bytes that its ranks push."""

from __future__ import annotations

from common.runtime.metrics import PHASE_BUCKETS, Metrics
from contracts.rank import PartPushed, PushOutcome


class PushMetrics:
    """Counts single writes: a part is pushed in as many as there are chunks that complete some of it."""

    def __init__(self, metrics: Metrics) -> None:
        self._bytes = metrics.counter("worker_pushed_bytes_total", "Cache bytes that were written.", ("role",))
        self._writes = metrics.counter(
            "worker_pushes_total", "Writes of pieces of parts, by what is known of them.", ("outcome",)
        )
        self._seconds = metrics.histogram(
            "worker_push_seconds", "How long one write took.", ("source_rank",), buckets=PHASE_BUCKETS
        )
        self._wait = metrics.histogram(
            "worker_push_wait_seconds",
            "From the moment at which there was something to write until its write began.",
            ("source_rank",),
            buckets=PHASE_BUCKETS,
        )
        for outcome in PushOutcome:
            self._writes.labels(outcome)

    def count(self, push: PartPushed) -> None:
        """Add a write that has ended."""
        self._writes.labels(push.outcome).inc()
        if push.outcome is PushOutcome.DONE:
            rank = str(push.rank)
            self._bytes.labels(push.role).inc(push.num_bytes)
            self._seconds.labels(rank).observe((push.done_ns - push.started_ns) / 1e9)
            self._wait.labels(rank).observe((push.started_ns - push.queued_ns) / 1e9)
