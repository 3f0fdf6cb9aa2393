"""What Retry-After says to a client that is turned away now."""

from __future__ import annotations

from dataclasses import dataclass

from common.runtime.clock import Clock
from contracts.errors import ErrorCode, ErrorInfo
from services.router.core.retry_after import Throughput, lacks_a_role, num_ahead, seconds_until_room
from services.router.fleet import Fleet
from services.router.settings import RouterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryHint:
    """Estimates from what waits at the workers, and from how fast answers end here: refusals leave no place to anybody."""

    settings: RouterSettings
    fleet: Fleet
    throughput: Throughput
    clock: Clock

    def ended(self) -> None:
        """An answer of this router has ended, and left its place at the workers to another."""
        self.throughput.ended(self.clock.monotonic())

    def seconds(self, error: ErrorInfo) -> int:
        """When to come back after `error`. Only lack of room or of workers lets time tell; what else is broken may be whole at any moment."""
        if error.code is ErrorCode.NO_ROUTE and lacks_a_role(self.fleet.view().workers.values()):
            return min(self.settings.retry_after_restart_s, self.settings.max_retry_after_s)
        if error.code is not ErrorCode.OVERLOADED:
            return self.settings.retry_after_s
        return seconds_until_room(
            ahead=num_ahead(self.fleet.view().workers.values()),
            per_second=self.throughput.per_second(self.clock.monotonic()),
            least=self.settings.retry_after_s,
            most=self.settings.max_retry_after_s,
        )
