"""A model of slow links: how long a transfer between two ranks would have taken. For measurements and tests, by failpoints."""

from __future__ import annotations

import threading
from typing import Final

from common.dataplane.failpoints import Failpoints

_BYTES_PER_MB: Final = 10**6


class LinkShaper:
    """The links of one rank. May be used by several threads.

    A link takes one transfer's bytes after the other's, at its rate; its latency comes on top of each. So two transfers over one
    link share it, and transfers over different links do not.
    """

    def __init__(self, failpoints: Failpoints) -> None:
        self._points: Final = failpoints
        self._guard = threading.Lock()
        self._busy_until: dict[tuple[int, int], float] = {}

    def over_at(self, source: int, destination: int, num_bytes: int, began: float) -> float:
        """When a transfer that began at `began` (seconds) is over, at the earliest; `began` for a link that is not shaped."""
        latency_ms, mb_per_s = self._points.link(source, destination)
        key = source, destination
        with self._guard:
            start = max(began, self._busy_until.get(key, began)) if mb_per_s else began
            sent = start + num_bytes / (mb_per_s * _BYTES_PER_MB) if mb_per_s else start
            if mb_per_s:
                self._busy_until[key] = sent
        return sent + latency_ms / 1000
