"""The look-up of guesses in a text against a search through the whole of it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.engine.drafts.ngram_index import LONGEST, NgramIndex

VOCAB_SIZE = 5
TEXTS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60)


def searched(text: Sequence[int], count: int) -> list[int]:
    """Look at every earlier place, the longest run first and the latest place first; go on in what is guessed."""
    for length in range(min(LONGEST, len(text)), 0, -1):
        run = list(text[-length:])
        for end in range(len(text) - 1, length - 1, -1):
            if list(text[end - length : end]) == run:
                known = list(text)
                for at in range(count):
                    known.append(known[end + at])
                return known[len(text) :]
    return []


@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=6), count=st.integers(0, 8))
def test_guesses_are_what_a_search_finds(text: list[int], cuts: list[int], count: int) -> None:
    """However the text came in pieces, after each of them."""
    index = NgramIndex(VOCAB_SIZE)
    at = 0
    for cut in [*sorted(cuts), len(text)]:
        index.add(text[at:cut])
        at = max(at, min(cut, len(text)))
        assert index.guess(count) == searched(text[:at], count)
        assert len(index) == at


@given(text=TEXTS, window=st.integers(4, 12), count=st.integers(1, 8))
def test_what_is_forgotten_is_not_guessed_from(text: list[int], window: int, count: int) -> None:
    """With a window the last tokens alone count: at least as many as it says, and at most a quarter more."""
    index = NgramIndex(VOCAB_SIZE, window=window)
    for token in text:
        index.add([token])
    most = window + window // 4
    remembered = [searched(text[max(0, len(text) - size) :], count) for size in range(window, most + 1)]
    assert index.guess(count) in remembered
    assert index.num_runs <= LONGEST * most
