"""Into how many ranks a model can be cut, and how many of them may share the blocks of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from common.engine.model.config import ModelConfig
from contracts.errors import InvalidValueError

_USUAL: Final = (1, 2, 4, 8, 16, 32)


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A legal number of ranks, with every context-parallel size that it allows. `kv_heads_per_rank` are whole heads.

    `num_replicas` ranks hold the same KV head; a context-parallel group is made of these.
    """

    tp: int
    dcp: tuple[int, ...]
    kv_heads_per_rank: int
    num_replicas: int


class RefusedCut(msgspec.Struct, frozen=True, kw_only=True):
    """A cut that is not legal, and the rule that it breaks. Without `dcp` the number of ranks itself is not."""

    tp: int
    dcp: int | None
    rule: str


class Cuts(msgspec.Struct, frozen=True, kw_only=True):
    """The cuts that were looked at, ascending."""

    legal: tuple[Cut, ...]
    refused: tuple[RefusedCut, ...]


def cuts_of(config: ModelConfig, asked: Iterable[int] = ()) -> Cuts:
    """Judge the usual sizes, every divisor of the query heads, and those `asked` for; a `dcp` above its `tp` is left out."""
    heads = config.num_attention_heads
    sizes = {*_USUAL, *asked, *(size for size in range(1, heads + 1) if heads % size == 0)}
    legal: list[Cut] = []
    refused: list[RefusedCut] = []
    for tp in sorted(sizes):
        try:
            config.check_tensor_parallel(tp)
        except InvalidValueError as error:
            refused.append(RefusedCut(tp=tp, dcp=None, rule=error.rule_text))
            continue
        allowed = []
        for dcp in sorted(size for size in sizes if size <= tp):
            try:
                config.check_context_parallel(tp, dcp)
            except InvalidValueError as error:
                refused.append(RefusedCut(tp=tp, dcp=dcp, rule=error.rule_text))
            else:
                allowed.append(dcp)
        kv_heads = config.num_key_value_heads
        cut = Cut(
            tp=tp,
            dcp=tuple(allowed),
            kv_heads_per_rank=max(1, kv_heads // tp),
            num_replicas=max(1, tp // kv_heads),
        )
        legal.append(cut)
    return Cuts(legal=tuple(legal), refused=tuple(refused))
