"""The legal ways to cut caches over ranks, enumerated: every topology of both sides for a number of heads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from common.layout.shape import CacheShape
from contracts.manifest import Dtype
from tests.property.layout_world import make_shape

HEADS = range(1, 9)
SIZES = range(1, 9)
DEPTHS = (0, 2)

Cut = tuple[int, int]
"""Tensor-parallel and context-parallel size."""
Case = tuple[CacheShape, int, CacheShape, Cut]
"""Shape and tensor-parallel size of the source; shape and cut of the destination."""


def kv_sizes(num_heads: int) -> list[int]:
    """Tensor-parallel sizes 1 to 8 over which KV heads can be cut or replicated."""
    return [tp for tp in SIZES if num_heads % tp == 0 or tp % num_heads == 0]


def cuts(num_heads: int) -> list[Cut]:
    """The same with every context-parallel size that a destination may have."""
    return [(tp, dcp) for tp in kv_sizes(num_heads) for dcp in (1, 2, 4, 8) if max(tp // num_heads, 1) % dcp == 0]


def state_sizes(num_key_heads: int) -> list[int]:
    """Tensor-parallel sizes 1 to 8 over which conv and recurrent states can be cut."""
    return [tp for tp in SIZES if num_key_heads % tp == 0]


def kv_cases(num_heads: int) -> Iterator[Case]:
    """KEY and VALUE alone: without a draft, and with one that is sharded or whole on either side (the same with one head)."""
    plain = make_shape(layers="f", kv=num_heads)
    modes = (False, True) if num_heads > 1 else (True,)
    drafts = [make_shape(layers="f", kv=num_heads, depth=2, draft=1, draft_whole=whole) for whole in modes]
    for src, dst in ((plain, plain), *product(drafts, drafts)):
        for tp, cut in product(kv_sizes(num_heads), cuts(num_heads)):
            yield src, tp, dst, cut


def state_cases(num_key_heads: int) -> Iterator[Case]:
    """CONV and SSM alone, with one to three value heads a key head, with and without speculation."""
    for ratio, depth in product((1, 2, 3), DEPTHS):
        shape = make_shape(layers="l", hk=num_key_heads, hv=ratio * num_key_heads, depth=depth)
        for src_tp, dst_tp in product(state_sizes(num_key_heads), repeat=2):
            yield shape, src_tp, shape, (dst_tp, 1)


def hybrid_cases(num_heads: int) -> Iterator[Case]:
    """All roles, a whole and a sharded draft among them, in one region of 16-bit caches and 32-bit states."""
    for num_key_heads in (6, 8):
        src, dst = (
            make_shape(
                layers="lf",
                kv=num_heads,
                hk=num_key_heads,
                hv=2 * num_key_heads,
                depth=2,
                draft=1,
                draft_whole=whole,
                dtype=Dtype.BFLOAT16,
            )
            for whole in (True, False)
        )
        for tp, cut in product(kv_sizes(num_heads), cuts(num_heads)):
            if num_key_heads % tp == num_key_heads % cut[0] == 0:
                yield src, tp, dst, cut
