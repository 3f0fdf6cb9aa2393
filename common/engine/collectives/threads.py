"""Collectives between threads of one process: for tests. Eight thread-ranks are five times slower than eight processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import torch

from common.engine.collectives.port import CollectiveAbortedError, CollectiveTimeoutError, partition_of
from common.engine.collectives.tensors import (
    Operation,
    check_root,
    check_rows,
    check_tensor,
    check_timeout,
    sum_into,
    tag_of,
)
from contracts.errors import InvalidValueError


class ThreadGroup:
    """What the threads of one group share. Make one, give it to every thread, and call `join` there."""

    def __init__(self, size: int, *, timeout_s: float) -> None:
        """`size` ranks; `timeout_s` bounds every wait."""
        if size < 1:
            raise InvalidValueError(field="size", value=size, rule="1 rank or more")
        self.size: Final = size
        self.timeout_s: Final = check_timeout(timeout_s)
        self.changed: Final = threading.Condition()
        # Slots are double-buffered by parity, as in shared memory: one meeting a collective is enough.
        self.slots: Final[tuple[list[torch.Tensor | None], ...]] = ([None] * size, [None] * size)
        self.tags: Final = ([0] * size, [0] * size)
        self.arrived: Final = [0] * size
        self.left: Final = [False] * size
        self.family: list[ThreadGroup] = [self]
        self.children: Final[dict[tuple[int, tuple[int, ...]], ThreadGroup]] = {}
        self.reason: str | None = None

    def join(self, rank: int) -> ThreadCollectives:
        """Rank `rank`'s end of the group."""
        if not 0 <= rank < self.size:
            raise InvalidValueError(field="rank", value=rank, rule=f"0 to {self.size - 1}")
        return ThreadCollectives(self, rank)

    def child(self, number: int, members: tuple[int, ...]) -> ThreadGroup:
        """The sub-group of the `number`-th split that `members` share."""
        with self.changed:
            child = self.children.get((number, members))
            if child is None:
                child = self.children[number, members] = ThreadGroup(len(members), timeout_s=self.timeout_s)
                self.family.append(child)
                child.family = self.family
                child.reason = self.reason
            return child

    def abort(self, reason: str) -> None:
        """Fail this group and all groups it is split from or into. Idempotent: the first reason stays."""
        for group in tuple(self.family):
            with group.changed:
                group.reason = reason if group.reason is None else group.reason
                group.changed.notify_all()


class ThreadCollectives:
    """One thread's end of a `ThreadGroup`. See `port.Collectives` for what callers may rely on."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        """Use `ThreadGroup.join`."""
        self._group = group
        self._rank = rank
        self._generation = 0
        self._sub_groups: list[ThreadCollectives] = []

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._group.size

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by the sum over ranks, added in rank order; bfloat16 is summed in float32 and rounded once."""
        check_tensor(tensor)
        parts = self._meet(tag_of(Operation.ALL_REDUCE_SUM, tensor), tensor)
        total = torch.empty(tensor.shape, dtype=tensor.dtype)
        sum_into(total, parts)
        tensor.copy_(total)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors concatenated in rank order along `dim` (0 or the last)."""
        check_tensor(tensor, dim)
        return torch.cat(self._meet(tag_of(Operation.ALL_GATHER, tensor, dim), tensor), dim)

    def gather_to(self, root: int, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        """As `all_gather`, on rank `root` alone; None on the others."""
        check_tensor(tensor, dim)
        check_root(root, self.size)
        parts = self._meet(tag_of(Operation.GATHER_TO, tensor, dim, root), tensor)
        return torch.cat(parts, dim) if self._rank == root else None

    def broadcast(self, root: int, tensor: torch.Tensor) -> None:
        """Replace `tensor` on every rank by rank `root`'s."""
        check_tensor(tensor)
        check_root(root, self.size)
        tensor.copy_(self._meet(tag_of(Operation.BROADCAST, tensor, 0, root), tensor)[root])

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give each rank its row; row i of the result came from rank i."""
        check_rows(tensor, self.size)
        return torch.stack([part[self._rank] for part in self._meet(tag_of(Operation.EXCHANGE, tensor), tensor)])

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._meet(0, torch.empty(0))

    def split(self, groups: Sequence[Sequence[int]]) -> ThreadCollectives:
        """This rank's sub-group."""
        mine = partition_of(self._rank, self.size, groups)
        child = self._group.child(len(self._sub_groups), mine).join(mine.index(self._rank))
        self._sub_groups.append(child)
        return child

    def abort(self, reason: str) -> None:
        """Fail the group, the groups it was split from and into, on every rank."""
        self._group.abort(f"rank {self._rank}: {reason}")

    def close(self) -> None:
        """Leave the group, and those that were split from it."""
        for sub_group in self._sub_groups:
            sub_group.close()
        with self._group.changed:
            self._group.left[self._rank] = True
            self._group.changed.notify_all()

    def _meet(self, tag: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Hand in `tensor`, wait until every rank has, and return what all handed in. A failure is the whole family's."""
        try:
            return self._meet_here(tag, tensor)
        except CollectiveAbortedError as error:
            self._group.abort(self._group.reason or error.message)
            raise

    def _meet_here(self, tag: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        group = self._group
        self._generation = generation = self._generation + 1
        slots, tags = group.slots[generation & 1], group.tags[generation & 1]
        with group.changed:
            self._check_not_aborted()
            slots[self._rank] = tensor.clone()
            tags[self._rank] = tag
            group.arrived[self._rank] = generation
            group.changed.notify_all()
            if not group.changed.wait_for(lambda: self._missing() is None or self._hopeless(), group.timeout_s):
                missing = self._missing()
                group.reason = group.reason or f"waited {group.timeout_s} s for rank {missing}"
                group.changed.notify_all()
                raise CollectiveTimeoutError(f"rank {missing} did not come within {group.timeout_s} s")
            if self._missing() is not None:
                self._check_not_aborted()
                group.reason = f"rank {self._missing()} has left the group"
                self._check_not_aborted()
            if any(other != tag for other in tags):
                group.reason = group.reason or "the ranks entered different collectives, or with another shape or dtype"
                group.changed.notify_all()
                self._check_not_aborted()
            return [part for part in slots if part is not None]

    def _missing(self) -> int | None:
        """The first rank that has not come to this generation; None when all have."""
        arrived = self._group.arrived
        return next((rank for rank, count in enumerate(arrived) if count < self._generation), None)

    def _hopeless(self) -> bool:
        missing = self._missing()
        return self._group.reason is not None or (missing is not None and self._group.left[missing])

    def _check_not_aborted(self) -> None:
        if self._group.reason is not None:
            raise CollectiveAbortedError(f"the group was aborted: {self._group.reason}")
