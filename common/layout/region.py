"""The one region that holds all caches of a rank: where each cache lies, and the manifest that tells others.

Layouts, per layer, with the dimensions that are left on the rank:

- KEY, VALUE `[num_blocks, kv_heads, block_size, head_dim]`: head-major, so that what one source rank holds of a block is one
  contiguous run
- CONV `[num_slots, conv_kernel - 1 + k, channels]`, channels `[Q | K | V]`, with speculation depth k
- SSM `[num_slots, k + 1, value_heads, key_head_dim, value_head_dim]`, one row a checkpoint
- BOOTSTRAP `[num_slots, 1, hidden_size]`, whole on every rank, beside the caches of a draft head

Behind the caches lie the staging rows, if there are any: each has room for the CONV and SSM bytes of one sequence that this rank
holds, whoever they come from. All else is read straight into its place. What lies where in a row is known when the rank is linked with a source: see `staging`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Final

import msgspec

from common.layout.context_parallel import check_group, dcp_rank
from common.layout.heads import Shard, even_shard, kv_shard
from common.layout.shape import CacheShape, LayerType
from contracts.errors import InvalidValueError
from contracts.manifest import (
    Coordinates,
    Dtype,
    Namespace,
    PagedPlace,
    RankManifest,
    Role,
    Segment,
    SlotPlace,
    Span,
    TensorKey,
)

ALIGNMENT: Final = 64

CacheKey = tuple[Namespace, Role, int]


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """One cache of one layer: a dense row-major array of `shape` at `offset` bytes, a multiple of `ALIGNMENT`."""

    namespace: Namespace
    role: Role
    layer: int
    offset: int
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without the padding behind it."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def entry_bytes(self) -> int:
        """Bytes of one block, or of one slot."""
        return self.nbytes // self.shape[0]


class StagingRows(msgspec.Struct, frozen=True, kw_only=True):
    """`num_rows` rows of `row_bytes` bytes, each at a multiple of `ALIGNMENT`, from `offset` on. Rows do not overlap."""

    offset: int
    row_bytes: int
    num_rows: int

    @property
    def row_stride(self) -> int:
        """Bytes from one row to the next."""
        return _aligned(self.row_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * self.row_stride

    def base(self, row: int) -> int:
        """Where a row begins. Raises `InvalidValueError` for one that does not exist."""
        if not 0 <= row < self.num_rows:
            raise InvalidValueError(
                field="staging_row", value=row, rule=f"below {self.num_rows}, the rows that there are"
            )
        return self.offset + row * self.row_stride


class RegionMap(msgspec.Struct, frozen=True, kw_only=True):
    """The caches of one rank in the order in which they lie, the staging rows behind them, and the size of the region's data."""

    shape: CacheShape
    coordinates: Coordinates
    caches: dict[CacheKey, Cache]
    staging: StagingRows
    nbytes: int

    def cache(self, role: Role, layer: int, namespace: Namespace = Namespace.TARGET) -> Cache:
        """The cache of one layer. Raises `InvalidValueError` when the layer has none of that role."""
        found = self.caches.get((namespace, role, layer))
        if found is None:
            rule = f"a layer of {namespace} that keeps a {role} cache"
            raise InvalidValueError(field="layer", value=layer, rule=rule)
        return found

    def manifest(self, *, worker_id: str, incarnation: str, model: str, draft: str = "") -> RankManifest:
        """What this rank publishes; `model` identifies configuration and weights, `draft` those of the draft head.

        Raises `InvalidValueError` for a draft whose caches are not here.
        """
        shape = self.shape
        if draft and not shape.num_draft_layers:
            raise InvalidValueError(field="draft", value=draft, rule="empty without caches of a draft head")
        return RankManifest(
            worker_id=worker_id,
            incarnation=incarnation,
            coordinates=self.coordinates,
            model=model,
            draft=draft,
            block_size=shape.block_size,
            interleave=shape.block_size,
            dtypes=shape.dtypes,
            num_blocks=shape.num_blocks,
            num_slots=shape.num_slots,
            num_speculative_tokens=shape.num_speculative_tokens,
            region_bytes=self.nbytes,
            spans=tuple(span for cache in self.caches.values() for span in self._spans(cache)),
        )

    def _spans(self, cache: Cache) -> Iterator[Span]:
        match cache.role:
            case Role.KEY | Role.VALUE:
                yield self._paged_span(cache)
            case Role.CONV:
                yield from self._conv_spans(cache)
            case Role.SSM:
                heads = _value_heads(self.shape, self.coordinates)
                head_bytes = cache.entry_bytes // prod(cache.shape[1:3])
                yield self._slot_span(cache, Segment.WHOLE, heads, at=0, unit_bytes=head_bytes)
            case Role.BOOTSTRAP:
                yield self._slot_span(cache, Segment.WHOLE, Shard(0, 1), at=0, unit_bytes=cache.entry_bytes)

    def _paged_span(self, cache: Cache) -> Span:
        heads = _kv_heads(self.shape, self.coordinates, cache.namespace)
        token_bytes = self.shape.head_dim_of(cache.namespace) * cache.dtype.itemsize
        place = PagedPlace(
            offset=cache.offset,
            block_stride=cache.entry_bytes,
            head_bytes=self.shape.block_size * token_bytes,
            token_bytes=token_bytes,
        )
        key = TensorKey(namespace=cache.namespace, role=cache.role, layer=cache.layer)
        return Span(key=key, start=heads.start, length=heads.length, place=place)

    def _conv_spans(self, cache: Cache) -> Iterator[Span]:
        """Q, K and V apart: a rank's row is not one slice of the whole row, and must never be moved as if it were."""
        at = 0
        for segment, channels in conv_channels(self.shape, self.coordinates).items():
            yield self._slot_span(cache, segment, channels, at=at, unit_bytes=cache.dtype.itemsize)
            at += channels.length * cache.dtype.itemsize

    def _slot_span(self, cache: Cache, segment: Segment, shard: Shard, *, at: int, unit_bytes: int) -> Span:
        place = SlotPlace(
            offset=cache.offset + at,
            slot_stride=cache.entry_bytes,
            row_stride=cache.entry_bytes // cache.shape[1],
            num_rows=cache.shape[1],
            moved_rows=self.shape.moved_conv_rows if cache.role is Role.CONV else 1,
            unit_bytes=unit_bytes,
        )
        key = TensorKey(namespace=cache.namespace, role=cache.role, layer=cache.layer, segment=segment)
        return Span(key=key, start=shard.start, length=shard.length, place=place)


