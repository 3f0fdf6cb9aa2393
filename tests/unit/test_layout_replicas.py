"""Workers with several replicas: who belongs together, and that one plan serves all pairs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from common.layout.planner import plan
from common.layout.refusal import PlanRefusedError, PlanRule
from common.layout.replicas import plan_workers, split_replicas
from contracts.manifest import RankManifest
from tests.property.layout_world import Worker, make_shape

Manifests = list[RankManifest]


def replicas(tp: int, dp: int, name: str = "decode-0") -> Manifests:
    """The ranks of a worker of `dp` replicas of `tp` ranks."""
    one = Worker(make_shape(layers="lf", kv=2, hk=2, hv=2), tp, name=name).manifests()
    return [at(rank, dp_rank=dp_rank, dp_size=dp) for dp_rank in range(dp) for rank in one]


def at(manifest: RankManifest, **changes: int) -> RankManifest:
    """The rank with other coordinates."""
    return msgspec.structs.replace(manifest, coordinates=msgspec.structs.replace(manifest.coordinates, **changes))


def test_ranks_are_told_apart_by_replica_in_any_order() -> None:
    """Each replica comes whole, in the order of dp ranks, its ranks in the order of tp ranks."""
    ranks = replicas(tp=2, dp=3)
    split = split_replicas("destination", ranks[::-1])
    assert [[(m.coordinates.dp_rank, m.coordinates.tp_rank) for m in each] for each in split] == [
        [(0, 0), (0, 1)],
        [(1, 0), (1, 1)],
        [(2, 0), (2, 1)],
    ]


def test_one_plan_serves_every_pair_of_replicas() -> None:
    """The copies between any two replicas are those of replicas 0, and the parts name tensor-parallel ranks alone."""
    source, destination = replicas(2, 3, "prefill-0"), replicas(1, 2)
    whole = plan_workers(source, destination)
    for src in split_replicas("source", source):
        for dst in split_replicas("destination", destination):
            assert plan(src, dst).templates == whole.templates
    assert {(part.src_rank, part.dst_rank) for part in whole.parts} == {(0, 0), (1, 0)}


def _with(ranks: Manifests, index: int, **changes: object) -> Manifests:
    return [msgspec.structs.replace(m, **changes) if i == index else m for i, m in enumerate(ranks)]


def _shifted(manifest: RankManifest) -> RankManifest:
    span = manifest.spans[-1]
    place = msgspec.structs.replace(span.place, offset=span.place.offset + 64)
    return msgspec.structs.replace(manifest, spans=(*manifest.spans[:-1], msgspec.structs.replace(span, place=place)))


@pytest.mark.parametrize(
    ("spoil", "rule", "where"),
    [
        pytest.param(lambda _: [], PlanRule.RANKS, "destination", id="no rank at all"),
        pytest.param(lambda m: m[:2], PlanRule.REPLICAS, "destination", id="a replica is missing"),
        pytest.param(lambda m: m[2:], PlanRule.REPLICAS, "destination", id="the first replica is missing"),
        pytest.param(
            lambda m: [*m, at(m[0], dp_rank=2)], PlanRule.REPLICAS, "destination", id="one more than there are"
        ),
        pytest.param(lambda m: m[:3], PlanRule.REPLICAS, "destination replica 1", id="a rank of a replica is missing"),
        pytest.param(
            lambda m: _with(m, 3, num_blocks=5),
            PlanRule.REPLICAS,
            "destination replica 1 rank 1, num_blocks",
            id="fewer blocks",
        ),
        pytest.param(
            lambda m: _with(m, 2, model="other"),
            PlanRule.REPLICAS,
            "destination replica 1 rank 0, model",
            id="another model",
        ),
        pytest.param(
            lambda m: _with(m, 2, incarnation="i9"),
            PlanRule.REPLICAS,
            "destination replica 1 rank 0, incarnation",
            id="another start",
        ),
        pytest.param(
            lambda m: [*m[:3], _shifted(m[3])],
            PlanRule.REPLICAS,
            "destination replica 1 rank 1, spans",
            id="a cache that lies elsewhere",
        ),
    ],
)
def test_replicas_that_are_not_alike_are_refused_by_name(
    spoil: Callable[[Manifests], Manifests], rule: PlanRule, where: str
) -> None:
    """A plan for one replica must never be used for another that is laid out in its own way."""
    with pytest.raises(PlanRefusedError) as caught:
        split_replicas("destination", spoil(replicas(tp=2, dp=2)))
    assert (caught.value.rule, caught.value.where) == (rule, where)
