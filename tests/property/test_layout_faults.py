"""The checks of the layout can fail: each fault that such arithmetic is known for, planted in the product, is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace as replaced
from typing import Any

import msgspec
import pytest

from common.layout import planner
from common.layout.context_parallel import owned_blocks
from common.layout.extents import Extents, extents
from common.layout.heads import Shard
from common.layout.link import Holders, Interval, Tiling
from common.layout.region import Cache, RegionMap
from common.layout.slot_rows import slot_bases
from common.layout.templates import CopyTemplate, SlotTemplate, coalesce
from contracts.manifest import Namespace, Role, Segment, SlotPlace, Span, TensorKey
from tests.property.layout_execution import Checker, link
from tests.property.layout_world import Request, Worker, make_shape

SOURCE = Request(block_ids=(4, 5, 1, 7), slot=2)
DESTINATION = Request(block_ids=(2, 3, 0, 6), slot=1)
NOT_ONCE = "not each byte exactly once"
DIFFERENT = "differ from the unsharded slice"
replace = msgspec.structs.replace


def check(source: Worker, destination: Worker, templates: Sequence[CopyTemplate] | None = None) -> None:
    """Execute a plan for one sequence and look at every byte."""
    Checker([(SOURCE, DESTINATION)]).check(source, destination, templates)


def kv_workers(src_tp: int = 4, dst_tp: int = 2, dcp: int = 1, num_heads: int = 2) -> tuple[Worker, Worker]:
    """Two workers of a model with full attention alone."""
    shape = make_shape(layers="ff", kv=num_heads)
    return Worker(shape, src_tp), Worker(shape, dst_tp, dcp, name="decode-0")


def hybrid_workers(src_tp: int = 2, dst_tp: int = 1) -> tuple[Worker, Worker]:
    """Two workers of a model with all roles."""
    shape = make_shape(layers="fl", kv=2, hk=2, hv=2, draft=1)
    return Worker(shape, src_tp), Worker(shape, dst_tp, name="decode-0")


def test_a_head_found_by_modulo_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer heads than ranks, rank r claims head r % H."""

    def modulo(num_heads: int, tp_size: int, tp_rank: int) -> Shard:
        return Shard(tp_rank % num_heads, 1) if tp_size > num_heads else Shard(tp_rank, 1)

    monkeypatch.setattr("common.layout.region.kv_shard", modulo)
    with pytest.raises(AssertionError, match=DIFFERENT):
        check(*kv_workers())


def test_a_conv_state_taken_as_one_slab_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's row counts as one slice of the whole row. Equal cuts on both sides hide it, two ranks to one do not."""
    shape = make_shape(layers="l", hk=2, hv=2)

    def slab(self: RegionMap, cache: Cache) -> Iterator[Span]:
        row = cache.entry_bytes // cache.shape[1]
        size = cache.dtype.itemsize
        place = SlotPlace(
            offset=cache.offset,
            slot_stride=cache.entry_bytes,
            row_stride=row,
            num_rows=cache.shape[1],
            moved_rows=3,
            unit_bytes=size,
        )
        key = TensorKey(namespace=cache.namespace, role=Role.CONV, layer=cache.layer, segment=Segment.WHOLE)
        yield Span(key=key, start=self.coordinates.tp_rank * row // size, length=row // size, place=place)

    monkeypatch.setattr(RegionMap, "_conv_spans", slab)
    check(Worker(shape, 2), Worker(shape, 2, name="decode-0"))
    with pytest.raises(AssertionError, match=DIFFERENT):
        check(Worker(shape, 2), Worker(shape, 1, name="decode-0"))


@pytest.mark.parametrize(("low", "high"), [(0, -1), (1, 0), (1, 1), (-1, -1)])
@pytest.mark.parametrize("role", [Role.KEY, Role.CONV, Role.SSM])
def test_an_interval_cut_off_by_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch, role: Role, low: int, high: int
) -> None:
    """A piece of a destination interval begins or ends one unit beside the source's border, or is shifted by one."""
    real: Callable[..., list[tuple[Interval, Holders]]] = planner._pieces

    def off(cut: Interval, held: Tiling, **more: Any) -> list[tuple[Interval, Holders]]:
        pieces = real(cut, held, **more)
        if len(pieces) < 2 or pieces[0][1][0][1].key.role is not role:
            return pieces
        (start, end), holders = pieces[0 if low >= 0 else 1]
        wrong = ((start + low, end + high), holders)
        return [wrong, *pieces[1:]] if low >= 0 else [pieces[0], wrong, *pieces[2:]]

    shape = make_shape(layers="fl", kv=4, hk=4, hv=4)
    monkeypatch.setattr(planner, "_pieces", off)
    with pytest.raises(AssertionError, match=NOT_ONCE):
        check(Worker(shape, 2), Worker(shape, 1, name="decode-0"))


@pytest.mark.parametrize(
    "wrong", [lambda residue: 1 - residue, lambda _: 0, lambda _: 1], ids=["swapped", "all the first", "all the second"]
)
def test_a_wrong_residue_is_noticed(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[int], int]) -> None:
    """The ranks of a context-parallel group get each other's blocks, or all of them the blocks of one."""

    def blocks(start: int, end: int, block_size: int, modulus: int, residue: int) -> range:
        return owned_blocks(start, end, block_size, modulus, residue if modulus == 1 else wrong(residue))

    for user in ("extents", "context_parallel"):
        monkeypatch.setattr(f"common.layout.{user}.owned_blocks", blocks)
    with pytest.raises(AssertionError, match=f"{NOT_ONCE}|{DIFFERENT}"):
        check(*kv_workers(src_tp=1, dst_tp=2, dcp=2, num_heads=1))


