"""Tells the worker's process what peers were refused at this rank's memory: at once, then at intervals, however many there are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from common.dataplane.refusal_counts import RefusalCounts
from contracts.rank import RefusedCount, RefusedTransfers

TELL_EVERY_S: Final = 0.5
"""A stranger may be refused thousands of times a second: a message each would be the damage."""
_JOIN_TIMEOUT_S: Final = 1.0


class RefusalReports:
    """Reports of one rank. Its thread begins with the first refusal: most ranks never have one."""

    def __init__(self, rank: int, refusals: RefusalCounts, emit: Callable[[RefusedTransfers], None]) -> None:
        self._rank = rank
        self._refusals = refusals
        self._emit = emit
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._news = threading.Event()
        self._closed = threading.Event()
        refusals.listen(self._heard)

    def close(self) -> None:
        """Tell nothing more. Idempotent."""
        with self._guard:
            self._closed.set()
            self._news.set()
            thread = self._thread
        if thread is not None:
            thread.join(_JOIN_TIMEOUT_S)

    def _heard(self) -> None:
        self._news.set()
        with self._guard:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="refusal-reports", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._news.wait()
            if self._closed.is_set():
                return
            self._news.clear()
            counts = tuple(
                RefusedCount(asked=asked, reason=reason, count=count)
                for (asked, reason), count in sorted(self._refusals.counts.items())
            )
            try:
                self._emit(RefusedTransfers(rank=self._rank, counts=counts))
            except OSError:
                return  # the parent has gone, and nobody wants to know
            self._closed.wait(TELL_EVERY_S)
