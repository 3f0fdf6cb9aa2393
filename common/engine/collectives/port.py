"""The collectives port: what the ranks of one worker say to each other inside a step.

Every rank of a group makes the same calls in the same order, with tensors of the same shape and dtype: float32, bfloat16 or
int64, on the CPU unless the adapter says otherwise. Every call waits for the others, for at most the group's timeout.

A group that failed once stays failed: after a timeout, an abort or a peer's death every call on every rank raises
`CollectiveAbortedError`, because nobody can know which ranks took part in the last one. What the tensors hold then is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from contracts.errors import ErrorCode, InvalidValueError, PdmeshError

if TYPE_CHECKING:
    import torch


class CollectiveAbortedError(PdmeshError):
    """The group is unusable: a rank aborted it, died, did not come in time, or entered another collective."""

    code = ErrorCode.WORKER_FAILED


class CollectiveTimeoutError(CollectiveAbortedError):
    """This rank waited for the group's timeout and some rank had not come."""


class Collectives(Protocol):
    """One rank's end of a group. Used by one thread at a time; `abort` may be called from any thread."""

    @property
    def rank(self) -> int:
        """This rank's number in the group: 0 <= rank < size."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` on every rank by the sum over ranks; all ranks hold identical bits afterwards."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors concatenated in rank order along `dim` (0 or the last): a new tensor, the same on every rank."""
        ...

    def gather_to(self, root: int, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        """As `all_gather`, on rank `root` alone; None on the others."""
        ...

    def broadcast(self, root: int, tensor: torch.Tensor) -> None:
        """Replace `tensor` on every rank by rank `root`'s."""
        ...

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give `tensor[i]` to rank i, for every i, and get one row from each: a new tensor whose row i came from rank i.

        `tensor` is `[size, ...]`, a row for each rank of the group.
        """
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """This rank's sub-group. All ranks call it with the same `groups`, which name every rank of this group exactly once.

        The rank's number in the sub-group is its position in its list. Aborting either group aborts both.
        """
        ...

    def abort(self, reason: str) -> None:
        """Fail the group on every rank: the waits of others end with `CollectiveAbortedError`. Idempotent; never blocks."""
        ...

    def close(self) -> None:
        """Leave the group. Idempotent. A peer that waits for this rank afterwards fails, it does not hang."""
        ...


def partition_of(rank: int, size: int, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The group of `groups` that holds `rank`. Raises `InvalidValueError` unless `groups` name each of `size` ranks exactly once."""
    if sorted(member for group in groups for member in group) != list(range(size)):
        raise InvalidValueError(field="groups", value=groups, rule=f"each rank of 0..{size - 1} exactly once")
    return next(tuple(group) for group in groups if rank in group)