def test_sparse_packing_under_context_parallelism_is_noticed() -> None:
    """A rank of a group receives every block, as if it were alone."""
    source, destination = kv_workers(src_tp=1, dst_tp=2, dcp=2, num_heads=1)
    made = link(source, destination).templates
    whole = [replace(each, part=replace(each.part, modulus=1, residue=0)) for each in made]
    with pytest.raises(AssertionError, match=NOT_ONCE):
        check(source, destination, whole)


@pytest.mark.parametrize("role", [Role.KEY, Role.VALUE])
def test_two_writers_of_one_head_are_noticed(monkeypatch: pytest.MonkeyPatch, role: Role) -> None:
    """Both replicas of a head write it: the bytes are right, and come twice."""

    def doubled(templates: Iterable[CopyTemplate]) -> tuple[CopyTemplate, ...]:
        made = coalesce(templates)
        first = next(each for each in made if each.part.role is role)
        other = replace(first.part, src_rank=first.part.src_rank ^ 1)
        return (*made, replace(first, part=other))

    monkeypatch.setattr(planner, "coalesce", doubled)
    with pytest.raises(AssertionError, match=NOT_ONCE):
        check(*kv_workers())


def test_a_dropped_tail_of_the_last_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only whole blocks move: the tokens in the last block, which is not full, stay behind."""

    def untailed(src: Sequence[int], dst: Sequence[int], start: int, end: int, size: int, **more: int) -> Extents:
        return extents(src, dst, start, end if end < SOURCE.num_tokens else end - end % size, size, **more)

    monkeypatch.setattr("common.layout.bind.extents", untailed)
    with pytest.raises(AssertionError, match=NOT_ONCE):
        check(*kv_workers())


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_chunk_that_ends_one_token_off_is_noticed(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    """Each chunk moves one token less, or one more, than it says."""

    def off(src: Sequence[int], dst: Sequence[int], start: int, end: int, size: int, **more: int) -> Extents:
        return extents(src, dst, start, end + shift, size, **more)

    monkeypatch.setattr("common.layout.bind.extents", off)
    with pytest.raises(AssertionError, match=NOT_ONCE):
        check(*kv_workers(src_tp=1))


def test_a_draft_that_is_taken_for_the_target_is_noticed() -> None:
    """The copies of a draft layer begin at token 0, where a draft has nothing."""
    source, destination = hybrid_workers()
    made = link(source, destination).templates
    wrong = [replace(each, part=replace(each.part, namespace=Namespace.TARGET)) for each in made]
    pair = replaced(SOURCE, cached=0), replaced(DESTINATION, cached=0)
    Checker([pair]).check(source, destination)
    with pytest.raises(AssertionError, match=NOT_ONCE):
        Checker([pair]).check(source, destination, wrong)


@pytest.mark.parametrize("rows", [{"conv_row": 1}, {"ssm_row": 2}])
def test_a_state_that_is_taken_from_row_0_is_noticed(monkeypatch: pytest.MonkeyPatch, rows: dict[str, Any]) -> None:
    """With speculation the state begins at the row of the last accepted token; the fault forgets it."""
    shape = make_shape(layers="l", hk=2, hv=2, depth=2)
    pair = replaced(SOURCE, **rows), DESTINATION
    source, destination = Worker(shape, 2), Worker(shape, 1, name="decode-0")

    def first(template: SlotTemplate, src_slot: int, dst_slot: int, *, src_row: int, dst_row: int) -> tuple[int, int]:
        return slot_bases(template, src_slot, dst_slot, src_row=0 * src_row, dst_row=dst_row)

    Checker([pair]).check(source, destination)
    monkeypatch.setattr("common.layout.part_copies.slot_bases", first)
    with pytest.raises(AssertionError, match=DIFFERENT):
        Checker([pair]).check(source, destination)


def test_a_bootstrap_that_is_lost_comes_twice_or_is_another_s_is_noticed() -> None:
    """Every destination rank has one of its own; each fault touches one of them."""
    shape = make_shape(layers="fl", kv=2, hk=2, hv=2, draft=1)
    source, destination = Worker(shape, 2), Worker(shape, 2, name="decode-0")
    made = link(source, destination).templates
    (first, other) = (each for each in made if each.part.role is Role.BOOTSTRAP)
    assert isinstance(first, SlotTemplate)
    rest = [each for each in made if each is not first]
    check(source, destination, [*rest, first])
    twice = replace(first, part=replace(first.part, src_rank=other.part.src_rank))
    for wrong in ([], [first, twice], [replace(first, dst_offset=first.dst_offset + first.dst_slot_stride)]):
        with pytest.raises(AssertionError, match=NOT_ONCE):
            check(source, destination, [*rest, *wrong])
    with pytest.raises(AssertionError, match=DIFFERENT):
        check(source, destination, [*rest, replace(first, src_offset=first.src_offset - first.src_slot_stride)])


@pytest.mark.parametrize("keep", [slice(1, None), slice(None, -1)])
def test_a_lost_or_doubled_copy_is_noticed(keep: slice) -> None:
    """One copy of the plan is missing, or made twice."""
    source, destination = hybrid_workers()
    templates = link(source, destination).templates
    for wrong in (templates[keep], templates + templates[keep]):
        with pytest.raises(AssertionError, match=NOT_ONCE):
            check(source, destination, wrong)
