"""Whether the silence of others says anything of them: not after an outage, which silences everybody, nor after an own standstill."""

from __future__ import annotations

from collections.abc import Callable

from common.bus.port import Bus
from common.runtime.clock import Clock


class Silence:
    """Looks at the bus and at the clock, several times in a time to live of `ttl_s` seconds.

    A server that stands still leaves every connection as it is. Who has another sign that it does not answer gives it as
    `is_mute`: sooner than a worker that was heard just before falls silent, or it comes too late.
    """

    def __init__(self, bus: Bus, clock: Clock, *, ttl_s: float, is_mute: Callable[[], bool] = lambda: False) -> None:
        self._bus = bus
        self._is_mute = is_mute
        self._clock = clock
        self._standstill_s = ttl_s / 2
        self._reconnects = bus.reconnects
        self._looked_at = clock.monotonic()

    def says_nothing(self) -> bool:
        """Whether nobody could be heard until now. This process stands still whenever nobody looks for half a time to live."""
        now = self._clock.monotonic()
        stood_still = now - self._looked_at >= self._standstill_s
        self._looked_at = now
        if stood_still or self._is_mute() or not self._bus.is_connected or self._bus.reconnects != self._reconnects:
            self._reconnects = self._bus.reconnects
            return True
        return False
