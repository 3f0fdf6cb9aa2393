"""What links are like: of everything that is wrong with a link now the worst counts, and each thing ends by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import IntEnum


class Weather(IntEnum):
    """What transfers over a link are like, from good to bad."""

    FAIR = 0
    SLOW = 1
    RAGGED = 2
    BLACK_HOLE = 3


class Links:
    """All links between workers. What is wrong is so with every link of a worker, or with those between two of them alone."""

    def __init__(self) -> None:
        self._wrong: Counter[tuple[frozenset[str], Weather]] = Counter()

    def begin(self, weather: Weather, worker_id: str, peer: str = "") -> Callable[[], None]:
        """From now on this is wrong, beside all else; returns what ends it."""
        wrong = frozenset({worker_id, peer} - {""}), weather
        self._wrong[wrong] += 1

        def end() -> None:
            self._wrong[wrong] -= 1
            self._wrong += Counter()  # what is over is forgotten

        return end

    def between(self, sender: str, receiver: str) -> Weather:
        """What the link between two workers is like now."""
        if not self._wrong:
            return Weather.FAIR
        return max(
            (weather for ends, weather in self._wrong if ends <= {sender, receiver}),
            default=Weather.FAIR,
        )