def conv_channels(shape: CacheShape, coordinates: Coordinates) -> dict[Segment, Shard]:
    """The channels of each segment that a rank holds, in the order in which they lie in its row."""
    tp = (coordinates.tp_size, coordinates.tp_rank)
    keys = even_shard("num_key_heads", shape.num_key_heads, *tp)
    values = even_shard("num_value_heads", shape.num_value_heads, *tp)
    key_channels = Shard(keys.start * shape.key_head_dim, keys.length * shape.key_head_dim)
    value_channels = Shard(values.start * shape.value_head_dim, values.length * shape.value_head_dim)
    return {Segment.Q: key_channels, Segment.K: key_channels, Segment.V: value_channels}


def lay_out(shape: CacheShape, coordinates: Coordinates, num_staging_rows: int = 0) -> RegionMap:
    """Place all caches of the rank at `coordinates` in one region, and `num_staging_rows` staging rows behind them.

    Raises `InvalidValueError` when the heads cannot be cut over that many ranks, or the context-parallel coordinates do not fit.
    """
    if num_staging_rows < 0:
        raise InvalidValueError(field="num_staging_rows", value=num_staging_rows, rule="0 or more")
    _check_context_parallel(shape, coordinates)
    caches: dict[CacheKey, Cache] = {}
    end = 0
    for namespace, role, layer, dims, dtype in _arrays(shape, coordinates):
        cache = Cache(namespace=namespace, role=role, layer=layer, offset=end, shape=dims, dtype=dtype)
        caches[namespace, role, layer] = cache
        end += _aligned(cache.nbytes)
    row_bytes = sum(_staged_bytes(shape, cache) for cache in caches.values())
    staging = StagingRows(offset=end, row_bytes=row_bytes, num_rows=num_staging_rows)
    return RegionMap(shape=shape, coordinates=coordinates, caches=caches, staging=staging, nbytes=end + staging.nbytes)


