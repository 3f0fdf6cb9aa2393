"""Digests of both sides, held against each other."""

from __future__ import annotations

from common.worker.core.verification import differences
from contracts.handoff import PartDigest
from contracts.manifest import Namespace, Role


def _digest(role: Role, rank: int, digest: str) -> PartDigest:
    return PartDigest(namespace=Namespace.TARGET, role=role, layer=2, destination_rank=rank, digest=digest)


def test_equal_digests_differ_in_nothing() -> None:
    """In whatever order they are told."""
    one, other = _digest(Role.KEY, 0, "aa"), _digest(Role.SSM, 1, "bb")
    assert differences((one, other), (other, one)) == ()
    assert differences((), ()) == ()


def test_each_difference_is_named() -> None:
    """Another value, one that is missing, and one too many: each with its cache and rank."""
    expected = (_digest(Role.KEY, 0, "aa"), _digest(Role.CONV, 1, "cc"))
    found = (_digest(Role.KEY, 0, "ab"), _digest(Role.SSM, 1, "dd"))
    assert differences(expected, found) == (
        "target conv of layer 2 on rank 1 was computed, and is not there",
        "target key of layer 2 on rank 0 is ab, and was computed as aa",
        "target ssm of layer 2 on rank 1 is there, and was not computed",
    )
