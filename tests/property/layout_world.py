"""Workers made of plain bytes, filled with slices of unsharded tensors.

The slices are computed here a second time and in another way than in the product: by listing, for every head, the ranks
that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from common.layout.region import Cache, CacheKey, RegionMap, lay_out
from common.layout.shape import CacheShape, LayerType
from contracts.manifest import CacheDtypes, Coordinates, Dtype, Namespace, RankManifest, Role

Bytes = npt.NDArray[np.uint8]
Content = dict[CacheKey, npt.NDArray[np.unsignedinteger]]
POISON = 0xA5


def make_shape(
    *,
    layers: str = "llf",
    kv: int = 1,
    hk: int = 1,
    hv: int = 1,
    depth: int = 0,
    draft: int = 0,
    draft_whole: bool = False,
    draft_heads: tuple[int, int] = (0, 0),
    dtype: Dtype = Dtype.FLOAT32,
    num_blocks: int = 9,
) -> CacheShape:
    """A small model: `layers` is a word of f (full attention) and l (linear attention).

    `draft_heads` are KV heads and elements of each that the draft has for itself.
    """
    return CacheShape(
        layer_types=tuple(LayerType.FULL if kind == "f" else LayerType.LINEAR for kind in layers),
        num_kv_heads=kv,
        head_dim=2,
        num_key_heads=hk,
        num_value_heads=hv,
        key_head_dim=2,
        value_head_dim=3,
        conv_kernel=4,
        dtypes=CacheDtypes(key=dtype, value=dtype, conv=dtype),
        block_size=3,
        num_blocks=num_blocks,
        num_slots=3,
        num_speculative_tokens=depth,
        num_draft_layers=draft,
        draft_whole=draft_whole,
        hidden_size=5 if draft else 0,
        draft_num_kv_heads=draft_heads[0],
        draft_head_dim=draft_heads[1],
    )


@dataclass(frozen=True)
class Request:
    """Which tokens travel, in which chunks, and where a sequence lies on this side."""

    block_ids: Sequence[int]
    slot: int
    num_tokens: int = 11
    cached: int = 3
    chunks: Sequence[int] = (4, 9)
    conv_row: int = 0
    ssm_row: int = 0

    def start(self, namespace: Namespace) -> int:
        """The first token that travels: the draft cache has none at 0."""
        return max(self.cached, 1) if namespace is Namespace.DRAFT else self.cached

    def cuts(self, namespace: Namespace) -> tuple[tuple[int, int], ...]:
        """The chunks as ranges of tokens."""
        start = self.start(namespace)
        inner = (cut for cut in self.chunks if start < cut < self.num_tokens)
        return tuple(pairwise((start, *inner, max(start, self.num_tokens))))

    def row(self, role: Role) -> int:
        """The row of its slot at which the sequence's state begins."""
        return {Role.CONV: self.conv_row, Role.SSM: self.ssm_row}.get(role, 0)


