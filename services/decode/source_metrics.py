"""What a decode worker shows of its links with those that it pulls from."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial

from common.runtime.metrics import Metrics
from contracts.errors import ErrorCode, ErrorInfo


class Standing(StrEnum):
    """How a decode worker stands with a source."""

    LINKING = "linking"
    LINKED = "linked"
    REFUSED = "refused"
    FAILED = "failed"


class SourceMetrics:
    """Tries to link that ended, and how it stands with each source now."""

    def __init__(self, metrics: Metrics, num_of: Callable[[Standing], int]) -> None:
        self._tries = metrics.counter(
            "worker_source_links_total",
            "Tries to link with a prefill worker to pull from that ended: ok, or the code of the error; "
            "incompatible_workers: the two do not fit.",
            ("code",),
        )
        for code in ("ok", ErrorCode.INCOMPATIBLE_WORKERS):
            self._tries.labels(code)
        sources = metrics.gauge(
            "worker_sources",
            "Prefill workers that are known as sources, by how this one stands with them; refused: they do not fit, and are not tried "
            "again before they start anew; failed: they are.",
            ("state",),
        )
        for standing in Standing:
            sources.labels(standing).set_function(partial(num_of, standing))

    def ended(self, refusal: ErrorInfo | None) -> None:
        """Count a try, or a source that was not even tried."""
        self._tries.labels("ok" if refusal is None else refusal.code).inc()
