"""Whether another attempt may be made, and after how long."""

from dataclasses import dataclass

from contracts.errors import PdmeshError


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


def _retryable(error: PdmeshError) -> bool:
    return error.info.rule.retryable
