"""The random numbers by which tokens are chosen: one for each token of the vocabulary, at each position, for each seed.

They are counter-based, so that a request that is dispatched again goes on with the same ones. With M the finaliser of SplitMix64
(Steele, Lea, Flood 2014) and c its increment, u(seed, position, token) is a fraction of 2^53: the upper 53 bits of
M(M(M(seed + c) + position + c) + token + c), the last of them set, so that it is neither 0 nor 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

_MASK: Final = 2**64 - 1
_INCREMENT: Final = 0x9E3779B97F4A7C15
_MIXING: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT: Final = 31


def uniform_numbers(places: Sequence[tuple[int, int]], size: int) -> torch.Tensor:
    """Fractions u of tokens 0 to `size` - 1 at each place, a seed and a position: `[n, size]` fp64."""
    bases = [
        (_finalise((_finalise(seed & _MASK) + position) & _MASK) + _INCREMENT) & _MASK for seed, position in places
    ]
    words = np.add.outer(np.array(bases, dtype=np.uint64), np.arange(size, dtype=np.uint64))
    moved = np.empty_like(words)
    for shift, factor in _MIXING:
        words ^= np.right_shift(words, np.uint64(shift), out=moved)
        words *= np.uint64(factor)
    words ^= np.right_shift(words, np.uint64(_LAST_SHIFT), out=moved)
    words >>= np.uint64(11)
    words |= np.uint64(1)
    return torch.from_numpy(words * 2.0**-53)


def arrival_times(places: Sequence[tuple[int, int]], size: int) -> torch.Tensor:
    """When each token of weight 1 arrives, `[n, size]` fp64 above 0: -log u, so independent and exponentially distributed.

    A token of weight w arrives after 1 / w of that. The first to arrive is each token with the probability of its share of all
    weights; and two choices at the same place, by weights that differ little, are mostly the same.
    """
    return uniform_numbers(places, size).log_().neg_()


def _finalise(word: int) -> int:
    word = (word + _INCREMENT) & _MASK
    for shift, factor in _MIXING:
        word = ((word ^ (word >> shift)) * factor) & _MASK
    return word ^ (word >> _LAST_SHIFT)
