"""The cache bytes of one sequence as a worker really holds them, brought into the layout of a worker with one rank.

The places come from the ranks' manifests and the layout's formulas alone; no plan and no copy of the product is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from common.dataplane.port import Capabilities, DataPlane, Region, RemoteRegion
from common.dataplane.refusal_counts import RefusalCounts
from contracts.dataplane import RegionDescriptor
from contracts.manifest import Namespace, PagedPlace, RankManifest, Role, SlotPlace, Span, TensorKey
from contracts.rank import StartRank

Bytes = npt.NDArray[np.uint8]
Gathered = dict[TensorKey, Bytes]
"""By tensor: KEY and VALUE `[heads, tokens, token_bytes]`, CONV `[3, channels, itemsize]` a segment, SSM `[1, heads, head_bytes]`."""
POISON = 0xA5


@dataclass(frozen=True, kw_only=True)
class Held:
    """Where a worker keeps a sequence: its blocks in the order of the tokens (a rank's own under context parallelism), its slot.

    Of KEY and VALUE only tokens `[start, num_tokens)` count; the draft's cache has none at 0.
    """

    block_ids: Sequence[int]
    slot: int
    num_tokens: int
    start: int = 0

    def first(self, key: TensorKey) -> int:
        """The first token that counts."""
        return max(self.start, 1) if key.namespace is Namespace.DRAFT else self.start


@dataclass
class Memories:
    """Remembers the region of every rank whose data plane it has watched: ranks in threads of this process."""

    _found: list[tuple[StartRank, Region]] = field(default_factory=list)

    def watch(self, start: StartRank, plane: DataPlane) -> DataPlane:
        """The same data plane, whose first region is remembered as the caches of the rank."""
        return _Watched(plane, lambda region: self._found.append((start, region)))

    def of(self, worker_id: str, where: Callable[[StartRank], bool] | None = None) -> list[memoryview]:
        """The data of a worker's ranks, in their order; `where` chooses among several replicas."""
        found = [each for each in self._found if each[0].worker_id == worker_id and (where is None or where(each[0]))]
        return [region.data for _, region in sorted(found, key=lambda each: each[0].rank)]


class _Watched:
    """A data plane that tells of its first region."""

    def __init__(self, plane: DataPlane, tell: Callable[[Region], None]) -> None:
        self._plane = plane
        self._tell: Callable[[Region], None] | None = tell

    @property
    def capabilities(self) -> Capabilities:
        return self._plane.capabilities

    @property
    def refusals(self) -> RefusalCounts:
        return self._plane.refusals

    def allocate(self, nbytes: int, num_cells: int) -> Region:
        region = self._plane.allocate(nbytes, num_cells)
        if self._tell is not None:
            self._tell(region)
            self._tell = None
        return region

    def connect(
        self, descriptor: RegionDescriptor, deadline: float, stop: threading.Event | None = None
    ) -> RemoteRegion:
        return self._plane.connect(descriptor, deadline, stop)

    def close(self) -> None:
        self._plane.close()


def poison(memories: Sequence[memoryview]) -> None:
    """Overwrite all caches of a worker, so that a byte that nobody writes is seen."""
    for memory in memories:
        np.frombuffer(memory, np.uint8)[:] = POISON


def spoil(manifest: RankManifest, memory: memoryview, held: Held, role: Role) -> None:
    """On one rank, make every state of a sequence, or its tokens in its first block there, not a number; all are fp32."""
    data = np.frombuffer(memory, np.uint8)
    for span in manifest.spans:
        if span.key.role is not role or span.key.namespace is not Namespace.TARGET:
            continue
        match span.place:
            case SlotPlace() as place:
                start, size = place.offset + held.slot * place.slot_stride, place.num_rows * place.row_stride
            case PagedPlace() as place:
                start, size = place.offset + held.block_ids[0] * place.block_stride, span.length * place.head_bytes
        data[start : start + size].view(np.float32)[:] = np.nan


def gather(manifests: Sequence[RankManifest], memories: Sequence[memoryview], held: Held) -> Gathered:
    """The caches of one sequence, unsharded. `manifests` are those of one replica, in the order of `memories`.

    Raises `AssertionError` when ranks that hold the same bytes differ, or when something is held by nobody.
    """
    whole: Gathered = {}
    seen: dict[TensorKey, npt.NDArray[np.bool_]] = {}
    for manifest, memory in zip(manifests, memories, strict=True):
        data = np.frombuffer(memory, np.uint8)
        for span in manifest.spans:
            if span.key not in whole:
                whole[span.key], seen[span.key] = _blank(span.key, manifests, held)
            for index, part in _pieces(manifest, span, data, held):
                known = seen[span.key][index]
                same = (whole[span.key][index] == part).all(axis=-1) | ~known
                assert same.all(), (
                    f"{span.key.name}: rank {manifest.coordinates.tp_rank} holds other bytes than a replica"
                )
                whole[span.key][index] = part
                seen[span.key][index] = True
    for key, known in seen.items():
        assert known.all(), f"{key.name}: some of it is held by no rank"
    return whole


def untouched(manifests: Sequence[RankManifest], memories: Sequence[memoryview], helds: Sequence[Held]) -> bool:
    """Whether everything but what the given sequences own (whole slots, and the tokens that count) is still poison."""
    for manifest, memory in zip(manifests, memories, strict=True):
        rest = np.frombuffer(memory, np.uint8).copy()
        for span in manifest.spans:
            for held in helds:
                if isinstance(span.place, SlotPlace):
                    _slot_rows(span, span.place, rest, held)[:] = POISON
                    continue
                for _, part in _pieces(manifest, span, rest, held):
                    part[:] = POISON
        if (rest != POISON).any():
            return False
    return True


def differing(ours: Gathered, theirs: Gathered) -> list[str]:
    """The names of the tensors whose bytes differ."""
    assert ours.keys() == theirs.keys()
    return [key.name for key in ours if not np.array_equal(ours[key], theirs[key])]


def _blank(key: TensorKey, manifests: Sequence[RankManifest], held: Held) -> tuple[Bytes, npt.NDArray[np.bool_]]:
    """The whole tensor, nothing of it known."""
    spans = [span for manifest in manifests for span in manifest.spans if span.key == key]
    extent = max(span.start + span.length for span in spans)
    match spans[0].place:
        case PagedPlace() as place:
            shape = (extent, held.num_tokens - held.first(key), place.token_bytes)
        case SlotPlace() as place:
            shape = (place.moved_rows, extent, place.unit_bytes)
    return np.zeros(shape, np.uint8), np.zeros(shape[:2], np.bool_)


def _pieces(manifest: RankManifest, span: Span, data: Bytes, held: Held) -> list[tuple[tuple[slice, slice], Bytes]]:
    """What the rank holds of the sequence in one span: where it belongs in the whole tensor, and a view of it."""
    units = slice(span.start, span.start + span.length)
    if isinstance(span.place, SlotPlace):
        rows = span.place.moved_rows
        return [((slice(0, rows), units), _slot_rows(span, span.place, data, held)[:rows])]
    place, at, size = span.place, manifest.coordinates, manifest.block_size
    first = held.first(span.key)
    pieces = []
    for block in range(first // size, -(-held.num_tokens // size)):
        if block % at.dcp_size != at.dcp_rank:
            continue
        low, high = max(first, block * size), min(held.num_tokens, (block + 1) * size)
        start = place.offset + held.block_ids[block // at.dcp_size] * place.block_stride
        heads = data[start : start + span.length * place.head_bytes].reshape(span.length, size, place.token_bytes)
        pieces.append(((units, slice(low - first, high - first)), heads[:, low - block * size : high - block * size]))
    return pieces


def _slot_rows(span: Span, place: SlotPlace, data: Bytes, held: Held) -> Bytes:
    """All rows of the sequence's slot: `[rows, units, unit_bytes]`."""
    return np.lib.stride_tricks.as_strided(
        data[place.offset + held.slot * place.slot_stride :],
        (place.num_rows, span.length, place.unit_bytes),
        (place.row_stride, place.unit_bytes, 1),
    )
