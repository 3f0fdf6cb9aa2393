"""Whether the cache that has arrived is the cache that was computed. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.handoff import PartDigest


def differences(expected: Iterable[PartDigest], found: Iterable[PartDigest]) -> tuple[str, ...]:
    """In words, each cache of a destination rank whose digests differ, or that only one side knows; empty when all agree."""
    wanted, held = ({_name(each): each.digest for each in side} for side in (expected, found))
    told = []
    for name in sorted(wanted.keys() | held.keys()):
        namespace, role, layer, rank = name
        what = f"{namespace} {role} of layer {layer} on rank {rank}"
        if name not in held:
            told.append(f"{what} was computed, and is not there")
        elif name not in wanted:
            told.append(f"{what} is there, and was not computed")
        elif wanted[name] != held[name]:
            told.append(f"{what} is {held[name]}, and was computed as {wanted[name]}")
    return tuple(told)


def _name(each: PartDigest) -> tuple[str, str, int, int]:
    return (str(each.namespace), str(each.role), each.layer, each.destination_rank)
