"""Every collectives adapter fails rather than hangs: aborts, ranks that are missing, dead or elsewhere, wrong sizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from common.engine.collectives.distributed import DistributedCollectives
from common.engine.collectives.group_memory import GroupMemory
from common.engine.collectives.port import CollectiveAbortedError, Collectives, CollectiveTimeoutError
from common.engine.collectives.shared_memory import SharedMemoryCollectives
from contracts.errors import InvalidValueError
from tests.contract.collectives_ranks import ADAPTERS, NOW, SLOT_BYTES, Ranks, reduce_one


@pytest.fixture(params=ADAPTERS)
def fragile(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ranks]]:
    """Makes groups that the test will break."""
    made: list[Ranks] = []

    def make(size: int, timeout_s: float = 30.0) -> Ranks:
        made.append(Ranks(request.param, size, timeout_s))
        return made[-1]

    yield make
    for running in made:
        running.close()


def say_rank(group: Collectives) -> int:
    """No collective at all."""
    return group.rank


def abort_it(group: Collectives) -> None:
    """Abort instead of coming."""
    group.abort("planted failure")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_abort_ends_the_waits_of_all_others(fragile: Callable[..., Ranks], size: int) -> None:
    """A rank aborts: the others, who wait in a collective, fail with its reason, and so does every later call on any rank."""
    group = fragile(size)
    group(reduce_one)
    group.start(reduce_one, range(size - 1))
    group.start(abort_it, (size - 1,))
    assert group.answer(size - 1) == ("ok", None)
    for rank in range(size - 1):
        kind, text = group.answer(rank)
        assert (kind, "planted failure" in text) == ("CollectiveAbortedError", True)
    group.start(reduce_one, range(size))
    assert [group.answer(rank)[0] for rank in range(size)] == ["CollectiveAbortedError"] * size


def test_a_missing_rank_is_a_timeout_not_a_hang(fragile: Callable[..., Ranks]) -> None:
    """A rank never comes: all others fail within the group's timeout, at least one saying so, and the late rank fails too.

    A group of 2 and one of 4 wait at the same time.
    """
    groups = [fragile(size, timeout_s=3.0) for size in (2, 4)]
    for group in groups:
        group(say_rank)  # all have started: none is late by accident
        group(reduce_one)
    for group in groups:
        group.start(reduce_one, range(group.size - 1))
    for group in groups:
        kinds = [group.answer(rank)[0] for rank in range(group.size - 1)]
        assert set(kinds) <= {"CollectiveTimeoutError", "CollectiveAbortedError"}
        assert "CollectiveTimeoutError" in kinds
        group.start(reduce_one, (group.size - 1,))
        assert group.answer(group.size - 1)[0] in {"CollectiveAbortedError", "CollectiveTimeoutError"}


@pytest.mark.parametrize("size", [2, 3])
def test_a_dead_rank_fails_the_others(fragile: Callable[..., Ranks], size: int) -> None:
    """A rank is killed: the others do not wait for the timeout (an hour here)."""
    group = fragile(size, timeout_s=3600.0)
    group(reduce_one)
    group.start(reduce_one, range(1, size))
    group.kill(0)
    assert [group.answer(rank)[0] for rank in range(1, size)] == ["CollectiveAbortedError"] * (size - 1)


def abort_the_half(group: Collectives) -> None:
    """Split, then abort in the sub-group."""
    half = group.split([[0], [1]])
    if group.rank == 0:
        half.abort("planted failure in a sub-group")
    group.barrier()


def test_aborting_a_sub_group_aborts_the_whole(fragile: Callable[..., Ranks]) -> None:
    """Ranks of the other sub-group fail in the whole group."""
    group = fragile(2)
    group.start(abort_the_half, range(2))
    assert [group.answer(rank)[0] for rank in range(2)] == ["CollectiveAbortedError"] * 2


def leave_the_partner_alone(group: Collectives) -> None:
    """Of two pairs, rank 1 does not come to its partner's exchange but, with the other pair, to one of all."""
    pair = group.split([[0, 1], [2, 3]])
    pair.barrier()
    if group.rank == 0:
        pair.exchange(torch.zeros(2))
    group.exchange(torch.zeros(4))


def test_a_timeout_in_a_sub_group_fails_the_whole(fragile: Callable[..., Ranks]) -> None:
    """Nobody knows any more who took part in what: ranks of the other sub-group fail, and later calls, too."""
    group = fragile(4, timeout_s=1.0)
    group.start(leave_the_partner_alone, range(4))
    kinds = [group.answer(rank)[0] for rank in range(4)]
    assert set(kinds) <= {"CollectiveTimeoutError", "CollectiveAbortedError"}
    group.start(reduce_one, range(4))
    assert [group.answer(rank)[0] for rank in range(4)] == ["CollectiveAbortedError"] * 4


def die_beside_the_partner(group: Collectives) -> None:
    """Rank 0 waits for rank 1 in their sub-group, the other pair waits in the whole group."""
    pair = group.split([[0, 1], [2, 3]])
    if group.rank == 0:
        pair.exchange(torch.zeros(2))
    elif group.rank > 1:
        group.barrier()


