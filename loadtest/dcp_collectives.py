"""Collectives that tell how long they took, and ones that stand for ranks for which there is no core."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from common.engine.collectives.port import Collectives, partition_of
from common.engine.collectives.tensors import sum_into


class Stopwatch:
    """What the calls of a group and of those split from it took: in all, waiting included, and of the thread's processor time."""

    def __init__(self, now_ns: Callable[[], int], cpu_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._cpu_ns = cpu_ns
        self._began_ns = self._began_cpu_ns = 0
        self.spent_ns = self.spent_cpu_ns = 0
        self.num_calls = 0

    def __enter__(self) -> None:
        self._began_ns, self._began_cpu_ns = self._now_ns(), self._cpu_ns()

    def __exit__(self, *_: object) -> None:
        self.spent_cpu_ns += self._cpu_ns() - self._began_cpu_ns
        self.spent_ns += self._now_ns() - self._began_ns
        self.num_calls += 1


class TimedCollectives:
    """`inner`, with every call's time added to `stopwatch`."""

    def __init__(self, inner: Collectives, stopwatch: Stopwatch) -> None:
        self._inner = inner
        self._stopwatch = stopwatch

    @property
    def rank(self) -> int:
        """See `Collectives.rank`."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """See `Collectives.size`."""
        return self._inner.size

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """See `Collectives.all_reduce_sum`."""
        with self._stopwatch:
            self._inner.all_reduce_sum(tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See `Collectives.all_gather`."""
        with self._stopwatch:
            return self._inner.all_gather(tensor, dim)

    def gather_to(self, root: int, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        """See `Collectives.gather_to`."""
        with self._stopwatch:
            return self._inner.gather_to(root, tensor, dim)

    def broadcast(self, root: int, tensor: torch.Tensor) -> None:
        """See `Collectives.broadcast`."""
        with self._stopwatch:
            self._inner.broadcast(root, tensor)

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collectives.exchange`."""
        with self._stopwatch:
            return self._inner.exchange(tensor)

    def barrier(self) -> None:
        """See `Collectives.barrier`. Not timed: steps do not use it."""
        self._inner.barrier()

    def split(self, groups: Sequence[Sequence[int]]) -> TimedCollectives:
        """See `Collectives.split`. The time of both adds up in one place."""
        return TimedCollectives(self._inner.split(groups), self._stopwatch)

    def abort(self, reason: str) -> None:
        """See `Collectives.abort`."""
        self._inner.abort(reason)

    def close(self) -> None:
        """See `Collectives.close`."""
        self._inner.close()


class SimulatedCollectives:
    """Rank 0 of a group whose other ranks are not there: they bring zeros.

    A call copies what a rank of a shared-memory group copies, its own part in and everybody's out, and takes `meeting_ns` more, for
    as long as ranks need to meet. No call waits for a slower rank.
    """

    def __init__(self, size: int, meeting_ns: int, now_ns: Callable[[], int]) -> None:
        self._size = size
        self._meeting_ns = meeting_ns
        self._now_ns = now_ns

    @property
    def rank(self) -> int:
        """See `Collectives.rank`."""
        return 0

    @property
    def size(self) -> int:
        """See `Collectives.size`."""
        return self._size

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """See `Collectives.all_reduce_sum`."""
        slots = self._meet(tensor)
        sum_into(tensor, slots)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See `Collectives.all_gather`."""
        return torch.cat(self._meet(tensor), dim)

    def gather_to(self, root: int, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        """See `Collectives.gather_to`."""
        slots = self._meet(tensor)
        return torch.cat(slots, dim) if root == 0 else None

    def broadcast(self, root: int, tensor: torch.Tensor) -> None:
        """See `Collectives.broadcast`. What another rank would bring is zero."""
        tensor.copy_(self._meet(tensor)[root])

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collectives.exchange`."""
        return torch.stack([slot[0] for slot in self._meet(tensor)])

    def barrier(self) -> None:
        """See `Collectives.barrier`."""
        self._wait()

    def split(self, groups: Sequence[Sequence[int]]) -> SimulatedCollectives:
        """See `Collectives.split`."""
        return SimulatedCollectives(len(partition_of(0, self._size, groups)), self._meeting_ns, self._now_ns)

    def abort(self, reason: str) -> None:
        """See `Collectives.abort`. There is nobody to tell."""

    def close(self) -> None:
        """See `Collectives.close`."""

    def _meet(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        slots = [tensor.clone(), *(torch.zeros_like(tensor) for _ in range(self._size - 1))]
        self._wait()
        return slots

    def _wait(self) -> None:
        """Busy, as ranks are that have a core of their own."""
        until_ns = self._now_ns() + self._meeting_ns
        while self._now_ns() < until_ns:
            pass
