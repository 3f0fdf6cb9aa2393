"""Which heads of a layer a tensor-parallel rank holds."""

from __future__ import annotations

from typing import NamedTuple

from contracts.errors import InvalidValueError


class Shard(NamedTuple):
    """The half-open interval `[start, start + length)` of a logical axis."""

    start: int
    length: int


def kv_shard(num_heads: int, tp_size: int, tp_rank: int) -> Shard:
    """KV heads of a rank: an even share, or, with more ranks than heads, the one head that its group of ranks replicates.

    The ranks that replicate a head are neighbours: rank r holds head `r // (tp_size // num_heads)`, so that a rank's KV
    head is the one that its query heads attend to. Raises `InvalidValueError` unless one of the two numbers divides the other.
    """
    if num_heads >= tp_size:
        return even_shard("num_kv_heads", num_heads, tp_size, tp_rank)
    _check_rank(tp_size, tp_rank)
    return Shard(tp_rank // num_replicas(num_heads, tp_size), 1)


def num_replicas(num_heads: int, tp_size: int) -> int:
    """How many ranks hold the same KV head. Raises `InvalidValueError` for a topology that `kv_shard` refuses."""
    if num_heads < 1:
        raise InvalidValueError(field="num_kv_heads", value=num_heads, rule="1 or more")
    if num_heads >= tp_size:
        return 1
    if tp_size % num_heads:
        rule = f"a divisor or a multiple of the {num_heads} KV heads"
        raise InvalidValueError(field="tp_size", value=tp_size, rule=rule)
    return tp_size // num_heads


def even_shard(name: str, total: int, tp_size: int, tp_rank: int) -> Shard:
    """The rank's even share of `total` heads. Raises `InvalidValueError` when `tp_size` does not divide `total`."""
    _check_rank(tp_size, tp_rank)
    if total < 1:
        raise InvalidValueError(field=name, value=total, rule="1 or more")
    if total % tp_size:
        raise InvalidValueError(field="tp_size", value=tp_size, rule=f"a divisor of {name} = {total}")
    length = total // tp_size
    return Shard(tp_rank * length, length)


def _check_rank(tp_size: int, tp_rank: int) -> None:
    if tp_size < 1:
        raise InvalidValueError(field="tp_size", value=tp_size, rule="1 or more")
    if not 0 <= tp_rank < tp_size:
        raise InvalidValueError(field="tp_rank", value=tp_rank, rule=f"0 to {tp_size - 1}")
