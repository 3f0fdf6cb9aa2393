"""Collectives over `torch.distributed`: gloo between hosts, nccl or hccl between accelerators.

The backend cannot be told to give up, so waits are cut into slices, and between two slices a rank looks for a key that an
aborting rank leaves in the group's store. After a failure the operation may still be running inside the backend: it keeps its
tensors alive, and the group is never used again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from common.engine.collectives.port import CollectiveAbortedError, CollectiveTimeoutError, partition_of
from common.engine.collectives.tensors import check_root, check_rows, check_tensor, check_timeout

_SLICE_S: Final = 0.05
_ABORT_KEY: Final = "pdmesh-collectives-aborted"


class _Fate:
    """Whether a group, or one that it was split from or into, has failed; known to all ranks through the store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.reason: str | None = None

    def look(self) -> str | None:
        """The reason of the first failure that this rank knows of."""
        if self.reason is None:
            with contextlib.suppress(RuntimeError):
                if self.store.check([_ABORT_KEY]):
                    self.reason = self.store.get(_ABORT_KEY).decode(errors="replace")
        return self.reason

    def fail(self, reason: str) -> None:
        """Record a failure and leave word for the others."""
        if self.reason is None:
            self.reason = reason
            with contextlib.suppress(RuntimeError):  # the store may have died with its host
                self.store.set(_ABORT_KEY, reason)


class DistributedCollectives:
    """One rank's end of a `torch.distributed` group. See `port.Collectives` for what callers may rely on.

    A sum has identical bits on all ranks, but not those of another adapter or group size; bfloat16 is summed as the backend does.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        fate: _Fate,
        *,
        timeout_s: float,
        now: Callable[[], float],
        whole: bool,
    ) -> None:
        """Use `join`, or `split` of another group."""
        self._group = group
        self._ranks = tuple(ranks)
        self._rank = dist.get_rank(group)
        self._fate = fate
        self._timeout_s = check_timeout(timeout_s)
        self._now = now
        self._whole = whole
        self._closed = False

    @classmethod
    def join(
        cls,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        now: Callable[[], float],
        backend: str = "gloo",
    ) -> DistributedCollectives:
        """Make this process rank `rank` of `size`; waits for the others, for `timeout_s`. One group a process.

        `store` is where the ranks find each other (`dist.TCPStore` between hosts). Raises `CollectiveTimeoutError`.
        """
        check_timeout(timeout_s)
        try:
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            raise CollectiveTimeoutError(f"the {size} ranks did not meet within {timeout_s} s: {error}") from error
        world = dist.group.WORLD
        if world is None:
            raise CollectiveAbortedError("torch.distributed did not make a group")
        return cls(world, range(size), _Fate(store), timeout_s=timeout_s, now=now, whole=True)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self._ranks)

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` on every rank by the sum over ranks."""
        check_tensor(tensor)
        flat = tensor.contiguous()
        self._wait(lambda: dist.all_reduce(flat, group=self._group, async_op=True))
        if flat is not tensor:
            tensor.copy_(flat)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors concatenated in rank order along `dim` (0 or the last)."""
        check_tensor(tensor, dim)
        parts = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for _ in self._ranks]
        self._wait(lambda: dist.all_gather(parts, tensor.contiguous(), group=self._group, async_op=True))
        return torch.cat(parts, dim)

    def gather_to(self, root: int, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        """As `all_gather`, on rank `root` alone; None on the others."""
        check_tensor(tensor, dim)
        check_root(root, self.size)
        parts = None
        if self._rank == root:
            parts = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for _ in self._ranks]
        self._wait(lambda: dist.gather(tensor.contiguous(), parts, group=self._group, async_op=True, group_dst=root))
        return None if parts is None else torch.cat(parts, dim)

    def broadcast(self, root: int, tensor: torch.Tensor) -> None:
        """Replace `tensor` on every rank by rank `root`'s."""
        check_tensor(tensor)
        check_root(root, self.size)
        flat = tensor.contiguous()
        self._wait(lambda: dist.broadcast(flat, group=self._group, async_op=True, group_src=root))
        if flat is not tensor:
            tensor.copy_(flat)

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give each rank its row; row i of the result came from rank i."""
        check_rows(tensor, self.size)
        rows = tensor.contiguous()
        received = torch.empty_like(rows)
        self._wait(lambda: dist.all_to_all_single(received, rows, group=self._group, async_op=True))
        return received

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._wait(lambda: dist.barrier(group=self._group, async_op=True))

    def split(self, groups: Sequence[Sequence[int]]) -> DistributedCollectives:
        """This rank's sub-group; waits for its members."""
        mine = partition_of(self._rank, self.size, groups)
        members = [self._ranks[place] for place in mine]
        timeout = timedelta(seconds=self._timeout_s)
        self._check()
        try:
            # sort_ranks is False: a rank's number in the sub-group is its position in the list.
            group = dist.new_group(members, timeout=timeout, use_local_synchronization=True, sort_ranks=False)
        except RuntimeError as error:
            self._fate.fail(f"rank {self._rank}: {error}")
            raise CollectiveAbortedError(f"the sub-group {members} could not be made: {error}") from error
        return DistributedCollectives(group, members, self._fate, timeout_s=self._timeout_s, now=self._now, whole=False)

    def abort(self, reason: str) -> None:
        """Fail the group, and those it was split from and into, on every rank."""
        self._fate.fail(f"rank {self._rank}: {reason}")

    def close(self) -> None:
        """Leave the group; a sub-group is left with the group it was split from."""
        if self._whole and not self._closed and dist.is_initialized():
            dist.destroy_process_group()
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise CollectiveAbortedError("this rank has left the group")
        if self._fate.reason is not None:
            raise CollectiveAbortedError(f"the group was aborted: {self._fate.reason}")

    def _wait(self, start: Callable[[], dist.Work | None]) -> None:
        self._check()
        try:
            work = start()
            deadline = self._now() + self._timeout_s
            while work is not None and not self._ended(work, min(_SLICE_S, deadline - self._now())):
                if self._fate.look() is not None:
                    self._check()
                if self._now() >= deadline:
                    self._fate.fail(f"rank {self._rank} waited {self._timeout_s} s for a peer")
                    raise CollectiveTimeoutError(f"a peer of rank {self._rank} did not come within {self._timeout_s} s")
        except RuntimeError as error:
            self._fate.fail(f"rank {self._rank}: {error}")
            raise CollectiveAbortedError(f"the backend failed: {error}") from error

    @staticmethod
    def _ended(work: dist.Work, timeout_s: float) -> bool:
        """Wait for at most `timeout_s`; whether the operation has ended. Raises `RuntimeError` when it ended badly."""
        try:
            work.wait(timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError:
            # A slice that ran out and an operation that failed raise alike; only the latter is complete, or one that ended just now.
            if not work.is_completed():
                return False
            work.wait(timedelta(seconds=0.001))  # does not wait any more; raises what the operation failed of
        return True
