"""The ranks that share the blocks of a KV head between them: one question to all of them, and one answer, in each layer."""

from __future__ import annotations

from typing import Final

import torch

from common.engine.collectives.port import Collectives
from common.engine.model.partial import NaturalLse, Partial, merge_attended


class ContextGroup:
    """One rank's end of a context-parallel group. Every rank of it calls both methods in turn, for the same rows."""

    def __init__(self, collectives: Collectives) -> None:
        """`collectives` are the group's own."""
        self._collectives: Final = collectives
        self.size: Final = collectives.size

    def gather_queries(self, query: torch.Tensor) -> torch.Tensor:
        """From this rank's queries `[T, heads, head_dim]` to those of the group, `[T, size * heads, head_dim]`, in rank order."""
        gathered = self._collectives.all_gather(query.flatten(1))
        return gathered.view(len(query), -1, query.shape[-1])

    def merge_own(self, partial: Partial) -> Partial:
        """From what all the group's heads found among this rank's keys to what this rank's heads found among all keys.

        `partial` has rows `[T, size * heads]`, the result `[T, heads]`. Output and LSE travel together: one exchange.
        """
        packed = torch.cat((partial.output, partial.lse.values[..., None]), -1)
        num_rows, num_heads, width = packed.shape
        by_rank = packed.view(num_rows, self.size, num_heads // self.size, width).transpose(0, 1)
        shards = self._collectives.exchange(by_rank)
        return merge_attended(Partial(shards[..., :-1], NaturalLse(shards[..., -1])))


def split_context(collectives: Collectives | None, dcp_size: int) -> ContextGroup | None:
    """The group of this rank: each `dcp_size` ranks of `collectives` in succession. None for groups of one.

    All ranks of `collectives` call it. Raises `InvalidValueError` when `dcp_size` does not divide their number.
    """
    if collectives is None or dcp_size == 1:
        return None
    size = collectives.size
    groups = [range(first, first + dcp_size) for first in range(0, size, dcp_size)]
    return ContextGroup(collectives.split(groups))
