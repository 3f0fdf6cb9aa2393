"""How long to wait for the next frame of an attempt before it is asked for. Pure."""

from __future__ import annotations

from typing import Final

SILENCE_S: Final = 1.0
GAP_S: Final = 0.1
"""Frames of one sender come in order, so a gap is a loss; two senders (prefill, then decode) may overtake each other for a moment."""
LONGEST_S: Final = 8.0


class Patience:
    """Begins anew with whatever is news; each question that brought none doubles it, so that a long prompt is not asked for all the time."""

    def __init__(self) -> None:
        self._num_asked = 0

    def wait_s(self, *, gap: bool) -> float:
        """How long to wait now; `gap` says that a token is missing that later ones have overtaken."""
        first = GAP_S if gap else SILENCE_S
        return min(LONGEST_S, float(first * 2**self._num_asked))

    def heard(self) -> None:
        """Something new has come."""
        self._num_asked = 0

    def asked(self) -> None:
        """A question brought nothing new."""
        self._num_asked = min(self._num_asked + 1, 8)
