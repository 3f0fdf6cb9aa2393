"""Whether a worker's own lease has lapsed while it stood still: then others have given its work away, and it must begin anew.

An outage of the bus also keeps a worker from renewing its record, but it silences everybody, and nobody is judged by it. Only
a worker that itself stood still (SIGSTOP, a suspended machine) was alone in its silence. One that was cut off alone cannot tell that from an
outage: it goes on, unless another start has its record's place by then (`KeptRecord`).
"""

from __future__ import annotations

import math
from typing import Final

from common.runtime.clock import Clock

LOOK_EVERY_S: Final = 0.5


class OwnLease:
    """One worker's lease by its own clock: good for `ttl_s` after the last write of its record that was acknowledged."""

    def __init__(self, clock: Clock, *, ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._renewed_at = math.inf
        self._looked_at = clock.monotonic()
        self._stood_still_at = -math.inf

    def renewed(self, sent_at: float) -> None:
        """Note that the record was written: what counts is when it was sent."""
        self._renewed_at = sent_at

    def has_lapsed(self) -> bool:
        """Look, several times in a ttl and before each write: this process stands still whenever nobody looks for half of it."""
        now = self._clock.monotonic()
        if now - self._looked_at >= self._ttl_s / 2:
            self._stood_still_at = now
        self._looked_at = now
        return now - self._renewed_at >= self._ttl_s and self._stood_still_at > self._renewed_at