def test_a_death_seen_in_a_sub_group_fails_the_whole(fragile: Callable[..., Ranks]) -> None:
    """The ranks that wait in the whole group fail with it, long before the timeout (an hour here)."""
    group = fragile(4, timeout_s=3600.0)
    group.start(die_beside_the_partner, range(4))
    assert group.answer(1) == ("ok", None)
    group.kill(1)
    assert [group.answer(rank)[0] for rank in (0, 2, 3)] == ["CollectiveAbortedError"] * 3


def enter_different_collectives(group: Collectives) -> None:
    """Rank 0 sums, rank 1 gathers."""
    if group.rank == 0:
        group.all_reduce_sum(torch.ones(4))
    else:
        group.all_gather(torch.ones(4))


@pytest.mark.parametrize("adapter", ["shared_memory", "threads"])
def test_diverging_ranks_fail_instead_of_mixing_bytes(adapter: str) -> None:
    """Ranks that disagree on what comes next both get an error (adapters that own their memory can tell)."""
    group = Ranks(adapter, 2)
    try:
        group.start(enter_different_collectives, range(2))
        assert [group.answer(rank)[0] for rank in range(2)] == ["CollectiveAbortedError"] * 2
    finally:
        group.close()


def test_the_parent_can_abort_through_the_memory() -> None:
    """The parent, which is no rank, ends the waits when it knows that a rank will not come."""
    group = Ranks("shared_memory", 2)
    try:
        assert group.memory is not None
        group.start(reduce_one, (0,))
        group.memory.abort("rank 1 exited with status 1")
        kind, text = group.answer(0)
        assert (kind, "rank 1 exited with status 1" in text) == ("CollectiveAbortedError", True)
    finally:
        group.close()


def test_a_rank_joins_once() -> None:
    """A second holder of the same rank is refused, and so is a rank that had left; bad descriptors and ranks are named."""
    memory = GroupMemory.create(2, slot_bytes=SLOT_BYTES)
    first = SharedMemoryCollectives.attach(memory.fileno(), 0, timeout_s=1.0, now=NOW)
    with pytest.raises(CollectiveAbortedError, match="already joined"):
        SharedMemoryCollectives.attach(memory.fileno(), 0, timeout_s=1.0, now=NOW)
    first.close()
    with pytest.raises(CollectiveAbortedError, match="has left"):
        first.barrier()
    with pytest.raises(CollectiveAbortedError, match="already joined"):
        SharedMemoryCollectives.attach(memory.fileno(), 0, timeout_s=1.0, now=NOW)
    with pytest.raises(InvalidValueError, match="rank: 2"):
        SharedMemoryCollectives.attach(memory.fileno(), 2, timeout_s=1.0, now=NOW)
    with pytest.raises(InvalidValueError, match="timeout_s"):
        SharedMemoryCollectives.attach(memory.fileno(), 1, timeout_s=0.0, now=NOW)
    memory.close()
    other = os.memfd_create("no-group")
    with pytest.raises(InvalidValueError, match=r"GroupMemory\.create"):
        SharedMemoryCollectives.attach(other, 0, timeout_s=1.0, now=NOW)
    os.close(other)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("size", {"size": 0}),
        ("slot_bytes", {"size": 1, "slot_bytes": 100}),
        ("num_splits", {"size": 1, "num_splits": -1}),
    ],
)
def test_bad_group_sizes_are_refused(field: str, arguments: dict[str, int]) -> None:
    """A bad size of the group's memory is an error that names it."""
    with pytest.raises(InvalidValueError, match=field):
        GroupMemory.create(**arguments)


def test_the_generation_counter_may_wrap() -> None:
    """Meetings go on across the end of the 32-bit counter."""
    memory = GroupMemory.create(1, slot_bytes=SLOT_BYTES)
    group = SharedMemoryCollectives.attach(memory.fileno(), 0, timeout_s=1.0, now=NOW)
    group._generation = 2**32 - 2
    for _ in range(4):
        assert reduce_one(group) == 1.0
    assert group._generation == 2
    memory.close()


class EndingWork:
    """An operation that ends between the end of the wait for it and the look at it, well or with an error."""

    def __init__(self, error: str) -> None:
        self.error = error
        self.num_waits = 0

    def wait(self, timeout: timedelta) -> bool:
        """Time out once."""
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        """It is, by now."""
        return True


def test_an_operation_that_ends_as_the_wait_runs_out_is_judged_by_its_own_end() -> None:
    """It is no failure because a slice of the wait ran out first, and no success either if it failed."""
    ended: Any = DistributedCollectives._ended
    assert ended(EndingWork(""), 0.1) is True
    with pytest.raises(RuntimeError, match="peer is gone"):
        ended(EndingWork("peer is gone"), 0.1)


def test_a_timeout_is_an_abort() -> None:
    """Callers that handle aborts handle timeouts."""
    assert issubclass(CollectiveTimeoutError, CollectiveAbortedError)
