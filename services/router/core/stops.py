"""Stop strings: found wherever they begin and end, and never shown in part."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Emission:
    """Text that may be shown now, and whether a stop string has been met (then nothing may follow)."""

    text: str
    stopped: bool


class StopMatcher:
    """Looks for stop strings in a stream of text, character by character, so that its cuts make no difference.

    Text is held back while it may be the beginning of a stop string. The stop string that ends first counts; of those
    that end at the same character, the one that begins first. Time is proportional to new characters times stops
    (Knuth, Morris and Pratt).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> Emission:
        """Take more text in."""
        if not self._patterns:
            return Emission(text, stopped=False)
        held = self._held + text
        for place, char in enumerate(text, start=len(self._held) + 1):
            matched = 0
            for pattern in self._patterns:
                if pattern.advance(char):
                    matched = max(matched, pattern.length)
            if matched:
                self._held = ""
                return Emission(held[: place - matched], stopped=True)
        keep = max(pattern.state for pattern in self._patterns)
        self._held = held[len(held) - keep :]
        return Emission(held[: len(held) - keep], stopped=False)

    def finish(self) -> str:
        """Return what was held back, when no text follows."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One stop string; `state` is how many of its first characters the text ends with."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = len(stop)
        self.state = 0
        self._fallback = [0] * len(stop)
        length = 0
        for place in range(1, len(stop)):
            while length and stop[place] != stop[length]:
                length = self._fallback[length - 1]
            if stop[place] == stop[length]:
                length += 1
            self._fallback[place] = length

    def advance(self, char: str) -> bool:
        """Take one character in; say whether the whole stop string stands at the end now."""
        while self.state and self._stop[self.state] != char:
            self.state = self._fallback[self.state - 1]
        if self._stop[self.state] == char:
            self.state += 1
        if self.state < self.length:
            return False
        self.state = self._fallback[-1]
        return True
