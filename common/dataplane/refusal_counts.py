"""What the owner of regions refuses its peers, counted where it is refused: the peer alone is told why."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from contracts.dataplane import Asked, RefusalReason


class RefusalCounts:
    """Of one data plane, from its beginning on. For any threads. It stays empty where peers check grants themselves."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._counts: Counter[tuple[Asked, RefusalReason]] = Counter()
        self._listener: Callable[[], None] | None = None

    def add(self, asked: Asked, reason: RefusalReason) -> None:
        """Count one, and let the listener know."""
        with self._guard:
            self._counts[asked, reason] += 1
            listener = self._listener
        if listener is not None:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each refusal, in the thread that refuses: it must not wait."""
        with self._guard:
            self._listener = listener

    @property
    def counts(self) -> Mapping[tuple[Asked, RefusalReason], int]:
        """How often what was refused, and why, until now."""
        with self._guard:
            return dict(self._counts)
