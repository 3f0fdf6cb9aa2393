"""How much memory a sequence asks for: all that it may ever need, or less, and more while it is generated. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from common.worker.core.blocks import MemoryNeed
from common.worker.core.sequence import Sequence

STEP_BLOCKS: Final = 4
"""Blocks that a sequence grows by: one command to the ranks for so many blocks of tokens."""


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """Memory for `reserve_output_tokens` of the output comes at first, the rest `step_blocks` at a time; 0: all of it at first."""

    reserve_output_tokens: int = 0
    step_blocks: int = STEP_BLOCKS

    def first_need(self, num_prompt_tokens: int, max_tokens: int) -> MemoryNeed:
        """What a sequence needs before its first token."""
        num_output_tokens = min(max_tokens, self.reserve_output_tokens or max_tokens)
        return MemoryNeed(num_tokens=num_prompt_tokens + num_output_tokens, limit_tokens=num_prompt_tokens + max_tokens)

    def need(self, sequence: Sequence, block_tokens: int) -> MemoryNeed:
        """What a sequence that waits for memory needs, where a block id holds `block_tokens`: one to be pushed away room for its prompt alone.

        One that was preempted needs room for what it has, and for a step of growth: else it would be preempted again at once.
        """
        if sequence.push is not None:
            return MemoryNeed(num_tokens=sequence.num_prompt_tokens, limit_tokens=sequence.num_prompt_tokens)
        max_tokens = sequence.sampling.max_tokens
        first = self.first_need(sequence.num_prompt_tokens, max_tokens)
        if not sequence.num_preemptions:
            return first
        num_more_tokens = max(self.reserve_output_tokens, self.step_blocks * block_tokens)
        num_tokens = sequence.num_prompt_tokens + min(max_tokens, len(sequence.output_ids) + num_more_tokens)
        return MemoryNeed(num_tokens=num_tokens, limit_tokens=first.limit_tokens)
