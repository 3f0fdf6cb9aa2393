"""Workers with several replicas: one plan serves each pair of replicas, because all replicas of a worker are laid out alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from common.layout.planner import ReshardPlan, plan
from common.layout.refusal import PlanRefusedError, PlanRule
from contracts.manifest import RankManifest

Replica = tuple[RankManifest, ...]
"""The manifests of one replica in the order of their tensor-parallel rank."""


def split_replicas(side: str, manifests: Sequence[RankManifest]) -> tuple[Replica, ...]:
    """All ranks of all replicas of one worker, in any order, by replica. Each replica's ranks are checked by `plan`.

    Raises `PlanRefusedError` when a replica is missing, or laid out in another way than the first one.
    """
    if not manifests:
        raise PlanRefusedError(PlanRule.RANKS, where=side, expected="at least one rank", actual="none")
    found: dict[int, list[RankManifest]] = {}
    for manifest in manifests:
        found.setdefault(manifest.coordinates.dp_rank, []).append(manifest)
    expected = list(range(manifests[0].coordinates.dp_size))
    if sorted(found) != expected:
        raise PlanRefusedError(PlanRule.REPLICAS, where=side, expected=f"replicas {expected}", actual=sorted(found))
    replicas = tuple(
        tuple(sorted(found[number], key=lambda manifest: manifest.coordinates.tp_rank)) for number in expected
    )
    for number, replica in enumerate(replicas):
        _check_alike(f"{side} replica {number}", replicas[0], replica)
    return replicas


def plan_workers(source: Sequence[RankManifest], destination: Sequence[RankManifest]) -> ReshardPlan:
    """The plan from any replica of one worker to any replica of another, given all ranks of both in any order.

    Raises `PlanRefusedError`: see `split_replicas` and `common.layout.planner.plan`.
    """
    return plan(split_replicas("source", source)[0], split_replicas("destination", destination)[0])


def _check_alike(where: str, first: Replica, other: Replica) -> None:
    if len(other) != len(first):
        raise PlanRefusedError(PlanRule.REPLICAS, where=where, expected=f"{len(first)} ranks", actual=len(other))
    for wanted, manifest in zip(first, other, strict=True):
        for field in RankManifest.__struct_fields__:
            expected, actual = _shared(wanted, field), _shared(manifest, field)
            if expected != actual:
                at = f"{where} rank {manifest.coordinates.tp_rank}, {field}"
                if isinstance(expected, tuple) and isinstance(actual, tuple):
                    expected, actual = next(pair for pair in zip_longest(expected, actual) if pair[0] != pair[1])
                raise PlanRefusedError(PlanRule.REPLICAS, where=at, expected=expected, actual=actual)


def _shared(manifest: RankManifest, field: str) -> object:
    """A field without what differs between replicas."""
    value = getattr(manifest, field)
    return msgspec.structs.replace(value, dp_rank=0) if field == "coordinates" else value
