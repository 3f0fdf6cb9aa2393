"""A draft model of its own that guesses a block of tokens in one go, as far as port, cache and handoff are concerned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from common.engine.drafts.drafter import Advance
from common.engine.ranks.cache import LayerCaches


class FakeBlockDrafter:
    """See `drafter.Drafter`. Its layers keep a token each in every head, and its guesses come from what they keep, and nothing else.

    What followed the next token when it stood in the text last is guessed, the whole block at once; nothing where the layers do
    not agree on the text.
    """

    needs_hidden: Final = True

    def __init__(self, caches: LayerCaches, block_size: int) -> None:
        self._layers = [(caches.draft_key[layer], caches.draft_value[layer]) for layer in sorted(caches.draft_key)]
        self._block_size = block_size

    def advance(self, hidden: torch.Tensor | None, advances: Sequence[Advance]) -> list[list[int]]:
        """See `Drafter.advance`. The token at position t is kept at t."""
        assert hidden is not None
        return [self._advance(hidden, advance) for advance in advances]

    def forget(self, seq: int) -> None:
        """Nothing is kept but the cache."""

    def _advance(self, hidden: torch.Tensor, advance: Advance) -> list[int]:
        assert advance.first_row + len(advance.token_ids) <= len(hidden)
        for position, token in enumerate(advance.token_ids, start=advance.start):
            block, offset = self._place(advance, position)
            for number, cache in enumerate(self._caches()):
                cache[block, :, offset] = float(token * (number + 1))
        if advance.next_token is None:
            return []
        texts = {tuple(self._text(advance, number)) for number in range(2 * len(self._layers))}
        if len(texts) != 1:
            return []
        text = [*texts.pop(), advance.next_token]
        for at in range(len(text) - 2, -1, -1):
            if text[at] == advance.next_token:
                return text[at + 1 : at + 1 + advance.num_drafts]
        return []

    def _caches(self) -> list[torch.Tensor]:
        return [cache for layer in self._layers for cache in layer]

    def _text(self, advance: Advance, number: int) -> list[int]:
        """The tokens at positions 1 and on, by one cache; -1 where its heads do not agree."""
        found = []
        for position in range(1, advance.end):
            block, offset = self._place(advance, position)
            kept = self._caches()[number][block, :, offset]
            token = float(kept.flatten()[0]) / (number + 1)
            found.append(int(token) if bool((kept == kept.flatten()[0]).all()) and token.is_integer() else -1)
        return found

    def _place(self, advance: Advance, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self._block_size)
        return advance.block_ids[block], offset
