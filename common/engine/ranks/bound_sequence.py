"""A sequence with memory on a rank, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.model.sampler import NO_TOKEN
from common.engine.transfer.peers import Peer
from contracts.rank import BindSequence


@dataclass(kw_only=True)
class BoundSequence:
    """A sequence with memory on this rank.

    `last_token` is what the latest step sampled for it, and `last_position` where that token stands; `drafts` are guesses of what
    comes behind it. Its recurrent states are in `state_row`. `pushed_end` is where the tokens end whose KV has been handed to the
    pusher.
    """

    binding: BindSequence
    peer: Peer | None
    last_token: int = NO_TOKEN
    last_position: int = -1
    drafts: Sequence[int] = ()
    state_row: int = 0
    pushed_end: int = 0

    def __post_init__(self) -> None:
        if self.binding.push is not None:
            self.pushed_end = self.binding.push.num_cached_tokens
