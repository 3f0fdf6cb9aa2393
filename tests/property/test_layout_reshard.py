"""Every legal reshard of KV heads, conv channels and value heads, executed on bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.layout import bind as binding
from common.layout import region as layout
from common.layout.extents import Extents, extents
from common.layout.heads import Shard
from common.layout.planner import plan as layout_plan
from common.layout.region import Cache, RegionMap
from contracts.manifest import Dtype, Namespace, Role, Segment, SlotPlace, Span, TensorKey
from tests.property.layout_world import Request, Worker, check_transfer, link, make_shape

HEADS = range(1, 9)
SOURCE = Request(block_ids=(4, 5, 1, 7), slot=2)
DESTINATION = Request(block_ids=(2, 3, 0, 6), slot=1)


def legal(num_heads: int) -> list[int]:
    """Tensor-parallel sizes 1 to 8 over which KV heads can be cut or replicated."""
    return [tp for tp in range(1, 9) if num_heads % tp == 0 or tp % num_heads == 0]


def dcp_sizes(num_heads: int, tp: int) -> list[int]:
    """Context-parallel sizes that a destination may have."""
    return [dcp for dcp in (1, 2, 4, 8) if max(tp // num_heads, 1) % dcp == 0]


@pytest.mark.parametrize("num_heads", HEADS)
def test_kv_reshards_exactly_for_every_topology(num_heads: int) -> None:
    """KEY and VALUE of target and draft, heads 1..8 x source tp 1..8 x destination tp 1..8 x dcp 1, 2, 4, 8."""
    shape = make_shape(layers="ff", kv=num_heads, draft=1)
    for src_tp in legal(num_heads):
        for dst_tp in legal(num_heads):
            for dcp in dcp_sizes(num_heads, dst_tp):
                source, destination = Worker(shape, src_tp), Worker(shape, dst_tp, dcp, name="decode-0")
                check_transfer(source, destination, SOURCE, DESTINATION)


@pytest.mark.parametrize("num_key_heads", HEADS)
def test_conv_and_ssm_reshard_exactly_for_every_topology(num_key_heads: int) -> None:
    """CONV by segment and SSM by value head, with one and two value heads a key head, 2 -> 3 and 3 -> 2 included."""
    for num_value_heads in (num_key_heads, 2 * num_key_heads):
        shape = make_shape(layers="ll", hk=num_key_heads, hv=num_value_heads)
        sizes = [tp for tp in range(1, 9) if num_key_heads % tp == 0]
        for src_tp in sizes:
            for dst_tp in sizes:
                check_transfer(Worker(shape, src_tp), Worker(shape, dst_tp, name="decode-0"), SOURCE, DESTINATION)


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 2), (2, 1), (2, 3), (3, 2), (2, 6), (6, 2), (3, 6), (6, 6)])
def test_a_hybrid_model_in_16_bits_with_speculation_reshards_exactly(src_tp: int, dst_tp: int) -> None:
    """All roles in one region, SSM in 32 bits beside 16-bit caches; the state starts at another row on each side."""
    shape = make_shape(layers="lflf", kv=6, hk=6, hv=12, depth=3, draft=2, dtype=Dtype.BFLOAT16)
    src = Request(block_ids=(8, 7, 6, 5), slot=0, conv_row=2, ssm_row=2, cached=0, chunks=(1, 2, 10))
    dst = Request(block_ids=(0, 1, 2, 3), slot=2, conv_row=0, ssm_row=3, cached=0, chunks=(1, 2, 10))
    check_transfer(Worker(shape, src_tp), Worker(shape, dst_tp, name="decode-0"), src, dst)


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(4, 2), (2, 4), (4, 4), (1, 4)])
def test_a_draft_body_that_is_whole_on_every_rank_is_sent_once_to_each(src_tp: int, dst_tp: int) -> None:
    """Every destination rank gets all draft heads, each from one source rank."""
    shape = make_shape(layers="f", kv=2, draft=2, draft_whole=True)
    made = check_transfer(Worker(shape, src_tp), Worker(shape, dst_tp, name="decode-0"), SOURCE, DESTINATION)
    drafts = [part for part in made.parts if part.namespace is Namespace.DRAFT]
    assert len(drafts) == 2 * 2 * dst_tp


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 6, 12])
def test_every_length_of_the_last_block_is_exact(num_tokens: int) -> None:
    """From one token to full blocks, nothing cached, also when blocks lie in one consecutive run."""
    shape = make_shape(layers="fl", kv=2, hk=2, hv=2)
    src = Request(block_ids=(1, 2, 3, 4), slot=0, num_tokens=num_tokens, cached=0, chunks=())
    dst = Request(block_ids=(5, 6, 7, 8), slot=0, num_tokens=num_tokens, cached=0, chunks=())
    for src_tp, dst_tp in ((1, 1), (1, 2), (2, 1)):
        check_transfer(Worker(shape, src_tp), Worker(shape, dst_tp, name="decode-0"), src, dst)


@pytest.mark.parametrize(("num_heads", "src_tp", "dst_tp"), [(1, 8, 1), (1, 4, 4), (2, 8, 2), (2, 4, 1), (2, 4, 8)])
def test_replicas_share_the_writing_evenly(num_heads: int, src_tp: int, dst_tp: int) -> None:
    """Over eight layers no replica owes more than one copy above another, and KEY and VALUE of a head share a writer."""
    shape = make_shape(layers="f" * 8, kv=num_heads)
    made = link(Worker(shape, src_tp), Worker(shape, dst_tp, name="decode-0"))
    owed = [sum(t.part.role is Role.KEY for t in made.templates_for(rank)) for rank in range(src_tp)]
    assert max(owed) - min(owed) <= 1
    keys, values = (
        [(part.layer, part.src_rank, part.dst_rank) for part in made.parts if part.role is role]
        for role in (Role.KEY, Role.VALUE)
    )
    assert keys == values


def test_one_layer_and_many_receivers_still_use_all_replicas() -> None:
    """With a single layer the replicas of its head serve different destination ranks."""
    shape = make_shape(layers="f", kv=1)
    made = link(Worker(shape, 4), Worker(shape, 4, name="decode-0"))
    assert {part.src_rank for part in made.parts} == {0, 1, 2, 3}


def test_the_order_of_ranks_does_not_change_the_plan() -> None:
    """Both sides may plan for themselves: equal manifests, in any order, give an equal plan."""
    shape = make_shape(layers="lflf", kv=2, hk=4, hv=4)
    source, destination = Worker(shape, 4), Worker(shape, 2, name="decode-0")
    shuffled = layout_plan(source.manifests()[::-1], destination.manifests()[::-1])
    assert shuffled == link(source, destination)


def test_a_head_found_by_modulo_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: with fewer heads than ranks, rank r claims head r % H."""
    shape = make_shape(layers="ff", kv=2)

    def modulo(num_heads: int, tp_size: int, tp_rank: int) -> Shard:
        return Shard(tp_rank % num_heads, 1) if tp_size > num_heads else Shard(tp_rank, 1)

    monkeypatch.setattr(layout, "kv_shard", modulo)
    with pytest.raises(AssertionError, match="differ from the unsharded slice"):
        check_transfer(Worker(shape, 4), Worker(shape, 2, name="decode-0"), SOURCE, DESTINATION)


