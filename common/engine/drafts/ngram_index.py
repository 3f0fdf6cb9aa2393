"""Where the last words of a text stood before, in time that grows with the tokens that are added and not with the text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LONGEST: Final = 3
"""The longest run of tokens that is looked up; shorter ones are when it stood nowhere."""
WINDOW: Final = 1 << 14
"""Most tokens that are remembered: some megabytes for a text of that length."""


class NgramIndex:
    """The last `window` tokens of one text, and where each run of up to `longest` of them ended last.

    Token ids are below `vocab_size`. Positions count from the first token that was added.
    """

    def __init__(self, vocab_size: int, *, longest: int = LONGEST, window: int = WINDOW) -> None:
        self._vocab_size = vocab_size
        self._window = window
        self._token_ids: list[int] = []
        self._num_dropped = 0
        self._keys: tuple[int, ...] = ()
        # ends[n - 1]: run of n tokens, as one number -> position behind its last occurrence that something follows
        self._ends: tuple[dict[int, int], ...] = tuple({} for _ in range(longest))

    def __len__(self) -> int:
        """Tokens added so far, those that are forgotten with them."""
        return self._num_dropped + len(self._token_ids)

    @property
    def num_runs(self) -> int:
        """Runs that are remembered: at most `longest` for each token of the window."""
        return sum(map(len, self._ends))

    def add(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        for token in token_ids:
            self._append(token)
        surplus = len(self._token_ids) - self._window
        # Dropped a lot at a time: taking one off the front of a list moves all others.
        if surplus > self._window // 4:
            self._drop(surplus)

    def guess(self, count: int) -> list[int]:
        """The `count` tokens that followed when the longest known run at the end of the text stood there last; none if it is new.

        Where the text ends within them it goes on with what is guessed, so that a text which repeats itself is guessed on for ever.
        """
        for ends, key in zip(reversed(self._ends[: len(self._keys)]), reversed(self._keys), strict=True):
            found = ends.get(key)
            if found is not None:
                first = found - self._num_dropped
                distance = len(self._token_ids) - first
                return [self._token_ids[first + at % distance] for at in range(count)]
        return []

    def _append(self, token: int) -> None:
        """Note what stood before `token`, which is now followed by something; then the runs that end with it."""
        here = len(self)
        for ends, key in zip(self._ends, self._keys, strict=False):
            ends[key] = here
        self._token_ids.append(token)
        size = self._vocab_size
        # A run of n tokens as a number to the base of the vocabulary: its oldest token counts most.
        held = self._token_ids[-len(self._ends) :]
        key, scale, keys = 0, 1, []
        for each in reversed(held):
            key += each * scale
            scale *= size
            keys.append(key)
        self._keys = tuple(keys)

    def _drop(self, count: int) -> None:
        """Forget the oldest tokens, and the runs that did not come back since."""
        self._token_ids = self._token_ids[count:]
        self._num_dropped += count
        for length, ends in enumerate(self._ends, start=1):
            oldest = self._num_dropped + length
            for key in [key for key, end in ends.items() if end < oldest]:
                del ends[key]
