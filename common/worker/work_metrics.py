"""What a worker counts of its work, and shows of its state, for `/metrics`."""

from __future__ import annotations

from common.runtime.metrics import Metrics
from common.worker.core.table import HandoffTable
from common.worker.engine_loop import StepOutcome
from common.worker.replica_set import ReplicaSet


class WorkMetrics:
    """Counters of steps, and gauges that look at the replicas when they are read. Sums over all replicas."""

    def __init__(self, metrics: Metrics, table: HandoffTable, replicas: ReplicaSet) -> None:
        self._table = table
        self.num_prefilled_tokens = 0
        self._prefilled = metrics.counter("prefilled_tokens_total", "Prompt tokens computed.")
        self._decoded = metrics.counter("decoded_tokens_total", "Tokens computed one at a time, after the prompt.")
        self._step_seconds = metrics.histogram("step_seconds", "Duration of one step on the sampling rank.")
        metrics.gauge("free_blocks", "Cache blocks that nobody holds.").set_function(
            lambda: replicas.load.num_free_blocks
        )
        metrics.gauge("free_slots", "State slots that nobody holds.").set_function(lambda: replicas.load.num_free_slots)
        metrics.gauge("running_sequences", "Sequences that take part in steps.").set_function(
            lambda: replicas.load.num_running
        )
        metrics.gauge("waiting_sequences", "Sequences that wait for memory.").set_function(
            lambda: replicas.load.num_waiting
        )

    def count(self, outcome: StepOutcome) -> None:
        """Add a step of one replica."""
        num_prefilled = 0
        for item in outcome.plan.items:
            sequence = self._table.by_seq(item.seq)
            if sequence is not None and item.start < sequence.num_prompt_tokens:
                num_prefilled += item.num_tokens
        self.num_prefilled_tokens += num_prefilled
        self._prefilled.inc(num_prefilled)
        self._decoded.inc(sum(item.num_tokens for item in outcome.plan.items) - num_prefilled)
        self._step_seconds.observe((outcome.result.ended_ns - outcome.result.started_ns) / 1e9)
