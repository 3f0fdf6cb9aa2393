"""The least that a handoff can move: the bytes of its request's caches on the worker that takes over. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from common.layout.context_parallel import local_length
from contracts.manifest import Namespace, PagedPlace, RankManifest, SlotPlace


def ideal_bytes(destination: Iterable[RankManifest], num_prompt_tokens: int) -> int:
    """Bytes that the prompt's keys, values and states fill on all ranks of `destination`, by what the ranks say of themselves.

    The draft head has no pair for the last token of the prompt.
    """
    total = 0
    for manifest in destination:
        at = manifest.coordinates
        for span in manifest.spans:
            match span.place:
                case PagedPlace() as place:
                    length = num_prompt_tokens - (span.key.namespace is Namespace.DRAFT)
                    held = local_length(length, manifest.block_size, at.dcp_size, at.dcp_rank)
                    total += held * span.length * place.token_bytes
                case SlotPlace() as place:
                    total += place.moved_rows * span.length * place.unit_bytes
    return total
