"""What attention to some of the keys gives, and how such parts become the whole.

The base of the logarithm of an LSE is in its type: kernels differ, and a mixed base shows in no shape and in no crash.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, assert_never

import torch

_LN_2: Final = math.log(2.0)


@dataclass(frozen=True, slots=True)
class NaturalLse:
    """Logarithms of sums of exponentials, base e: ln(sum exp(score))."""

    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class BinaryLse:
    """The logarithm of base 2 of the same sums: log2(sum exp(score))."""

    values: torch.Tensor


Lse: TypeAlias = NaturalLse | BinaryLse


def natural(lse: Lse) -> NaturalLse:
    """The same sums with base e. The only place where a base is changed."""
    match lse:
        case NaturalLse():
            return lse
        case BinaryLse():
            return NaturalLse(lse.values * _LN_2)
        case _:
            assert_never(lse)


class Partial(NamedTuple):
    """Attention to some keys: `output [..., D]`, weighted by the softmax over those keys alone, and their LSE `[...]`; fp32.

    A row that saw no key is (0, -inf).
    """

    output: torch.Tensor
    lse: NaturalLse

    def cleared(self, rows: torch.Tensor) -> Partial:
        """The same with `rows`, a mask that broadcasts to the LSE's shape, as if they had seen no key, whatever they hold."""
        output = self.output.masked_fill(rows[..., None], 0.0)
        return Partial(output, NaturalLse(self.lse.values.masked_fill(rows, -torch.inf)))


def merge_partials(parts: Partial) -> Partial:
    """Merge R partial results over disjoint keys: `output [R, ..., D]`, LSE `[R, ...]`.

    The online softmax rule. Rows that saw nothing, or whose LSE is not finite, are cleared first, output included: a NaN times
    zero is a NaN, and one +inf would make every other weight overflow. All empty: (0, -inf).
    """
    outputs, lse = parts.cleared(~parts.lse.values.isfinite())
    highest = lse.values.amax(0)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = (lse.values - highest).exp()
    total = weights.sum(0)
    merged = (outputs * weights[..., None]).sum(0) / total.masked_fill(total == 0, 1.0)[..., None]
    return Partial(merged, NaturalLse(highest + total.log()))


def merge_attended(parts: Partial) -> Partial:
    """`merge_partials` of what attention has given, whose rows without keys are (0, -inf) already.

    An LSE of NaN or +inf then means keys that are broken, not keys that are absent: the row becomes NaN, as it would in one piece,
    instead of an answer that has quietly left those keys out.
    """
    merged = merge_partials(parts)
    broken = ~(parts.lse.values < torch.inf).all(0)
    output = merged.output.masked_fill(broken[..., None], torch.nan)
    return Partial(output, NaturalLse(merged.lse.values.masked_fill(broken, torch.nan)))
