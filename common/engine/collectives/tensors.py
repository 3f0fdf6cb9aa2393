"""What all collectives adapters do with tensors: checking, summing in rank order, concatenating."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import torch

from contracts.errors import InvalidValueError

DTYPES: Final = (torch.float32, torch.bfloat16, torch.int64)


def check_timeout(timeout_s: float) -> float:
    """Return `timeout_s` when it is a positive number of seconds; raise `InvalidValueError` otherwise."""
    if not timeout_s > 0:
        raise InvalidValueError(field="timeout_s", value=timeout_s, rule="more than 0 seconds")
    return timeout_s


def check_tensor(tensor: torch.Tensor, dim: int | None = None) -> None:
    """Raise `InvalidValueError` unless the dtype is supported and `dim` (if given) is the first or the last of the tensor."""
    if tensor.dtype not in DTYPES:
        raise InvalidValueError(field="tensor", value=tensor.dtype, rule="float32, bfloat16 or int64")
    if dim is not None and (tensor.ndim == 0 or dim not in {0, -1, tensor.ndim - 1}):
        rule = f"0 or the last dimension of a tensor with at least one (this one has {tensor.ndim})"
        raise InvalidValueError(field="dim", value=dim, rule=rule)


def check_rows(tensor: torch.Tensor, size: int) -> None:
    """Raise `InvalidValueError` unless the dtype is supported and `tensor` has a row for each rank of a group of `size`."""
    check_tensor(tensor)
    if tensor.ndim == 0 or tensor.shape[0] != size:
        raise InvalidValueError(field="tensor", value=tuple(tensor.shape), rule=f"{size} rows, one for each rank")


def check_root(root: int, size: int) -> None:
    """Raise `InvalidValueError` unless `root` is a rank of a group of `size`."""
    if not 0 <= root < size:
        raise InvalidValueError(field="root", value=root, rule=f"0 to {size - 1}")


def sum_into(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Store the sum of `parts` into `out`, added in order, so that every rank gets the same bits.

    bfloat16 parts are summed in float32 and rounded once. `out` may not share memory with a part.
    """
    if len(parts) == 1:
        out.copy_(parts[0])
    elif out.dtype == torch.bfloat16:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
    else:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)


class Operation(enum.IntEnum):
    """What kind of collective a rank has entered."""

    ALL_REDUCE_SUM = 1
    ALL_GATHER = 2
    GATHER_TO = 3
    BROADCAST = 4
    EXCHANGE = 5


def tag_of(operation: Operation, tensor: torch.Tensor, dim: int = 0, root: int = 0) -> int:
    """A u32 that tells this call from another: ranks compare them, so that diverging ranks fail instead of mixing bytes."""
    last = dim not in {0, -tensor.ndim}
    # Integers hash alike in every process, and a tuple's hash is a tenth of the time that formatting would take.
    return hash((operation, root, last, DTYPES.index(tensor.dtype), *tensor.shape)) & 0xFFFFFFFF
