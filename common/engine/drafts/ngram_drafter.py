"""Guessing by looking up: what followed the last tokens when they stood in the same text before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from common.engine.drafts.drafter import Advance
from common.engine.drafts.ngram_index import NgramIndex


class NgramDrafter:
    """See `drafter.Drafter`. It needs no weights, no cache and no hidden states: only the tokens that steps have computed.

    It knows of a text what its own rank has computed. A rank to which a sequence was handed over has never seen the prompt, for
    only its cache travels: there guesses come from what has been generated, and repeat the prompt only once the answer does.
    """

    needs_hidden: Final = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._texts: dict[int, _Text] = {}

    def advance(self, hidden: torch.Tensor | None, advances: Sequence[Advance]) -> list[list[int]]:  # noqa: ARG002 - the port's
        """See `Drafter.advance`."""
        return [self._advance(advance) for advance in advances]

    def forget(self, seq: int) -> None:
        """See `Drafter.forget`."""
        self._texts.pop(seq, None)

    def _advance(self, advance: Advance) -> list[int]:
        known = self._texts.get(advance.seq)
        if known is None or not known.first <= advance.start <= known.end:
            # The first of it, or computed from anew: what is not joined to it stays unknown.
            known = self._texts[advance.seq] = _Text(advance.start, NgramIndex(self._vocab_size))
        token_ids = advance.token_ids if advance.next_token is None else (*advance.token_ids, advance.next_token)
        known.index.add(token_ids[known.end - advance.start :])
        return known.index.guess(advance.num_drafts) if advance.next_token is not None else []


class _Text:
    """What is known of a sequence: its tokens from position `first` on."""

    def __init__(self, first: int, index: NgramIndex) -> None:
        self.first = first
        self.index = index

    @property
    def end(self) -> int:
        """The position behind the last known token."""
        return self.first + len(self.index)
