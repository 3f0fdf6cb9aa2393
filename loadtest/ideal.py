"""The least that a handoff can move: the bytes of its request's caches on the worker that takes over. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from common.layout.context_parallel import local_length
from contracts.manifest import PagedPlace, RankManifest, SlotPlace


def ideal_bytes(destination: Iterable[RankManifest], num_prompt_tokens: int) -> int:
    """Bytes that the prompt's keys, values and states fill on all ranks of `destination`, by what the ranks say of themselves.

    A draft head keeps a pair of neighbours where the second of them stands: the prompt's first token has none.
    """
    total = 0
    for manifest in destination:
        at = manifest.coordinates
        for span in manifest.spans:
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
