"""Drafts that are models of their own: several layers, other KV heads than the target's, through planner, bytes and ledger."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from common.engine.drafts.drafter import Advance
from common.engine.ranks.cache import LayerCaches
from common.layout.planner import ReshardPlan
from common.layout.refusal import PlanRefusedError
from common.layout.region import lay_out
from contracts.errors import InvalidValueError
from contracts.handoff import PartDone, PartsReport
from contracts.manifest import Coordinates, Namespace, Role
from contracts.requests import SamplingParams
from services.broker.core.ledger import Ledger
from tests.property.fake_block_drafter import FakeBlockDrafter
from tests.property.layout_cases import Cut
from tests.property.layout_execution import Checker, Transfer, link, parts_of
from tests.property.layout_world import Request, Worker, make_shape

SOURCE = Request(block_ids=(4, 5, 1, 7), slot=2, cached=0, chunks=(7,))
DESTINATION = Request(block_ids=(2, 3, 0, 6), slot=1, cached=0, chunks=(7,))
TEXT = (11, 12, 13, 14, 15, 12, 13, 16, 11, 14, 16)
NUM_LAYERS = 3


def worker(tp: int, cut_dcp: int = 1, *, whole: bool = False, name: str = "prefill-0", dim: int = 5) -> Worker:
    """A target of two KV heads of two elements, and a draft of three layers with four heads of its own."""
    shape = make_shape(
        layers="lf", kv=2, hk=4, hv=4, draft=NUM_LAYERS, draft_whole=whole, draft_heads=(4, dim), depth=2
    )
    return Worker(shape, tp, cut_dcp, name=name)


@pytest.mark.parametrize(("source_whole", "destination_whole"), list(product((False, True), repeat=2)))
@pytest.mark.parametrize(("tp", "cut"), [(1, (1, 1)), (2, (1, 1)), (1, (4, 1)), (4, (2, 1)), (2, (4, 1))])
def test_every_layer_of_a_draft_reshards_exactly(
    tp: int, cut: Cut, source_whole: bool, destination_whole: bool
) -> None:
    """Each byte once, and all of them; the draft's heads are cut by their own number."""
    made = Checker([(SOURCE, DESTINATION)]).check(
        worker(tp, whole=source_whole), worker(*cut, whole=destination_whole, name="decode-0")
    )
    layers = {part.layer for part in made.parts if part.namespace is Namespace.DRAFT and part.role is Role.KEY}
    assert layers == set(range(NUM_LAYERS))


def test_groups_that_share_blocks_must_hold_the_same_heads_of_the_draft() -> None:
    """Four ranks hold two target heads twice, so two may share; of four draft heads each has its own. Whole ones are the same on all."""
    with pytest.raises(InvalidValueError, match=r"dcp_size: 2 .* a divisor of 1, the ranks that replicate a KV head"):
        worker(4, 2)
    Checker([(SOURCE, DESTINATION)]).check(worker(2), worker(4, 2, whole=True, name="decode-0"))


def test_a_draft_of_the_same_name_with_other_heads_is_refused() -> None:
    """By name: nothing of it would fit."""
    with pytest.raises(PlanRefusedError, match="rule same_unit, draft/key/0/whole"):
        link(worker(2), worker(1, name="decode-0", dim=6))


def advance(request: Request, start: int, token_ids: Sequence[int], next_token: int | None) -> Advance:
    """What a step tells of the sequence on one side."""
    return Advance(
        seq=0,
        block_ids=request.block_ids,
        start=start,
        token_ids=token_ids,
        next_token=next_token,
        first_row=0,
        num_drafts=4,
        sampling=SamplingParams(max_tokens=9, seed=1),
        num_prompt_tokens=len(TEXT),
    )


def drafters(side: Worker) -> list[FakeBlockDrafter]:
    """One for each rank, over its own memory."""
    return [
        FakeBlockDrafter(LayerCaches(rank, region.data), side.shape.block_size)
        for rank, region in zip(side.ranks, side.regions, strict=True)
    ]


def guesses(side: Worker, step: Advance) -> list[list[int]]:
    """Those of each rank."""
    hidden = torch.zeros(len(step.token_ids), side.shape.hidden_size)
    return [drafter.advance(hidden, [step])[0] for drafter in drafters(side)]


def ends_closed(made: ReshardPlan) -> bool:
    """Whether the broker's ledger of the whole prompt closes once every planned part was reported."""
    ledger = Ledger.open(made.parts, num_cached_tokens=0, num_prompt_tokens=len(TEXT), block_size=3, pulled=())
    for source in {part.src_rank for part in made.parts}:
        assert not ledger.closed
        parts = tuple(
            PartDone(
                namespace=part.namespace,
                role=part.role,
                layer=part.layer,
                destination_rank=part.dst_rank,
                ranges=ledger.owed(part),
            )
            for part in made.parts
            if part.src_rank == source
        )
        ledger = ledger.take(
            PartsReport(
                handoff_id="h",
                incarnation="i",
                source_rank=source,
                revision=1,
                parts=parts,
                num_bytes=1,
                push_ms=1.0,
            )
        )
    return ledger.closed


@pytest.mark.parametrize(("tp", "destination_tp"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_guesses_go_on_behind_a_handoff_as_if_there_had_been_none(tp: int, destination_tp: int) -> None:
    """The draft's cache is all that its guesses come from: on every rank they are those of a worker that computed all of it."""
    source, destination = worker(tp), worker(destination_tp, name="decode-0")
    alone = worker(1, name="mixed-0")
    assert guesses(source, advance(SOURCE, 0, TEXT, None)) == [[]] * tp
    guesses(alone, advance(DESTINATION, 0, TEXT, None))
    made = link(source, destination)
    Transfer(source, destination, [(SOURCE, DESTINATION)]).run(parts_of(made.templates))
    assert ends_closed(made)
    first = advance(DESTINATION, len(TEXT), (12,), 13)
    expected = guesses(alone, first)[0]
    assert expected == [16, 11, 14, 16]
    assert guesses(destination, first) == [expected] * destination_tp


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_layer_of_the_draft_that_stays_behind_is_noticed(layer: int) -> None:
    """A planted fault: one layer is not moved, and nothing can be guessed from the others."""
    source, destination = worker(2), worker(1, name="decode-0")
    guesses(source, advance(SOURCE, 0, TEXT, None))
    moved = [
        template
        for template in link(source, destination).templates
        if (template.part.namespace, template.part.layer) != (Namespace.DRAFT, layer)
    ]
    Transfer(source, destination, [(SOURCE, DESTINATION)]).run(parts_of(moved))
    assert guesses(destination, advance(DESTINATION, len(TEXT), (12,), 13)) == [[]]


def test_a_draft_may_have_fewer_heads_than_the_target() -> None:
    """One head, held by every rank."""
    shape = make_shape(layers="f", kv=4, draft=2, draft_heads=(1, 6))
    held = lay_out(shape, Coordinates(tp_rank=3, tp_size=4))
    assert held.cache(Role.KEY, 0, Namespace.DRAFT).shape == (9, 1, 3, 6)
    assert held.cache(Role.KEY, 0).shape == (9, 1, 3, 2)
    Checker([(SOURCE, DESTINATION)]).check(Worker(shape, 4), Worker(shape, 2, name="decode-0"))
