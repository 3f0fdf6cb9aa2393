"""What a worker of some size holds: heads, weights and caches of each rank, and how many tokens and requests fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from common.dataplane.shm_memory import data_offset
from common.engine.model.config import ModelConfig
from common.engine.model.shard import RankShard
from common.engine.ranks.cache_shape import cache_shape
from common.layout.context_parallel import check_group, dcp_rank, local_length
from common.layout.region import RegionMap, lay_out
from contracts.handoff import max_granted_blocks
from contracts.manifest import Coordinates, Dtype, Namespace, RankManifest, Role
from services.launcher.core.rank_weights import rank_weight_bytes

_MOST: Final = 1 << 40
_PLANNED: Final = "planned"
_DRAFT: Final = "mtp"


class WorkerSize(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the layout of a worker. A rank has at most `num_staging_rows` rows for states on their way; None: one a slot.

    States have `num_speculative_tokens` more rows than one. With `keeps_draft` there is the draft head with its cache, with
    `draft_whole` all of it on each rank. A step computes `max_step_tokens` at most, one for each slot among them.
    """

    role: str
    tp: int
    dp: int
    dcp: int
    dtype: Dtype
    block_size: int
    num_staging_rows: int | None = 0
    num_speculative_tokens: int = 0
    keeps_draft: bool = False
    draft_whole: bool = False
    max_step_tokens: int = 512


class RequestBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What one request takes of one rank, or of all. `num_tokens` are those that the rank holds, `num_blocks` what it sets aside.

    `key_value` are the bytes of those blocks, used or not; `draft` those of the draft head, with the hidden state that it goes on
    from. `conv` and `ssm` count all rows of the slot.
    """

    num_tokens: int
    num_blocks: int
    key_value: int
    conv: int
    ssm: int
    draft: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.key_value + self.conv + self.ssm + self.draft


class RankEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. Heads are half-open intervals; `dcp_group` and `dcp_rank` say with whom it shares the blocks of a sequence."""

    rank: int
    query_heads: tuple[int, int]
    kv_heads: tuple[int, int]
    linear_key_heads: tuple[int, int]
    linear_value_heads: tuple[int, int]
    dcp_group: int
    dcp_rank: int
    weight_bytes: int
    request: RequestBytes


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What fits into `memory_bytes` of each rank, behind the weights; what computing takes is not counted.

    `num_tokens` is the longest single request, `num_requests` those of the asked length at once, in one replica. To be set for
    the latter: `num_blocks` and `num_slots`, and `max_step_tokens`, which must not be below the slots.
    """

    memory_bytes: int
    left_bytes: int
    num_tokens: int
    num_requests: int
    num_blocks: int
    num_slots: int
    max_step_tokens: int


class WorkerEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a worker; the others are like it."""

    size: WorkerSize
    ranks: tuple[RankEstimate, ...]
    request: RequestBytes
    capacity: Capacity | None


def estimate_worker(
    config: ModelConfig, size: WorkerSize, *, num_tokens: int, memory_bytes: int | None
) -> WorkerEstimate:
    """Lay out every rank for requests of `num_tokens`. Raises `InvalidValueError` for a cut that is not legal."""
    config.check_tensor_parallel(size.tp)
    check_group(config.num_key_value_heads, size.tp, size.dcp)
    ranks = tuple(_rank(config, size, rank, num_tokens) for rank in range(size.tp))
    parts = [each.request for each in ranks]
    return WorkerEstimate(
        size=size,
        ranks=ranks,
        request=RequestBytes(
            num_tokens=num_tokens,
            num_blocks=sum(each.num_blocks for each in parts),
            key_value=sum(each.key_value for each in parts),
            conv=sum(each.conv for each in parts),
            ssm=sum(each.ssm for each in parts),
            draft=sum(each.draft for each in parts),
        ),
        capacity=None if memory_bytes is None else _capacity(config, size, ranks, num_tokens, memory_bytes),
    )