def _staged_bytes(shape: CacheShape, cache: Cache) -> int:
    """Bytes of one sequence's state in a cache, where it is staged while it is being pulled: what a transfer moves."""
    match cache.role:
        case Role.CONV:
            return cache.entry_bytes // cache.shape[1] * shape.moved_conv_rows
        case Role.SSM:
            return cache.entry_bytes // cache.shape[1]
        case Role.KEY | Role.VALUE | Role.BOOTSTRAP:
            return 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _arrays(
    shape: CacheShape, coordinates: Coordinates
) -> Iterator[tuple[Namespace, Role, int, tuple[int, ...], Dtype]]:
    for layer, kind in enumerate(shape.layer_types):
        match kind:
            case LayerType.FULL:
                yield from _paged_arrays(shape, coordinates, Namespace.TARGET, layer)
            case LayerType.LINEAR:
                channels = sum(shard.length for shard in conv_channels(shape, coordinates).values())
                rows = shape.moved_conv_rows + shape.num_speculative_tokens
                conv = (shape.num_slots, rows, channels)
                yield Namespace.TARGET, Role.CONV, layer, conv, shape.dtypes.conv
                heads = _value_heads(shape, coordinates).length
                checkpoints = shape.num_speculative_tokens + 1
                ssm = (shape.num_slots, checkpoints, heads, shape.key_head_dim, shape.value_head_dim)
                yield Namespace.TARGET, Role.SSM, layer, ssm, shape.dtypes.ssm
    for layer in range(shape.num_draft_layers):
        yield from _paged_arrays(shape, coordinates, Namespace.DRAFT, layer)
    if shape.num_draft_layers:
        bootstrap = (shape.num_slots, 1, shape.hidden_size)
        yield Namespace.DRAFT, Role.BOOTSTRAP, 0, bootstrap, shape.dtypes.of(Role.BOOTSTRAP)


def _paged_arrays(
    shape: CacheShape, coordinates: Coordinates, namespace: Namespace, layer: int
) -> Iterator[tuple[Namespace, Role, int, tuple[int, ...], Dtype]]:
    heads = _kv_heads(shape, coordinates, namespace).length
    dims = (shape.num_blocks, heads, shape.block_size, shape.head_dim_of(namespace))
    yield namespace, Role.KEY, layer, dims, shape.dtypes.key
    yield namespace, Role.VALUE, layer, dims, shape.dtypes.value


def _kv_heads(shape: CacheShape, coordinates: Coordinates, namespace: Namespace) -> Shard:
    num_heads = shape.num_kv_heads_of(namespace)
    if namespace is Namespace.DRAFT and shape.draft_whole:
        return Shard(0, num_heads)
    return kv_shard(num_heads, coordinates.tp_size, coordinates.tp_rank)


def _value_heads(shape: CacheShape, coordinates: Coordinates) -> Shard:
    return even_shard("num_value_heads", shape.num_value_heads, coordinates.tp_size, coordinates.tp_rank)


def _check_context_parallel(shape: CacheShape, coordinates: Coordinates) -> None:
    check_group(shape.num_kv_heads, coordinates.tp_size, coordinates.dcp_size)
    if shape.num_draft_layers and not shape.draft_whole:
        check_group(shape.num_kv_heads_of(Namespace.DRAFT), coordinates.tp_size, coordinates.dcp_size)
    expected = dcp_rank(coordinates.tp_rank, coordinates.dcp_size)
    if coordinates.dcp_rank != expected:
        rule = f"tp_rank modulo dcp_size = {expected}"
        raise InvalidValueError(field="dcp_rank", value=coordinates.dcp_rank, rule=rule)
