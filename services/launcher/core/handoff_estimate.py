"""What one handoff moves between two workers: who sends how much to whom, and what the destination needs."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from common.engine.model.config import CONV_KERNEL, ModelConfig
from common.layout.context_parallel import held_range
from common.layout.planner import plan
from common.layout.templates import CopyTemplate, PagedTemplate
from contracts.manifest import Dtype, Namespace, PlannedPart
from services.launcher.core.worker_estimate import WorkerEstimate, WorkerSize, blocks_for, manifests_of


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What a source rank sends to a destination rank for one request. A part is a role of a layer."""

    source_rank: int
    destination_rank: int
    num_parts: int
    key_value_bytes: int
    state_bytes: int
    draft_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All bytes."""
        return self.key_value_bytes + self.state_bytes + self.draft_bytes


class HandoffEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """One request of `num_tokens`. `needed_bytes` is what its tokens and states fill on all destination ranks.

    With `has_drafts` what the draft head keeps comes along; if it does not though a worker keeps it, `why_no_drafts` says why.
    """

    num_tokens: int
    flows: tuple[Flow, ...]
    moved_bytes: int
    needed_bytes: int
    ratio: float
    has_drafts: bool = False
    why_no_drafts: str = ""


def estimate_handoff(
    config: ModelConfig, source: WorkerSize, destination: WorkerEstimate, num_tokens: int
) -> HandoffEstimate:
    """Plan the copies as linked workers do, and count them. Raises `PlanRefusedError` for two sizes that cannot be linked."""
    into = destination.size
    num_blocks = max(blocks_for(source, num_tokens), blocks_for(into, num_tokens))
    compiled = plan(manifests_of(config, source, num_blocks), manifests_of(config, into, num_blocks))
    parts: defaultdict[tuple[int, int], set[PlannedPart]] = defaultdict(set)
    paged: defaultdict[tuple[int, int], int] = defaultdict(int)
    states: defaultdict[tuple[int, int], int] = defaultdict(int)
    drafts: defaultdict[tuple[int, int], int] = defaultdict(int)
    for template in compiled.templates:
        pair = template.part.src_rank, template.part.dst_rank
        parts[pair].add(template.part)
        is_draft = template.part.namespace is Namespace.DRAFT
        counted = drafts if is_draft else paged if isinstance(template, PagedTemplate) else states
        counted[pair] += _moved_bytes(template, num_tokens, into.block_size)
    flows = tuple(
        Flow(
            source_rank=pair[0],
            destination_rank=pair[1],
            num_parts=len(parts[pair]),
            key_value_bytes=paged[pair],
            state_bytes=states[pair],
            draft_bytes=drafts[pair],
        )
        for pair in sorted(parts)
    )
    moved = sum(flow.total_bytes for flow in flows)
    needed = needed_bytes(config, destination)
    if compiled.has_drafts:
        needed += needed_draft_bytes(config, destination)
    return HandoffEstimate(
        num_tokens=num_tokens,
        flows=flows,
        moved_bytes=moved,
        needed_bytes=needed,
        ratio=moved / needed,
        has_drafts=compiled.has_drafts,
        why_no_drafts=compiled.why_no_drafts,
    )


def needed_bytes(config: ModelConfig, destination: WorkerEstimate) -> int:
    """The bytes that a request's tokens and states fill on every rank, from the model's sizes alone."""
    itemsize = destination.size.dtype.itemsize
    total = 0
    for rank in destination.ranks:
        heads = rank.kv_heads[1] - rank.kv_heads[0]
        total += 2 * len(config.full_layers) * rank.request.num_tokens * heads * config.head_dim * itemsize
        keys = rank.linear_key_heads[1] - rank.linear_key_heads[0]
        values = rank.linear_value_heads[1] - rank.linear_value_heads[0]
        channels = 2 * keys * config.linear_key_head_dim + values * config.linear_value_head_dim
        state = values * config.linear_key_head_dim * config.linear_value_head_dim * Dtype.FLOAT32.itemsize
        total += len(config.linear_layers) * ((CONV_KERNEL - 1) * channels * itemsize + state)
    return total


def needed_draft_bytes(config: ModelConfig, destination: WorkerEstimate) -> int:
    """The bytes that a request's pairs fill in the draft head's cache on every rank, and the hidden state that goes with them.

    A pair lies with the second of its tokens, so the first token has none.
    """
    size, total = destination.size, 0
    for rank in destination.ranks:
        heads = config.num_key_value_heads if size.draft_whole else rank.kv_heads[1] - rank.kv_heads[0]
        num_pairs = rank.request.num_tokens - (rank.dcp_rank == 0)
        total += 2 * config.num_mtp_layers * num_pairs * heads * config.head_dim + config.hidden_size
    return total * size.dtype.itemsize


def _moved_bytes(template: CopyTemplate, num_tokens: int, block_size: int) -> int:
    if not isinstance(template, PagedTemplate):
        return template.nbytes
    part = template.part
    first = part.namespace.first_token
    ranges = held_range(first, num_tokens, block_size, part.modulus, part.residue)
    return sum(end - start for start, end in ranges) * template.piece.length * template.token_bytes