def test_a_conv_state_taken_as_one_slab_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a rank's row counts as one slice of the whole row."""
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
    check_transfer(Worker(shape, 2), Worker(shape, 2, name="decode-0"), SOURCE, DESTINATION)
    with pytest.raises(AssertionError, match="differ from the unsharded slice"):
        check_transfer(Worker(shape, 2), Worker(shape, 1, name="decode-0"), SOURCE, DESTINATION)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_range_that_is_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    """Planted fault: each chunk ends one token early, or one late."""
    shape = make_shape(layers="f", kv=2)

    def off(src: list[int], dst: list[int], start: int, end: int, size: int, **more: int) -> Extents:
        return extents(src, dst, start, end + shift, size, **more)

    monkeypatch.setattr(binding, "extents", off)
    with pytest.raises(AssertionError, match="not each byte exactly once"):
        check_transfer(Worker(shape, 1), Worker(shape, 2, name="decode-0"), SOURCE, DESTINATION)


@pytest.mark.parametrize("keep", [slice(1, None), slice(None, -1)])
def test_a_lost_or_doubled_copy_is_noticed(keep: slice) -> None:
    """Planted fault: one copy of the plan is missing, or made twice."""
    shape = make_shape(layers="fl", kv=2, hk=2, hv=2)
    source, destination = Worker(shape, 2), Worker(shape, 1, name="decode-0")
    templates = link(source, destination).templates
    for wrong in (templates[keep], templates + templates[keep]):
        with pytest.raises(AssertionError, match="not each byte exactly once"):
            check_transfer(source, destination, SOURCE, DESTINATION, templates=wrong)
