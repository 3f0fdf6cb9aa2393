"""What is left of a request of which some tokens have been delivered: what the next attempt is asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from contracts.requests import FinishReason, SamplingParams
from services.router.core.prompt_frames import pack_ids, prompt_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """A prompt as u32 bytes with its hash, whose last `num_delivered_tokens` earlier attempts have generated.

    `sampling` counts what is left. Random numbers depend on the seed and the position in the whole sequence, so that the
    answer goes on exactly as it would have, also a sampled one.
    """

    packed: bytes
    digest: str
    sampling: SamplingParams
    num_delivered_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, delivered tokens included."""
        return len(self.packed) // 4


def remainder(whole: Remainder, delivered: Sequence[int]) -> Remainder:
    """Return what is left of a `whole` request, of which `delivered` has come: fewer than its max_tokens."""
    if not delivered:
        return whole
    packed = whole.packed + pack_ids(delivered)
    sampling = msgspec.structs.replace(
        whole.sampling,
        max_tokens=whole.sampling.max_tokens - len(delivered),
        min_tokens=max(0, whole.sampling.min_tokens - len(delivered)),
    )
    return Remainder(packed=packed, digest=prompt_hash(packed), sampling=sampling, num_delivered_tokens=len(delivered))


def end_of(delivered: Sequence[int], sampling: SamplingParams, eos_token_ids: Collection[int]) -> FinishReason | None:
    """Why a whole request with this `sampling` ended with what was delivered, though nobody said so; None if it goes on.

    The rule is that of workers: an end of sequence counts behind min_tokens, and unless it is ignored.
    """
    may_end = not sampling.ignore_eos and len(delivered) > sampling.min_tokens
    if delivered and delivered[-1] in eos_token_ids and may_end:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(delivered) >= sampling.max_tokens else None
