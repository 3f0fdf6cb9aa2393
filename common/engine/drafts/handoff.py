"""The draft's side of a handoff: what prefill leaves for the draft head of another worker, and how that one goes on from it."""

from __future__ import annotations

from typing import Final

import torch

from common.engine.drafts.drafter import Advance, Drafter
from common.engine.drafts.mtp_drafter import MtpDrafter
from common.engine.model.weights import MtpWeights
from common.engine.ranks.cache import LayerCaches
from contracts.errors import InvalidValueError
from contracts.manifest import Namespace, Role
from contracts.rank import BindSequence, StepItem

BOOTSTRAP: Final = (Namespace.DRAFT, Role.BOOTSTRAP, 0)
"""The cache that the last hidden state of a prompt travels in."""
DRAFT_LAYER: Final = 0
"""The draft head's only layer."""


class DraftHandoff:
    """Moves the hidden state that waits for a token between the drafter and `bootstrap` `[num_slots, hidden]`, one row a slot."""

    def __init__(self, drafter: MtpDrafter, bootstrap: torch.Tensor) -> None:
        self._drafter = drafter
        self._bootstrap = bootstrap

    @property
    def weights(self) -> MtpWeights:
        """Those of the draft head."""
        return self._drafter.weights

    def leave(self, binding: BindSequence) -> None:
        """A prompt is computed: put the state behind its last token where it can be moved from.

        Raises `InvalidValueError` where none waits.
        """
        waiting = self._drafter.waiting(binding.seq)
        if waiting is None:
            rule = "a sequence whose last hidden state waits for the token behind it"
            raise InvalidValueError(field="seq", value=binding.seq, rule=rule)
        self._bootstrap[binding.slot].copy_(waiting)

    def take(self, binding: BindSequence, item: StepItem) -> Advance:
        """Go on from what has arrived; what is returned makes the drafter guess behind the sequence's first token."""
        self._drafter.begin(binding.seq, item.start - 1, self._bootstrap[binding.slot])
        return Advance(
            seq=binding.seq,
            block_ids=binding.block_ids,
            start=item.start,
            token_ids=(),
            next_token=item.token_ids[0],
            first_row=0,
            num_drafts=item.num_tokens - 1,
            sampling=binding.sampling,
            num_prompt_tokens=binding.num_prompt_tokens,
        )


def draft_handoff(drafter: Drafter | None, caches: LayerCaches) -> DraftHandoff | None:
    """That of a rank's drafter; None for one that keeps no cache, or no drafter."""
    if not isinstance(drafter, MtpDrafter) or caches.bootstrap is None:
        return None
    return DraftHandoff(drafter, caches.bootstrap)
