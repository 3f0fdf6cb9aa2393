"""What one handoff moves between two workers: who sends how much to whom, and what the destination needs."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from common.engine.config import CONV_KERNEL, ModelConfig
from common.layout.context_parallel import held_range
from common.layout.planner import plan
from common.layout.templates import CopyTemplate, PagedTemplate
from contracts.manifest import Dtype, PlannedPart
from services.launcher.core.worker_estimate import WorkerEstimate, WorkerSize, blocks_for, manifests_of


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What a source rank sends to a destination rank for one request. A part is a role of a layer."""

    source_rank: int
    destination_rank: int
    num_parts: int
    key_value_bytes: int
    state_bytes: int

    @property
    def total_bytes(self) -> int:
        """All bytes."""
        return self.key_value_bytes + self.state_bytes


class HandoffEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """One request of `num_tokens`. `needed_bytes` is what its tokens and states fill on all destination ranks."""

    num_tokens: int
    flows: tuple[Flow, ...]
    moved_bytes: int
    needed_bytes: int
    ratio: float


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
    for template in compiled.templates:
        pair = template.part.src_rank, template.part.dst_rank
        parts[pair].add(template.part)
        counted = paged if isinstance(template, PagedTemplate) else states
        counted[pair] += _moved_bytes(template, num_tokens, into.block_size)
    flows = tuple(
        Flow(
            source_rank=pair[0],
            destination_rank=pair[1],
            num_parts=len(parts[pair]),
            key_value_bytes=paged[pair],
            state_bytes=states[pair],
        )
        for pair in sorted(parts)
    )
    moved, needed = sum(flow.total_bytes for flow in flows), needed_bytes(config, destination)
    return HandoffEstimate(
        num_tokens=num_tokens, flows=flows, moved_bytes=moved, needed_bytes=needed, ratio=moved / needed
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


def _moved_bytes(template: CopyTemplate, num_tokens: int, block_size: int) -> int:
    if not isinstance(template, PagedTemplate):
        return template.nbytes
    part = template.part
    ranges = held_range(0, num_tokens, block_size, part.modulus, part.residue)
    return sum(end - start for start, end in ranges) * template.piece.length * template.token_bytes
