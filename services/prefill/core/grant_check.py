"""What a grant of a decode worker must be before anything is computed for it. Pure.

The receiver's header and its transport decide in the end: a grant that passes here may still be stale. What can be seen without
them is refused here, by name, before a prompt is computed for nothing.
"""

from __future__ import annotations

from contracts.handoff import RunPrefill
from contracts.manifest import RankManifest


def refuse_grant(command: RunPrefill, receiver: RankManifest) -> str | None:
    """Why the grant of a command cannot be one of `receiver`, any rank of the decode worker; None when it may be."""
    grant, size = command.grant, receiver.block_size * receiver.coordinates.dcp_size
    num_prompt, num_cached = command.num_prompt_tokens, command.num_cached_tokens
    if len(grant.block_ids) * size < num_prompt:
        return f"grant.block_ids: {len(grant.block_ids)} blocks of {size} do not hold the prompt's {num_prompt} tokens"
    if len(set(grant.block_ids)) < len(grant.block_ids):
        twice = next(block for block in grant.block_ids if grant.block_ids.count(block) > 1)
        return f"grant.block_ids: {twice} is named twice; the rule is: each block once"
    replicas = receiver.coordinates.dp_size
    for field, value, count in (
        ("grant.block_ids", max(grant.block_ids, default=0), receiver.num_blocks),
        ("grant.slot", grant.slot, receiver.num_slots),
        ("grant.dp_rank", grant.dp_rank, replicas),
        ("num_cached_tokens", num_cached, num_prompt + 1),
    ):
        if not 0 <= value < count:
            return f"{field}: {value} is not allowed; the rule is: 0 to {count - 1}"
    return None
