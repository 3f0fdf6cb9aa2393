"""What a worker counts of its work, and shows of its state, for `/metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from common.runtime.metrics import PHASE_BUCKETS, TOKEN_BUCKETS, Metrics
from common.worker.core.prompts import PromptBuffer
from common.worker.core.sequence import Sequence
from common.worker.core.step_mode import StepMode, mode_of
from common.worker.core.table import HandoffTable
from common.worker.engine_loop import StepOutcome
from common.worker.replica import Replica
from common.worker.replica_set import ReplicaSet
from common.worker.settings import WorkerSettings

_RELEASED = "released"


class WorkMetrics:
    """Counters of the whole worker, and gauges that look at the replicas when they are read."""

    def __init__(
        self,
        metrics: Metrics,
        table: HandoffTable,
        replicas: ReplicaSet,
        prompts: PromptBuffer,
        *,
        limits: WorkerSettings,
        modes: Iterable[StepMode],
        num_reports: Callable[[], int],
    ) -> None:
        self.num_prefilled_tokens = 0
        self._prefilled = metrics.counter(
            "worker_prefilled_tokens_total", "Prompt tokens computed, and output computed again after a preemption."
        )
        self._decoded = metrics.counter(
            "worker_decoded_tokens_total", "Tokens computed after the prompt, guesses with them."
        )
        self._step_seconds = metrics.histogram(
            "worker_step_seconds", "Duration of one step on the sampling rank.", buckets=PHASE_BUCKETS
        )
        self._step_tokens = metrics.histogram(
            "worker_step_tokens", "Tokens that one step computed.", buckets=TOKEN_BUCKETS
        )
        self._step_sequences = metrics.histogram(
            "worker_step_sequences", "Sequences that took part in one step.", buckets=TOKEN_BUCKETS
        )
        self._steps = metrics.counter(
            "worker_steps_total",
            "Steps by what they held: whole prompts, prompts in pieces (chunk), decoding, or prompts beside decoding (mixed). "
            "A mode that the settings rule out is not listed.",
            ("mode",),
        )
        for mode in modes:
            self._steps.labels(mode)
        self._queue_seconds = metrics.histogram(
            "worker_queue_seconds", "From the order to compute a prompt until it had memory.", buckets=PHASE_BUCKETS
        )
        self._ended = metrics.counter(
            "worker_ended_sequences_total",
            "Handoffs that ended here, by how: a finish reason, handed_over, the code of an error, or released by the broker.",
            ("outcome",),
        )
        self._releases = metrics.counter(
            "worker_memory_releases_total",
            "Times that a sequence's memory was revoked; quarantined: a writer had not stopped in time.",
            ("result",),
        )
        for result in ("clean", "quarantined"):
            self._releases.labels(result)
        self._preemptions = metrics.counter(
            "worker_preemptions_total",
            "Times that a sequence gave its memory to older ones: on decode it ended, on mixed it is computed again.",
        )
        blocks = metrics.gauge(
            "worker_blocks",
            "Cache blocks of a replica, by who has them; kept: free, but for answers that grow.",
            ("dp_rank", "state"),
        )
        slots = metrics.gauge("worker_slots", "State slots of a replica, by who has them.", ("dp_rank", "state"))
        sequences = metrics.gauge("worker_sequences", "Sequences of a replica by state.", ("dp_rank", "state"))
        queued = metrics.gauge(
            "worker_queued_prompt_tokens", "Prompt tokens of a replica that are not computed yet.", ("dp_rank",)
        )
        for replica in replicas:
            rank = str(replica.dp_rank)
            for state in ("free", "kept", "held", "quarantined"):
                blocks.labels(rank, state).set_function(partial(_num_of, replica, "blocks", state))
            for state in ("free", "held", "quarantined"):
                slots.labels(rank, state).set_function(partial(_num_of, replica, "slots", state))
            sequences.labels(rank, "waiting").set_function(partial(_load, replica, "num_waiting"))
            sequences.labels(rank, "running").set_function(partial(_load, replica, "num_running"))
            queued.labels(rank).set_function(partial(_load, replica, "num_prompt_tokens_left"))
        metrics.gauge("worker_waiting_sequences_limit", "Sequences that may wait for memory.").set(limits.max_waiting)
        metrics.gauge("worker_step_tokens_limit", "Tokens that one step computes at most.").set(limits.max_step_tokens)
        metrics.gauge("worker_handoffs", "Handoffs that live here.").set_function(lambda: len(table))
        metrics.gauge(
            "worker_buffered_prompt_tokens", "Tokens of prompts that nobody has asked to run yet."
        ).set_function(lambda: prompts.num_tokens)
        metrics.gauge("worker_buffered_prompt_tokens_limit", "How many of them there may be.").set(
            limits.prompt_buffer_tokens
        )
        metrics.gauge("worker_reports_running", "Reports to the broker under way.").set_function(num_reports)

    def count(self, outcome: StepOutcome) -> None:
        """Add a step of one replica."""
        prompts = outcome.prompt_items
        num_prefilled = sum(item.num_tokens for item in prompts)
        num_tokens = sum(outcome.num_computed)
        self.num_prefilled_tokens += num_prefilled
        self._prefilled.inc(num_prefilled)
        self._decoded.inc(num_tokens - num_prefilled)
        self._steps.labels(mode_of(prompts, num_items=len(outcome.plan.items))).inc()
        self._step_tokens.observe(num_tokens)
        self._step_sequences.observe(len(outcome.plan.items))
        self._step_seconds.observe((outcome.result.ended_ns - outcome.result.started_ns) / 1e9)

    def bound(self, sequence: Sequence, at_ns: int) -> None:
        """Note that a sequence that waited has its memory."""
        self._queue_seconds.observe((at_ns - sequence.accepted_ns) / 1e9)

    def ended(self, sequence: Sequence) -> None:
        """Count a sequence that lives here no more."""
        self._ended.labels(sequence.outcome or _RELEASED).inc()

    def preempted(self) -> None:
        """Count a sequence that gave its memory to older ones."""
        self._preemptions.inc()

    def released(self, *, quarantined: bool) -> None:
        """Count memory that was taken back."""
        self._releases.labels("quarantined" if quarantined else "clean").inc()


def _load(replica: Replica, field: str) -> int:
    value: int = getattr(replica.load, field)
    return value


def _num_of(replica: Replica, what: str, state: str) -> int:
    """How many blocks or slots of a replica's pool are in a state. Blocks are kept for answers that grow; no slots are."""
    free, quarantined, everywhere = (
        int(getattr(replica.pool, f"num_{kind}{what}")) for kind in ("free_", "quarantined_", "")
    )
    kept = replica.pool.num_kept_blocks if what == "blocks" else 0
    match state:
        case "free":
            return free - kept
        case "kept":
            return kept
        case "quarantined":
            return quarantined
        case _:
            return everywhere - free - quarantined
