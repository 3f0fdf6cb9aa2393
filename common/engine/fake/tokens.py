"""The tokens that fake engines make up, and the guesses that they find right: functions of seed and position alone."""

from __future__ import annotations

from typing import Final

from contracts.rank import SampledToken, StepItem

VOCAB_SIZE: Final = 1024

_MASK: Final = (1 << 64) - 1


def fake_token(seed: int, position: int) -> int:
    """The token that every fake engine draws at `position`; never the end-of-sequence token. SplitMix64's finalizer."""
    bits = (seed * 0x9E3779B97F4A7C15 + position + 1) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return 1 + (bits ^ (bits >> 31)) % (VOCAB_SIZE - 1)


def fake_accepted(seed: int, position: int, num_drafts: int) -> int:
    """How many of the guesses behind the token at `position` every fake engine finds right."""
    return fake_token(seed + 1, position) % (num_drafts + 1)


def drawn_tokens(item: StepItem, seed: int, num_drafts: int) -> list[SampledToken]:
    """The tokens of an item that is sampled: one, and one more for each of its guesses that is right."""
    first = item.start + item.num_tokens - num_drafts
    count = 1 + fake_accepted(seed, first, num_drafts)
    return [
        SampledToken(seq=item.seq, position=position, token_id=fake_token(seed, position))
        for position in range(first, first + count)
    ]
