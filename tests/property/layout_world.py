"""Workers made of plain bytes, to execute a plan and compare every byte with slices of the unsharded tensors.

The slices are computed here a second time and in another way than in the product: by listing, for every head, the ranks
that hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from common.layout.bind import bind_tokens
from common.layout.planner import ReshardPlan, plan
from common.layout.region import Cache, CacheKey, RegionMap, lay_out
from common.layout.run import Run
from common.layout.shape import CacheShape, LayerType
from common.layout.slot_rows import bind_slot
from common.layout.templates import CopyTemplate, PagedTemplate
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
    dtype: Dtype = Dtype.FLOAT32,
    num_blocks: int = 9,
) -> CacheShape:
    """A small model: `layers` is a word of f (full attention) and l (linear attention)."""
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
    )


@dataclass(frozen=True)
class Request:
    """Which tokens travel, in which chunks, and where the state lies on this side."""

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


@dataclass
class Worker:
    """The ranks of one worker and their regions."""

    shape: CacheShape
    tp: int
    dcp: int = 1
    name: str = "prefill-0"
    ranks: list[RegionMap] = field(init=False)
    regions: list[Bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = [
            lay_out(self.shape, Coordinates(tp_rank=r, tp_size=self.tp, dcp_rank=r % self.dcp, dcp_size=self.dcp))
            for r in range(self.tp)
        ]
        self.regions = [np.full(rank.nbytes, POISON, dtype=np.uint8) for rank in self.ranks]

    def manifests(self) -> list[RankManifest]:
        """What the worker publishes."""
        return [rank.manifest(worker_id=self.name, incarnation="i0", model="tiny") for rank in self.ranks]

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

    def _fill_tokens(
        self,
        rank: int,
        view: npt.NDArray[np.unsignedinteger],
        whole: npt.NDArray[np.unsignedinteger],
        request: Request,
        namespace: Namespace,
    ) -> None:
        heads = holders_of_heads(self.shape.num_kv_heads, self.tp)[rank]
        if namespace is Namespace.DRAFT and self.shape.draft_whole:
            heads = list(range(self.shape.num_kv_heads))
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


def unsharded(shape: CacheShape, num_tokens: int) -> Content:
    """The caches of one request before they are cut: every element distinct (or nearly so, in 16 bits)."""
    content: Content = {}
    at = 1
    for key, cache in lay_out(shape, Coordinates()).caches.items():
        match cache.role:
            case Role.KEY | Role.VALUE:
                dims: tuple[int, ...] = (shape.num_kv_heads, num_tokens, shape.head_dim)
            case Role.CONV:
                dims = (3, cache.shape[2])
            case Role.SSM:
                dims = cache.shape[2:]
        size = int(np.prod(dims))
        content[key] = np.arange(at, at + size, dtype=np.uint32).astype(_unsigned(cache.dtype)).reshape(dims)
        at += size
    return content


def link(source: Worker, destination: Worker) -> ReshardPlan:
    """The plan between two workers, from their manifests alone."""
    return plan(source.manifests(), destination.manifests())


def bind(template: CopyTemplate, src: Request, dst: Request, block_size: int) -> list[Run]:
    """All runs of one template for one request, chunk by chunk."""
    if not isinstance(template, PagedTemplate):
        row = "conv_row" if template.part.role is Role.CONV else "ssm_row"
        return list(bind_slot(template, src.slot, dst.slot, src_row=getattr(src, row), dst_row=getattr(dst, row)))
    start = src.start(template.part.namespace)
    cuts = [start, *(cut for cut in src.chunks if start < cut < src.num_tokens), src.num_tokens]
    return [
        run
        for low, high in pairwise(cuts)
        for run in bind_tokens(template, src.block_ids, dst.block_ids, low, high, block_size)
    ]


def check_transfer(
    source: Worker, destination: Worker, src: Request, dst: Request, templates: Iterable[CopyTemplate] | None = None
) -> ReshardPlan:
    """Execute the plan and assert the three properties: each byte once, no byte too many, equal to the unsharded slices.

    `templates` stands in for the plan's own, to show that a wrong plan is found.
    """
    content = unsharded(source.shape, src.num_tokens)
    source.fill(content, src)
    made = link(source, destination)
    writes = [np.zeros(region.size, dtype=np.uint8) for region in destination.regions]
    moved = 0
    for template in made.templates if templates is None else templates:
        origin, target = source.regions[template.part.src_rank], destination.regions[template.part.dst_rank]
        for run in bind(template, src, dst, source.shape.block_size):
            moved += run.nbytes
            for i in range(run.count):
                low, high = run.local_offset + i * run.local_stride, run.remote_offset + i * run.remote_stride
                target[high : high + run.length] = origin[low : low + run.length]
                writes[template.part.dst_rank][high : high + run.length] += 1
    needed = [np.zeros(region.size, dtype=np.uint8) for region in destination.regions]
    destination.fill(
        {key: np.full_like(whole, np.iinfo(whole.dtype).max) for key, whole in content.items()}, dst, needed
    )
    expected = [np.full(region.size, POISON, dtype=np.uint8) for region in destination.regions]
    destination.fill(content, dst, expected)
    for rank, region in enumerate(destination.regions):
        assert np.array_equal(writes[rank], needed[rank] // 255), f"rank {rank}: not each byte exactly once"
        assert np.array_equal(region, expected[rank]), f"rank {rank}: bytes differ from the unsharded slice"
    assert moved == sum(int(np.count_nonzero(mask)) for mask in needed)
    return made


def _even(total: int, tp: int, rank: int) -> list[int]:
    return [head for head in range(total) if head * tp // total == rank]


def _unsigned(dtype: Dtype) -> type[np.unsignedinteger]:
    return np.uint32 if dtype.itemsize == 4 else np.uint16


def _view(region: Bytes, cache: Cache) -> npt.NDArray[np.unsignedinteger]:
    return region[cache.offset : cache.offset + cache.nbytes].view(_unsigned(cache.dtype)).reshape(cache.shape)