def manifests_of(config: ModelConfig, size: WorkerSize, num_blocks: int) -> list[RankManifest]:
    """What the ranks of one replica would say of themselves, with room for one sequence of `num_blocks` blocks."""
    regions = [_region(config, size, rank, num_blocks, 1) for rank in range(size.tp)]
    draft = _DRAFT if size.keeps_draft else ""
    return [each.manifest(worker_id=size.role, incarnation=size.role, model=_PLANNED, draft=draft) for each in regions]


def blocks_for(size: WorkerSize, num_tokens: int) -> int:
    """Blocks that each rank sets aside for a sequence: the ranks of a group hold every `dcp`-th one each."""
    return -(-num_tokens // (size.block_size * size.dcp))


def _region(config: ModelConfig, size: WorkerSize, rank: int, num_blocks: int, num_slots: int) -> RegionMap:
    shape = cache_shape(
        config,
        dtype=size.dtype,
        block_size=size.block_size,
        num_blocks=num_blocks,
        num_slots=num_slots,
        num_speculative_tokens=size.num_speculative_tokens,
        keeps_draft=size.keeps_draft,
        draft_whole=size.draft_whole,
    )
    at = Coordinates(tp_rank=rank, tp_size=size.tp, dcp_rank=dcp_rank(rank, size.dcp), dcp_size=size.dcp)
    rows = size.num_staging_rows
    return lay_out(shape, at, num_slots if rows is None else min(rows, num_slots))


def _rank(config: ModelConfig, size: WorkerSize, rank: int, num_tokens: int) -> RankEstimate:
    shard = RankShard(config=config, tp_rank=rank, tp_size=size.tp)
    place = dcp_rank(rank, size.dcp)
    num_blocks = blocks_for(size, num_tokens)
    held = dict.fromkeys(Role, 0)
    draft_bytes = 0
    for cache in _region(config, size, rank, num_blocks, 1).caches.values():
        if cache.namespace is Namespace.DRAFT:
            draft_bytes += cache.nbytes
        else:
            held[cache.role] += cache.nbytes
    draft = RankShard(config=config) if size.draft_whole else shard
    return RankEstimate(
        rank=rank,
        query_heads=_ends(shard.query_heads),
        kv_heads=_ends(shard.kv_heads),
        linear_key_heads=_ends(shard.linear_key_heads),
        linear_value_heads=_ends(shard.linear_value_heads),
        dcp_group=rank // size.dcp,
        dcp_rank=place,
        weight_bytes=rank_weight_bytes(shard, size.dtype, draft if size.keeps_draft else None),
        request=RequestBytes(
            num_tokens=local_length(num_tokens, size.block_size, size.dcp, place),
            num_blocks=num_blocks,
            key_value=held[Role.KEY] + held[Role.VALUE],
            conv=held[Role.CONV],
            ssm=held[Role.SSM],
            draft=draft_bytes,
        ),
    )


def _capacity(
    config: ModelConfig, size: WorkerSize, ranks: tuple[RankEstimate, ...], num_tokens: int, memory_bytes: int
) -> Capacity:
    """All ranks of a replica keep the same blocks and slots, so the fullest one decides; and messages must be able to name them."""
    left = memory_bytes - max(each.weight_bytes for each in ranks)

    def fits(num_blocks: int, num_slots: int) -> bool:
        header = data_offset(num_blocks + num_slots)
        return header + _region(config, size, 0, num_blocks, num_slots).nbytes <= left

    per_request = blocks_for(size, num_tokens)
    longest = _largest(lambda count: fits(count, 1))
    longest = min(longest, max_granted_blocks(max(1, longest)))
    num_requests = _largest(
        lambda count: per_request <= max_granted_blocks(count * per_request) and fits(count * per_request, count)
    )
    return Capacity(
        memory_bytes=memory_bytes,
        left_bytes=max(0, left),
        num_tokens=longest * size.block_size * size.dcp,
        num_requests=num_requests,
        num_blocks=num_requests * per_request,
        num_slots=num_requests,
        max_step_tokens=max(size.max_step_tokens, num_requests),
    )


def _largest(fits: Callable[[int], bool]) -> int:
    """The most that fits, when everything below fits as well; 0 when not even one does."""
    low, high = 0, 1
    while high < _MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _ends(heads: range) -> tuple[int, int]:
    return heads.start, heads.stop
