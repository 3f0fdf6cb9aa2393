"""Whether another attempt may be made, and after how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from contracts.errors import ErrorCode, PdmeshError
from contracts.requests import WorkerRef

_BUSY: Final = frozenset({ErrorCode.OVERLOADED, ErrorCode.DRAINING, ErrorCode.PREEMPTED})
_WORSE_THAN_BUSY: Final = 1000


@dataclass(slots=True)
class Failures:
    """How the attempts at one request have failed so far. Preempted ones count apart: nothing was wrong with them."""

    num_in_a_row: int = 0
    """Failures since a token came."""
    num_in_all: int = 0
    num_preempted: int = 0

    def note(self, error: PdmeshError, *, delivered: bool) -> None:
        """Count an attempt that ended with `error`, after it had `delivered` tokens or before."""
        if error.code is ErrorCode.PREEMPTED:
            self.num_preempted += 1
            return
        self.num_in_all += 1
        self.num_in_a_row = 1 if delivered else self.num_in_a_row + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounded attempts with exponential back-off.

    Only the router retries, and never a request that was refused for what it is. At most `max_attempts` may fail without a
    token between them, `max_failures` in all, and `max_preemptions` beside these.
    """

    max_attempts: int
    max_failures: int
    max_preemptions: int
    first_delay_s: float
    max_delay_s: float

    def may_retry(self, error: PdmeshError, failures: Failures) -> bool:
        """Whether an attempt that failed with `error`, which is among the `failures`, may be followed by another."""
        if not error.info.rule.retryable:
            return False
        if is_free(error):
            return failures.num_preempted <= self.max_preemptions
        return failures.num_in_a_row < self.max_attempts and failures.num_in_all < self.max_failures

    def delay_s(self, error: PdmeshError, failures: Failures, *, chance: float) -> float:
        """Return how long to wait before the next attempt. `chance`, from 0 to 1, spreads the callers over half of it."""
        count = failures.num_preempted if is_free(error) else failures.num_in_a_row
        full: float = min(self.max_delay_s, self.first_delay_s * 2.0 ** (count - 1))
        return full * (0.5 + 0.5 * chance)


def is_free(error: PdmeshError) -> bool:
    """Whether what follows `error` is part of serving the request, and not a retry: it takes nothing from any budget."""
    return error.code is ErrorCode.PREEMPTED


def may_take_reserve(error: PdmeshError, *, begun: bool) -> bool:
    """Whether the retry after `error` may be one of those that are kept back.

    A mesh that is full refuses any number of requests, and each of their clients can come back: that must not cost the answers which
    have `begun`, or whose worker is lost, the retries that they need to go on.
    """
    return begun or error.code not in _BUSY


def blame(error: PdmeshError, workers: Sequence[WorkerRef]) -> Mapping[WorkerRef, int]:
    """How much the workers of an attempt that failed with `error` are to be avoided by the next ones.

    A worker that is busy now may be asked again before one that is lost: its record outlives it, and looks inviting. Another
    start of the same worker is not to blame. Of a preemption only the last one knows, which decodes.
    """
    weight = 1 if error.code in _BUSY else _WORSE_THAN_BUSY
    return dict.fromkeys(workers[-1:] if is_free(error) else workers, weight)
