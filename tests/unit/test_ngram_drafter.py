"""Guessing by looking up, as the step runner asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.drafts.drafter import Advance
from common.engine.drafts.ngram_drafter import NgramDrafter
from contracts.requests import SamplingParams

VOCAB_SIZE = 100


def advance(
    start: int, token_ids: Sequence[int], next_token: int | None, *, num_drafts: int = 3, seq: int = 0
) -> Advance:
    """What a step tells of a sequence."""
    return Advance(
        seq=seq,
        block_ids=(0,),
        start=start,
        token_ids=token_ids,
        next_token=next_token,
        first_row=0,
        num_drafts=num_drafts,
        sampling=SamplingParams(max_tokens=9, seed=1),
        num_prompt_tokens=4,
    )


def test_a_prompt_in_pieces_is_one_text() -> None:
    """Guesses come with the first sampled token, from all pieces, and follow the text as it grows."""
    drafter = NgramDrafter(VOCAB_SIZE)
    assert drafter.advance(None, [advance(0, (1, 2, 3), None)]) == [[]]
    assert drafter.advance(None, [advance(3, (4, 5), 2)]) == [[3, 4, 5]]
    # Token 2 is computed now, and two guesses behind it were right: a new token follows.
    assert drafter.advance(None, [advance(5, (2, 3, 4), 1)]) == [[2, 3, 4]]
    assert drafter.advance(None, [advance(8, (1,), 9)]) == [[]]


def test_sequences_are_told_apart_and_forgotten() -> None:
    """Each looks up its own text; one that is forgotten begins anew, and forgetting an unknown one is no error."""
    drafter = NgramDrafter(VOCAB_SIZE)
    both = [advance(0, (1, 2, 1), 2), advance(0, (7, 8, 7), 8, seq=1, num_drafts=1)]
    assert drafter.advance(None, both) == [[1, 2, 1], [7]]
    drafter.forget(0)
    drafter.forget(5)
    assert drafter.advance(None, [advance(4, (5,), 2), advance(3, (8,), 7, seq=1)]) == [[], [8, 7, 8]]


def test_a_text_whose_beginning_is_not_here_is_looked_up_as_far_as_it_is_known() -> None:
    """Behind a handoff the first step computes the token behind the prompt: what was generated is all there is."""
    drafter = NgramDrafter(VOCAB_SIZE)
    assert drafter.advance(None, [advance(1000, (3,), 4)]) == [[]]
    assert drafter.advance(None, [advance(1001, (4,), 3)]) == [[4, 3, 4]]


def test_a_text_that_does_not_join_what_is_known_begins_anew() -> None:
    """With a gap, or from the beginning again, nothing of before is guessed from."""
    drafter = NgramDrafter(VOCAB_SIZE)
    drafter.advance(None, [advance(10, (3, 4, 3), 4)])
    assert drafter.advance(None, [advance(20, (5,), 3)]) == [[]]
    assert drafter.advance(None, [advance(0, (6, 6), 3)]) == [[]]
