"""Collectives over shared memory: the default for CPU ranks of one host.

A collective is one meeting. Each rank fills its slot, says so, and waits until all have said so; then everybody reads the
slots of all. Slots are double-buffered by the parity of a generation counter: a rank fills a slot again two generations later,
and it can only get there after all ranks met in between, that is after they had finished reading. Tensors larger than a slot
go in chunks, one meeting each. A wait yields the core a few times, then sleeps on the missing rank's word (never a pure spin:
with more ranks than cores that is 100 times slower).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

import torch

from common.engine.collectives.futex import fence, futex_wait, futex_wake
from common.engine.collectives.group_memory import ARRIVED, TAG, GroupMemory
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

_YIELDS: Final = 50
_NAP_S: Final = 0.05
_WORD_MASK: Final = 2**32 - 1
_MAX_CACHED_VIEWS: Final = 128

Views = tuple[list[torch.Tensor], list[torch.Tensor]]


class SharedMemoryCollectives:
    """One rank's end of a group that lives in a `GroupMemory`. See `port.Collectives` for what callers may rely on."""

    def __init__(
        self,
        memory: GroupMemory,
        ranks: Sequence[int],
        rank: int,
        *,
        level: int,
        timeout_s: float,
        now: Callable[[], float],
    ) -> None:
        """Use `attach`, or `split` of another group. `ranks` are the members' numbers in the memory, `rank` this one's place."""
        self._memory = memory
        self._ranks = tuple(ranks)
        self._rank = rank
        self._level = level
        self._timeout_s = check_timeout(timeout_s)
        self._now = now
        self._generation = 0
        self._words = memory.words
        lines = [memory.line(level, member) for member in self._ranks]
        self._my_line = lines[rank]
        self._peers = [
            (line, member) for line, member in zip(lines, self._ranks, strict=True) if member != self._ranks[rank]
        ]
        self._tag_lines = [line + TAG for line, _ in self._peers]
        self._my_word = memory.address + 4 * (self._my_line + ARRIVED)
        self._views: dict[tuple[torch.dtype, int], Views] = {}
        self._next_level = 1
        self._root: SharedMemoryCollectives = self

    @classmethod
    def attach(cls, fd: int, rank: int, *, timeout_s: float, now: Callable[[], float]) -> SharedMemoryCollectives:
        """Join as `rank` the group whose memory is behind `fd` (`GroupMemory.create`); `fd` stays the caller's to close.

        `timeout_s` bounds every wait, on the clock `now` (seconds). Does not wait for the others. Raises
        `CollectiveAbortedError` when the rank has already joined, `InvalidValueError` for a bad `fd`, rank or timeout.
        """
        memory = GroupMemory.attach(fd, rank)
        return cls(memory, range(memory.size), rank, level=0, timeout_s=timeout_s, now=now)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self._ranks)

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by the sum over ranks, added in rank order; bfloat16 is summed in float32 and rounded once."""
        check_tensor(tensor)
        flat = tensor.reshape(-1)
        tag = tag_of(Operation.ALL_REDUCE_SUM, tensor)
        for chunk in self._chunks(flat):
            slots = self._slots(chunk)
            slots[self._rank].copy_(chunk)
            self._meet(tag)
            sum_into(chunk, slots)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors concatenated in rank order along `dim` (0 or the last)."""
        check_tensor(tensor, dim)
        parts = self._gather(tensor, tag_of(Operation.ALL_GATHER, tensor, dim), keep=True)
        return torch.cat(parts, dim)

    def gather_to(self, root: int, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        """As `all_gather`, on rank `root` alone; None on the others."""
        check_tensor(tensor, dim)
        check_root(root, self.size)
        parts = self._gather(tensor, tag_of(Operation.GATHER_TO, tensor, dim, root), keep=self._rank == root)
        return torch.cat(parts, dim) if parts else None

    def broadcast(self, root: int, tensor: torch.Tensor) -> None:
        """Replace `tensor` on every rank by rank `root`'s."""
        check_tensor(tensor)
        check_root(root, self.size)
        flat = tensor.reshape(-1)
        tag = tag_of(Operation.BROADCAST, tensor, 0, root)
        for chunk in self._chunks(flat):
            source = self._slots(chunk)[root]
            if self._rank == root:
                source.copy_(chunk)
                self._meet(tag)
            else:
                self._meet(tag)
                chunk.copy_(source)
        if self._rank != root and not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give each rank its row; row i of the result came from rank i."""
        check_rows(tensor, self.size)
        tag = tag_of(Operation.EXCHANGE, tensor)
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        rows, whole = tensor.reshape(self.size, -1), received.view(self.size, -1)
        # Of rows that are too long for a slot a column of pieces goes at a time.
        width = self._memory.slot_bytes // rows.element_size() // self.size
        for chunk, target in zip(torch.split(rows, width, 1), torch.split(whole, width, 1), strict=True):
            slots = self._slots(chunk)
            slots[self._rank].view(chunk.shape).copy_(chunk)
            self._meet(tag)
            for row, slot in zip(target, slots, strict=True):
                row.copy_(slot.view(chunk.shape)[self._rank])
        return received

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._meet(0)

    def split(self, groups: Sequence[Sequence[int]]) -> SharedMemoryCollectives:
        """This rank's sub-group. Takes one level of the memory: `GroupMemory.create` bounds how often a group can be split.

        A sub-group of a sub-group is made by splitting the whole group again.
        """
        if self._root is not self:
            raise InvalidValueError(field="group", value=self._ranks, rule="only the whole group can be split")
        mine = partition_of(self._rank, self.size, groups)
        level = self._next_level
        if level >= self._memory.num_levels:
            raise InvalidValueError(
                field="groups", value=groups, rule=f"at most {self._memory.num_levels - 1} splits, as created"
            )
        self._next_level += 1
        child = SharedMemoryCollectives(
            self._memory, mine, mine.index(self._rank), level=level, timeout_s=self._timeout_s, now=self._now
        )
        child._root = self
        return child

    def abort(self, reason: str) -> None:
        """Fail the whole group (and every sub-group) on every rank."""
        self._memory.abort(f"rank {self._ranks[self._rank]}: {reason}")

    def close(self) -> None:
        """Leave the group; a sub-group is left with the group it was split from."""
        if self._root is self:
            self._memory.close()
        self._views.clear()

    def _gather(self, tensor: torch.Tensor, tag: int, *, keep: bool) -> list[torch.Tensor]:
        """The tensors of all ranks (views of the slots when they fit there), or nothing unless `keep`."""
        flat = tensor.reshape(-1)
        chunks = self._chunks(flat)
        if len(chunks) == 1:
            slots = self._slots(flat)
            slots[self._rank].copy_(flat)
            self._meet(tag)
            return [slot.view(tensor.shape) for slot in slots] if keep else []
        parts = [torch.empty_like(flat) for _ in self._ranks] if keep else []
        position = 0
        for chunk in chunks:
            slots = self._slots(chunk)
            slots[self._rank].copy_(chunk)
            self._meet(tag)
            for part, slot in zip(parts, slots, strict=False):
                part[position : position + chunk.numel()].copy_(slot)
            position += chunk.numel()
        return [part.view(tensor.shape) for part in parts]

    def _chunks(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if flat.nbytes <= self._memory.slot_bytes:
            return (flat,)
        return torch.split(flat, self._memory.slot_bytes // flat.element_size())

    def _slots(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' slots for the next meeting, as flat tensors like `chunk`."""
        key = (chunk.dtype, chunk.numel())
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_CACHED_VIEWS:
                self._views.clear()
            views = (self._make_views(*key, 0), self._make_views(*key, 1))
            self._views[key] = views
        return views[(self._generation + 1) & 1]

    @torch.inference_mode(mode=False)
    def _make_views(self, dtype: torch.dtype, numel: int, parity: int) -> list[torch.Tensor]:
        # They outlive the call: what is made in inference mode, as by a model's pass, could not be written outside of it.
        if numel == 0:
            return [torch.empty(0, dtype=dtype) for _ in self._ranks]
        offsets = [self._memory.slot(self._level, member, parity) for member in self._ranks]
        return [torch.frombuffer(self._memory.bytes, dtype=dtype, count=numel, offset=offset) for offset in offsets]

    def _meet(self, tag: int) -> None:
        """Say that this rank has come to the next generation, and wait until every rank has. Raises when the group has failed."""
        words = self._words
        if self._memory.aborted:
            raise CollectiveAbortedError(f"the group was aborted: {self._memory.abort_reason}")
        generation = self._generation = (self._generation + 1) & _WORD_MASK
        # A peer can be one meeting ahead, never two: that one needs us. So equality is enough, and the counter may wrap.
        reached = (generation, (generation + 1) & _WORD_MASK)
        parity = generation & 1
        words[self._my_line + TAG + parity] = tag
        fence()
        words[self._my_line + ARRIVED] = generation
        if self._peers:
            futex_wake(self._my_word)
        for line, member in self._peers:
            if words[line] not in reached:
                self._wait_for(line, member, reached)
        fence()
        for tag_line in self._tag_lines:
            if words[tag_line + parity] != tag:
                self.abort("entered another collective than its peers, or with another shape or dtype")
                raise CollectiveAbortedError(f"the ranks entered different collectives: {self._memory.abort_reason}")

    def _wait_for(self, line: int, member: int, reached: tuple[int, int]) -> None:
        words = self._words
        for _ in range(_YIELDS):
            os.sched_yield()
            if words[line] in reached:
                return
        address = self._memory.address + 4 * line
        deadline = self._now() + self._timeout_s
        while (value := words[line]) not in reached:
            if self._memory.aborted:
                raise CollectiveAbortedError(f"the group was aborted: {self._memory.abort_reason}")
            remaining = deadline - self._now()
            if remaining <= 0:
                self.abort(f"waited {self._timeout_s} s for rank {member}")
                raise CollectiveTimeoutError(f"rank {member} did not come within {self._timeout_s} s")
            futex_wait(address, value, min(remaining, _NAP_S))
            # Looked at only after a nap: on the fast path a death costs nothing. It may have come and then left.
            if words[line] == value and self._memory.has_gone(member) and words[line] not in reached:
                self.abort(f"rank {member} has left the group or died")
                raise CollectiveAbortedError(f"rank {member} has left the group or died")