@dataclass
class Worker:
    """The ranks of one replica of a worker, and their regions."""

    shape: CacheShape
    tp: int
    dcp: int = 1
    name: str = "prefill-0"
    dp_rank: int = 0
    dp_size: int = 1
    ranks: list[RegionMap] = field(init=False)
    regions: list[Bytes] = field(init=False)

    def __post_init__(self) -> None:
        places = [
            Coordinates(
                dp_rank=self.dp_rank,
                dp_size=self.dp_size,
                tp_rank=rank,
                tp_size=self.tp,
                dcp_rank=rank % self.dcp,
                dcp_size=self.dcp,
            )
            for rank in range(self.tp)
        ]
        self.ranks = [lay_out(self.shape, at) for at in places]
        self.regions = [np.full(rank.nbytes, POISON, dtype=np.uint8) for rank in self.ranks]

    def manifests(self) -> list[RankManifest]:
        """What the replica publishes."""
        return list(self._manifests)

    @cached_property
    def _manifests(self) -> list[RankManifest]:
        draft = "tiny-head" if self.shape.num_draft_layers else ""
        return [rank.manifest(worker_id=self.name, incarnation="i0", model="tiny", draft=draft) for rank in self.ranks]

    def poison(self) -> None:
        """Overwrite everything."""
        for region in self.regions:
            region.fill(POISON)

    def fill(self, content: Content, request: Request, regions: list[Bytes] | None = None) -> None:
        """Put the request's part of the unsharded `content` where each rank keeps it."""
        for rank, region in enumerate(self.regions if regions is None else regions):
            for key, cache in self.ranks[rank].caches.items():
                view = _view(region, cache)
                match cache.role:
                    case Role.KEY | Role.VALUE:
                        self._fill_tokens(rank, view, content[key], request, cache.namespace)
                    case Role.CONV:
                        rows = slice(request.conv_row, request.conv_row + 3)
                        view[request.slot, rows] = content[key][:, self._channels(rank)]
                    case Role.SSM:
                        view[request.slot, request.ssm_row] = content[key][
                            _even(self.shape.num_value_heads, self.tp, rank)
                        ]
                    case Role.BOOTSTRAP:
                        view[request.slot, 0] = content[key]

    def images(self, contents: Sequence[Content], requests: Sequence[Request]) -> tuple[list[Bytes], list[Bytes]]:
        """For each rank: its whole region as it must be after these requests, and which of its bytes are theirs (0 or 1)."""
        expected = [np.full(rank.nbytes, POISON, dtype=np.uint8) for rank in self.ranks]
        owned = [np.zeros(rank.nbytes, dtype=np.uint8) for rank in self.ranks]
        for content, request in zip(contents, requests, strict=True):
            self.fill(content, request, expected)
            full = {key: np.full_like(whole, np.iinfo(whole.dtype).max) for key, whole in content.items()}
            self.fill(full, request, owned)
        return expected, [mask // 255 for mask in owned]

    def _fill_tokens(
        self,
        rank: int,
        view: npt.NDArray[np.unsignedinteger],
        whole: npt.NDArray[np.unsignedinteger],
        request: Request,
        namespace: Namespace,
    ) -> None:
        num_heads = len(whole)
        heads = holders_of_heads(num_heads, self.tp)[rank]
        if namespace is Namespace.DRAFT and self.shape.draft_whole:
            heads = list(range(num_heads))
        size = self.shape.block_size
        for token in range(request.start(namespace), request.num_tokens):
            block = token // size
            if block % self.dcp == rank % self.dcp:
                view[request.block_ids[block // self.dcp], :, token % size] = whole[heads, token]

    def _channels(self, rank: int) -> list[int]:
        shape = self.shape
        keys = shape.num_key_heads * shape.key_head_dim
        q = [
            h * shape.key_head_dim + i
            for h in _even(shape.num_key_heads, self.tp, rank)
            for i in range(shape.key_head_dim)
        ]
        v = [
            h * shape.value_head_dim + i
            for h in _even(shape.num_value_heads, self.tp, rank)
            for i in range(shape.value_head_dim)
        ]
        return [*q, *(keys + c for c in q), *(2 * keys + c for c in v)]


def holders_of_heads(num_heads: int, tp: int) -> list[list[int]]:
    """The KV heads of each rank, found by dealing neighbours out: heads to ranks, or ranks to heads."""
    held: list[list[int]] = [[] for _ in range(tp)]
    for cell in range(max(num_heads, tp)):
        rank = cell * tp // max(num_heads, tp)
        head = cell * num_heads // max(num_heads, tp)
        held[rank].append(head)
    return held


def unsharded(shape: CacheShape, num_tokens: int, first: int = 1) -> Content:
    """The caches of one request before they are cut: elements count up from `first`, all distinct (or nearly so, in 16 bits)."""
    content: Content = {}
    at = first
    for key, cache in lay_out(shape, Coordinates()).caches.items():
        match cache.role:
            case Role.KEY | Role.VALUE:
                num_heads, head_dim = shape.num_kv_heads, shape.head_dim
                if cache.namespace is Namespace.DRAFT:
                    num_heads, head_dim = (shape.draft_num_kv_heads or num_heads, shape.draft_head_dim or head_dim)
                dims: tuple[int, ...] = (num_heads, num_tokens, head_dim)
            case Role.CONV:
                dims = (3, cache.shape[2])
            case Role.SSM | Role.BOOTSTRAP:
                dims = cache.shape[2:]
        size = int(np.prod(dims))
        content[key] = np.arange(at, at + size, dtype=np.uint32).astype(_unsigned(cache.dtype)).reshape(dims)
        at += size
    return content


def _even(total: int, tp: int, rank: int) -> list[int]:
    return [head for head in range(total) if head * tp // total == rank]


def _unsigned(dtype: Dtype) -> type[np.unsignedinteger]:
    return np.uint32 if dtype.itemsize == 4 else np.uint16


def _view(region: Bytes, cache: Cache) -> npt.NDArray[np.unsignedinteger]:
    return region[cache.offset : cache.offset + cache.nbytes].view(_unsigned(cache.dtype)).reshape(cache.shape)
