"""Whether another attempt may be made, and after how long."""

from dataclasses import dataclass
from typing import Final

from contracts.errors import ErrorCode, PdmeshError

_BUSY: Final = frozenset({ErrorCode.OVERLOADED, ErrorCode.DRAINING})
_WORSE_THAN_BUSY: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounded attempts with exponential back-off.

    Only the router retries, and never a request that was refused for what it is.
    """

    max_attempts: int
    first_delay_s: float
    max_delay_s: float

    def may_retry(self, error: PdmeshError, *, attempt: int, num_delivered_tokens: int) -> bool:
        """Whether attempt `attempt` (from 0), which failed with `error`, may be followed by another.

        Not once tokens have been delivered: going on from them is a matter of re-dispatch, not of trying again.
        """
        return _retryable(error) and num_delivered_tokens == 0 and attempt + 1 < self.max_attempts

    def delay_s(self, *, attempt: int, chance: float) -> float:
        """Return how long to wait after attempt `attempt`. `chance`, from 0 to 1, spreads the callers over half of it."""
        full: float = min(self.max_delay_s, self.first_delay_s * 2**attempt)
        return full * (0.5 + 0.5 * chance)


def blame(error: PdmeshError) -> int:
    """How much the workers of an attempt that failed with `error` are to be avoided by the next ones.

    A worker that is busy now may be asked again before one that is lost: its record outlives it, and looks inviting.
    """
    return 1 if error.code in _BUSY else _WORSE_THAN_BUSY


def _retryable(error: PdmeshError) -> bool:
    return error.info.rule.retryable
