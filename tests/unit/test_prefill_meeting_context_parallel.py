"""A prefill worker meets decode workers whose ranks share sequences: what fits is planned, the rest is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from common.engine.fake.model import fake_shape
from common.layout.refusal import PlanRefusedError
from common.layout.region import lay_out
from contracts.manifest import Coordinates, RankManifest
from contracts.workers import WorkerDescription
from services.prefill.meeting import MetPeer, compare

replace = msgspec.structs.replace


def manifests(worker_id: str, tp: int, dcp: int = 1, **sizes: Any) -> list[RankManifest]:
    """The ranks of a worker of fake engines."""
    shape = fake_shape(num_blocks=8, num_slots=2, **sizes)
    places = [Coordinates(tp_rank=rank, tp_size=tp, dcp_rank=rank % dcp, dcp_size=dcp) for rank in range(tp)]
    return [lay_out(shape, at).manifest(worker_id=worker_id, incarnation="i0", model="fake") for at in places]


def meet(source: list[RankManifest], destination: list[RankManifest]) -> MetPeer:
    """What a prefill worker makes of a decode worker that describes itself so."""
    described = tuple(
        WorkerDescription(
            worker_id="decode-0", incarnation="i0", num_ranks=len(destination), manifest=each, region=None
        )
        for each in destination
    )
    return compare([(each, None) for each in source], described)


def test_a_receiver_with_dcp_is_planned_for() -> None:
    """Each rank of a group gets its share of the blocks: a token moves as many bytes as to ranks that hold whole heads."""
    met = meet(manifests("prefill-0", 2), manifests("decode-0", 4, dcp=2))
    whole = meet(manifests("prefill-0", 2), manifests("decode-0", 2))
    assert met.terms.topology == "tp2 -> tp4 dcp2"
    assert met.terms.token_bytes == whole.terms.token_bytes
    assert {(part.modulus, part.residue) for part in met.plan.parts if part.modulus > 1} == {(2, 0), (2, 1)}


def _regrouped(ranks: list[RankManifest], dcp: int) -> list[RankManifest]:
    """What ranks would say that were put into groups without a look at their heads."""
    return [
        replace(each, coordinates=replace(each.coordinates, dcp_size=dcp, dcp_rank=rank % dcp))
        for rank, each in enumerate(ranks)
    ]


@pytest.mark.parametrize(
    ("source", "destination", "rule", "text"),
    [
        (
            lambda: manifests("prefill-0", 2),
            lambda: _regrouped(manifests("decode-0", 2), 2),
            "dcp_ranks_hold_one_kv_head",
            "set dcp of the decode worker, which is 2, to a divisor of 1",
        ),
        (
            lambda: manifests("prefill-0", 4, dcp=2),
            lambda: manifests("decode-0", 4, dcp=2),
            "context_parallel_destination_only",
            "dcp: 2 at the prefill worker, 2 at the decode worker (rule context_parallel_destination_only: set dcp=1 at the prefill worker",
        ),
        (
            lambda: [replace(each, interleave=32) for each in manifests("prefill-0", 2)],
            lambda: manifests("decode-0", 4, dcp=2),
            "interleave_is_one_block",
            "interleave: 32 at the prefill worker, 16 at the decode worker",
        ),
        (
            lambda: [replace(each, interleave=32) for each in manifests("prefill-0", 2)],
            lambda: [replace(each, interleave=32) for each in manifests("decode-0", 4, dcp=2)],
            "interleave_is_one_block",
            "expected interleave = block_size = 16, found 32",
        ),
        (
            lambda: manifests("prefill-0", 2),
            lambda: manifests("decode-0", 4, dcp=2, block_size=32),
            "same_block_size",
            "block_size: 16 at the prefill worker, 32 at the decode worker",
        ),
    ],
    ids=["heads", "sender", "interleave", "alike but not a block", "block size"],
)
def test_what_does_not_fit_is_refused_by_name(
    source: Callable[[], list[RankManifest]], destination: Callable[[], list[RankManifest]], rule: str, text: str
) -> None:
    """Before any request: the rule, both values, and what to change."""
    with pytest.raises(PlanRefusedError) as caught:
        meet(source(), destination())
    assert caught.value.rule == rule
    assert text in caught.value.message
