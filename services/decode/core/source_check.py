"""What a grant to read must be before a rank reads under it. Pure.

Whether it is still good is for the source's header and its transport to say; what can be seen without them is refused here by name.
"""

from __future__ import annotations

from contracts.handoff import Grant
from contracts.manifest import RankManifest
from contracts.requests import WorkerRef


def refuse_source(
    grant: Grant, reserved_for: WorkerRef, layout: RankManifest, num_prompt_tokens: int, block_size: int
) -> str | None:
    """Why `grant` cannot be prefill's for a request that was `reserved_for` it; None when it may be.

    `layout` is that of any rank of the prefill worker.
    """
    source = WorkerRef(worker_id=grant.worker_id, incarnation=grant.incarnation)
    if source != reserved_for:
        shown, wanted = (f"{each.worker_id} {each.incarnation}" for each in (source, reserved_for))
        return f"source: {shown} is not allowed; the rule is: {wanted}, for which the memory was reserved"
    if len(grant.block_ids) * block_size < num_prompt_tokens:
        held = f"{len(grant.block_ids)} blocks of {block_size}"
        return f"source.block_ids: {held} do not hold the prompt's {num_prompt_tokens} tokens"
    if len(set(grant.block_ids)) < len(grant.block_ids):
        return "source.block_ids: a block is named twice; the rule is: each block once"
    for field, value, count in (
        ("source.block_ids", max(grant.block_ids, default=0), layout.num_blocks),
        ("source.slot", grant.slot, layout.num_slots),
        ("source.dp_rank", grant.dp_rank, layout.coordinates.dp_size),
    ):
        if not 0 <= value < count:
            return f"{field}: {value} is not allowed; the rule is: 0 to {count - 1}"
    return None
