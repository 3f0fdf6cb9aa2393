"""What a worker counts of its guesses."""

from __future__ import annotations

from typing import Final

from common.runtime.metrics import PHASE_BUCKETS, Metrics
from common.worker.engine_loop import StepOutcome
from common.worker.settings import MAX_SPECULATIVE_TOKENS

_LENGTH_BUCKETS: Final = tuple(float(length) for length in range(MAX_SPECULATIVE_TOKENS + 1))


class GuessMetrics:
    """Guesses by their place in a step, from 1 to `depth`. A worker that guesses nothing lists no place."""

    def __init__(self, metrics: Metrics, *, depth: int) -> None:
        self._drafted = metrics.counter(
            "worker_drafted_total", "Guesses that were verified, by their place in the step.", ("position",)
        )
        self._accepted = metrics.counter(
            "worker_draft_accepted_total",
            "Guesses that were right, with all before them, by their place in the step.",
            ("position",),
        )
        for place in range(1, depth + 1):
            self._drafted.labels(str(place))
            self._accepted.labels(str(place))
        self._length = metrics.histogram(
            "worker_accepted_draft_tokens",
            "Guesses that were right, of one sequence in one step that verified some.",
            buckets=_LENGTH_BUCKETS,
        )
        self._draft_seconds = metrics.histogram(
            "worker_draft_seconds",
            "How long the slowest rank guessed in a step that verified guesses.",
            buckets=PHASE_BUCKETS,
        )
        self._verify_seconds = metrics.histogram(
            "worker_verify_seconds",
            "The rest of a step that verified guesses: the model's pass over tokens and guesses.",
            buckets=PHASE_BUCKETS,
        )

    def count(self, outcome: StepOutcome) -> None:
        """Add a step. Of a sequence that has left since, nothing is counted."""
        drafts = outcome.num_drafts
        if not any(drafts.values()):
            return
        self._draft_seconds.observe(outcome.result.draft_ns / 1e9)
        self._verify_seconds.observe(outcome.result.verify_ns / 1e9)
        for produced in outcome.produced:
            num_drafted, num_accepted = drafts[produced.seq], len(produced.token_ids) - 1
            if not num_drafted:
                continue
            self._length.observe(num_accepted)
            for place in range(1, num_drafted + 1):
                self._drafted.labels(str(place)).inc()
                if place <= num_accepted:
                    self._accepted.labels(str(place)).inc()
