"""The least that a handoff can move: the bytes of its request's caches on the worker that takes over. Pure."""

from __future__ import annotations

import msgspec

from common.layout.context_parallel import local_length
from contracts.manifest import Namespace, PagedPlace, RankManifest, SlotPlace


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that takes over, by what its ranks say of themselves; `has_drafts`: whether its link brings a draft head's caches."""

    ranks: tuple[RankManifest, ...]
    has_drafts: bool = False

    def ideal_bytes(self, num_prompt_tokens: int) -> int:
        """Bytes that the prompt's keys, values and states fill on all ranks.

        A draft head keeps a pair of neighbours where the second of them stands: the prompt's first token has none.
        """
        total = 0
        for manifest in self.ranks:
            at = manifest.coordinates
            for span in manifest.spans:
                if span.key.namespace is Namespace.DRAFT and not self.has_drafts:
                    continue  # stays empty
                match span.place:
                    case PagedPlace() as place:
                        first = span.key.namespace.first_token
                        before, held = (
                            local_length(end, manifest.block_size, at.dcp_size, at.dcp_rank)
                            for end in (first, max(first, num_prompt_tokens))
                        )
                        total += (held - before) * span.length * place.token_bytes
                    case SlotPlace() as place:
                        total += place.moved_rows * span.length * place.unit_bytes
        return total
