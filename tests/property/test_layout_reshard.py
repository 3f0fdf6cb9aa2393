"""Every legal reshard of KV heads, conv channels and value heads, executed on bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from common.layout.planner import plan
from common.layout.templates import PagedTemplate
from contracts.manifest import Dtype, Namespace, Role
from tests.property.layout_cases import HEADS, Case, Cut, cuts, hybrid_cases, kv_cases, kv_sizes, state_cases
from tests.property.layout_execution import Checker, link
from tests.property.layout_world import Request, Worker, make_shape

SOURCE = Request(block_ids=(4, 5, 1, 7), slot=2, chunks=(7,))
DESTINATION = Request(block_ids=(2, 3, 0, 6), slot=1)
SPECULATING = Request(block_ids=(4, 5, 1, 7), slot=2, chunks=(7,), conv_row=2, ssm_row=1)
ACCEPTED = Request(block_ids=(2, 3, 0, 6), slot=1, conv_row=1, ssm_row=2)

GRIDS: dict[str, Callable[[int], Iterator[Case]]] = {"kv": kv_cases, "states": state_cases, "hybrid": hybrid_cases}
COUNTS = {name: {heads: sum(1 for _ in grid(heads)) for heads in HEADS} for name, grid in GRIDS.items()}


def check_all(cases: Iterator[Case]) -> int:
    """Execute each case; how many there were. Sides that cases share are built once."""
    plain, speculating = Checker([(SOURCE, DESTINATION)]), Checker([(SPECULATING, ACCEPTED)])
    sources: dict[object, Worker] = {}
    destinations: dict[object, Worker] = {}
    for src_shape, tp, dst_shape, (dst_tp, dcp) in cases:
        here, there = (src_shape, tp), (dst_shape, dst_tp, dcp)
        if here not in sources:
            sources[here] = Worker(src_shape, tp)
        if there not in destinations:
            destinations[there] = Worker(dst_shape, dst_tp, dcp, name="decode-0")
        checker = speculating if src_shape.num_speculative_tokens else plain
        checker.check(sources[here], destinations[there])
    return plain.num_cases + speculating.num_cases


@pytest.mark.parametrize(
    ("grid", "heads"),
    [(grid, heads) for grid in GRIDS for heads in HEADS],
    ids=[f"{grid}-{heads}-heads-{COUNTS[grid][heads]}-cases" for grid in GRIDS for heads in HEADS],
)
def test_every_topology_reshards_exactly(grid: str, heads: int) -> None:
    """Heads 1..8 x source tp 1..8 x destination tp 1..8 x dcp 1, 2, 4, 8, wherever legal, for all roles, drafts and depths.

    Poison is overwritten everywhere, each byte once and no other, with what slicing the unsharded tensors gives.
    """
    assert check_all(GRIDS[grid](heads)) == COUNTS[grid][heads]


def test_the_grids_hold_what_they_promise() -> None:
    """The number of cases, and the ones that are easily lost: 2 to 3 and back, multi-query, all of dcp, all drafts."""
    assert {name: sum(counts.values()) for name, counts in COUNTS.items()} == {"kv": 800, "states": 348, "hybrid": 182}
    kv = {(heads, tp, cut) for heads in HEADS for _, tp, _, cut in kv_cases(heads)}
    assert {(1, 2, (3, 1)), (1, 3, (2, 1)), (6, 2, (3, 1)), (6, 3, (2, 1)), (1, 1, (8, 8)), (2, 8, (8, 4))} <= kv
    assert {cut[1] for _, _, cut in kv} == {1, 2, 4, 8}
    states = {(heads, tp, cut) for heads in HEADS for _, tp, _, cut in state_cases(heads)}
    assert {(6, 2, (3, 1)), (6, 3, (2, 1)), (8, 8, (1, 1)), (8, 1, (8, 1))} <= states
    assert {cut[1] for heads in HEADS for _, _, _, cut in hybrid_cases(heads)} == {1, 2, 4, 8}


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 2), (2, 1), (2, 3), (3, 2), (2, 6), (6, 2), (3, 6), (6, 6)])
def test_a_model_of_several_layers_with_a_deep_speculation_reshards_exactly(src_tp: int, dst_tp: int) -> None:
    """Layers of both kinds and two draft layers; blocks in opposite orders, chunks of one token, other rows on each side."""
    shape = make_shape(layers="lflf", kv=6, hk=6, hv=12, depth=3, draft=2, dtype=Dtype.BFLOAT16)
    chunks = (1, 2, 10)
    src = Request(block_ids=(8, 7, 6, 5), slot=0, conv_row=2, ssm_row=2, cached=0, chunks=chunks)
    dst = Request(block_ids=(0, 1, 2, 3), slot=2, conv_row=0, ssm_row=3, cached=0, chunks=chunks)
    Checker([(src, dst)]).check(Worker(shape, src_tp), Worker(shape, dst_tp, name="decode-0"))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize(("src_tp", "cut"), [(1, (1, 1)), (1, (2, 1)), (2, (1, 1)), (2, (4, 2))])
def test_every_length_of_the_last_block_is_exact(num_tokens: int, src_tp: int, cut: Cut) -> None:
    """From one token to full blocks, nothing cached, also when blocks lie in one consecutive run."""
    shape = make_shape(layers="fl", kv=2, hk=4, hv=4, draft=1)
    src = Request(block_ids=(1, 2, 3, 4), slot=0, num_tokens=num_tokens, cached=0, chunks=())
    dst = Request(block_ids=(5, 6, 7, 8), slot=0, num_tokens=num_tokens, cached=0, chunks=())
    Checker([(src, dst)]).check(Worker(shape, src_tp), Worker(shape, *cut, name="decode-0"))


@pytest.mark.parametrize("num_heads", HEADS)
def test_replicas_share_the_writing_as_evenly_as_heads_can_be_dealt(num_heads: int) -> None:
    """For every topology: no rank owes more than one head of one layer above another, nor more than one bootstrap; KEY and VALUE share a writer."""
    for whole in (False, True) if num_heads > 1 else (True,):
        shape = make_shape(layers="ff", kv=num_heads, draft=1, draft_whole=whole)
        destinations = [Worker(shape, *cut, name="decode-0") for cut in cuts(num_heads)]
        for tp in kv_sizes(num_heads):
            source = Worker(shape, tp)
            for destination in destinations:
                made = link(source, destination)
                owed, bootstraps = dict.fromkeys(range(tp), 0), dict.fromkeys(range(tp), 0)
                for template in made.templates:
                    if template.part.role is Role.KEY:
                        assert isinstance(template, PagedTemplate)
                        owed[template.part.src_rank] += template.piece.length
                    elif template.part.role is Role.BOOTSTRAP:
                        bootstraps[template.part.src_rank] += 1
                assert max(owed.values()) - min(owed.values()) <= 1
                assert max(bootstraps.values()) - min(bootstraps.values()) <= 1
                keys, values = (
                    [(p.namespace, p.layer, p.src_rank, p.dst_rank) for p in made.parts if p.role is role]
                    for role in (Role.KEY, Role.VALUE)
                )
                assert keys == values


def test_a_draft_body_that_is_whole_on_every_rank_is_sent_once_to_each() -> None:
    """Every destination rank gets all draft heads, each head from one source rank, and all source ranks take part."""
    shape = make_shape(layers="f", kv=4, draft=1, draft_whole=True)
    made = link(Worker(shape, 4), Worker(shape, 2, name="decode-0"))
    drafts = [t for t in made.templates if t.part.namespace is Namespace.DRAFT and t.part.role is Role.KEY]
    assert {template.part.src_rank for template in drafts} == {0, 1, 2, 3}
    for rank in (0, 1):
        pieces = [t.piece for t in drafts if isinstance(t, PagedTemplate) and t.part.dst_rank == rank]
        assert sorted(head for p in pieces for head in range(p.start, p.start + p.length)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("src_depth", "dst_depth"), [(0, 1), (0, 8), (8, 0), (2, 5)])
@pytest.mark.parametrize(("src_tp", "cut"), [(1, (4, 2)), (2, (1, 1)), (4, (2, 1))])
def test_workers_that_guess_more_or_fewer_tokens_reshard_exactly(
    src_depth: int, dst_depth: int, src_tp: int, cut: Cut
) -> None:
    """Slots have rows for as many tokens as their own worker guesses: the state moves from its row there to its row here."""
    src, dst = (
        make_shape(layers="lf", kv=2, hk=4, hv=4, draft=1, depth=depth, draft_whole=depth > 2)
        for depth in (src_depth, dst_depth)
    )
    here = replace(SOURCE, conv_row=src_depth, ssm_row=src_depth)
    there = replace(DESTINATION, conv_row=dst_depth, ssm_row=dst_depth)
    made = Checker([(here, there)]).check(Worker(src, src_tp), Worker(dst, *cut, name="decode-0"))
    assert made.has_drafts


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 3), (3, 1), (2, 6), (8, 8)])
def test_each_rank_gets_the_bootstrap_once(src_tp: int, dst_tp: int) -> None:
    """It is whole everywhere: one source rank writes it for each destination rank, and as many take part as can."""
    shape = make_shape(layers="f", kv=1, draft=1)
    made = link(Worker(shape, src_tp), Worker(shape, dst_tp, name="decode-0"))
    found = [part for part in made.parts if part.role is Role.BOOTSTRAP]
    assert sorted(part.dst_rank for part in found) == list(range(dst_tp))
    assert len({part.src_rank for part in found}) == min(src_tp, dst_tp)
    assert {(part.namespace, part.layer, part.modulus) for part in found} == {(Namespace.DRAFT, 0, 1)}


@pytest.mark.parametrize(("src_draft", "dst_draft"), [(0, 1), (1, 0)])
def test_a_draft_that_one_worker_lacks_stays_behind(src_draft: int, dst_draft: int) -> None:
    """The rest is planned as if there were no draft on either side, and the plan says what was missing."""
    src, dst = (make_shape(layers="lf", kv=2, hk=2, hv=2, draft=draft) for draft in (src_draft, dst_draft))
    made = link(Worker(src, 2), Worker(dst, 1, name="decode-0"))
    assert not made.has_drafts
    assert "draft: " in made.why_no_drafts
    assert "none at the " in made.why_no_drafts
    plain = make_shape(layers="lf", kv=2, hk=2, hv=2)
    alone = link(Worker(plain, 2), Worker(plain, 1, name="decode-0"))
    assert (alone.has_drafts, alone.why_no_drafts) == (False, "")
    assert made.parts == alone.parts


def test_one_layer_and_many_receivers_still_use_all_replicas() -> None:
    """With a single layer the replicas of its head serve different destination ranks."""
    shape = make_shape(layers="f", kv=1)
    made = link(Worker(shape, 4), Worker(shape, 4, name="decode-0"))
    assert {part.src_rank for part in made.parts} == {0, 1, 2, 3}


def test_the_order_of_ranks_does_not_change_the_plan() -> None:
    """Both sides may plan for themselves: equal manifests, in any order, give an equal plan."""
    shape = make_shape(layers="lflf", kv=2, hk=4, hv=4)
    source, destination = Worker(shape, 4), Worker(shape, 2, name="decode-0")
    assert plan(source.manifests()[::-1], destination.manifests()[::-1]) == link(source, destination)


@pytest.mark.parametrize(("src", "dst"), [((1, 2), (0, 1)), ((0, 1), (2, 3)), ((1, 2), (0, 2))])
def test_any_replica_of_a_side_reshards_like_a_worker_of_its_own(src: tuple[int, int], dst: tuple[int, int]) -> None:
    """The (number, count) of data-parallel replicas changes nothing about the parts, and the bytes are exact."""
    shape = make_shape(layers="lf", kv=2, hk=4, hv=4, draft=1)
    source = Worker(shape, 2, dp_rank=src[0], dp_size=src[1])
    destination = Worker(shape, 4, 2, name="decode-0", dp_rank=dst[0], dp_size=dst[1])
    made = Checker([(SOURCE, DESTINATION)]).check(source, destination)
    assert made.templates == link(Worker(shape, 2), Worker(shape, 4, 2, name="decode-0")).templates
