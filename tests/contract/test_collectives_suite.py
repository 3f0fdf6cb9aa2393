"""One suite for every collectives adapter: what a group of 1 to 4 ranks promises, and that it fails rather than hangs."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined] # exported at run time, not to the checker

from common.engine.collectives.distributed import DistributedCollectives
from common.engine.collectives.group_memory import GroupMemory
from common.engine.collectives.passed_fd import PassedFd
from common.engine.collectives.port import CollectiveAbortedError, Collectives, CollectiveTimeoutError
from common.engine.collectives.shared_memory import SharedMemoryCollectives
from common.engine.collectives.threads import ThreadGroup
from common.runtime.clock import SystemClock
from contracts.errors import InvalidValueError

Scenario = Callable[[Collectives], Any]
ADAPTERS = ("shared_memory", "threads", "distributed")
SLOT_BYTES = 4096
PATIENCE_S = 60.0
NOW = SystemClock().monotonic


def run_rank(connection: Connection, adapter: str, where: Any, place: tuple[int, int], timeout_s: float) -> None:
    """A rank's process: join, then perform scenarios until end-of-file. Answers are ("ok", value) or (error name, text)."""
    torch.set_num_threads(1)
    rank, size = place
    group: Collectives
    if adapter == "shared_memory":
        group = SharedMemoryCollectives.attach(where.fileno(), rank, timeout_s=timeout_s, now=NOW)
    else:
        store = FileStore(where, size)
        group = DistributedCollectives.join(store, rank, size, timeout_s=timeout_s, now=NOW)
    while True:
        try:
            scenario = connection.recv()
        except EOFError:
            break
        connection.send(perform(scenario, group))
    group.close()


def perform(scenario: Scenario, group: Collectives) -> tuple[str, Any]:
    """Run a scenario and turn an error into an answer."""
    try:
        return "ok", scenario(group)
    except (CollectiveAbortedError, InvalidValueError) as error:
        return type(error).__name__, str(error)
    except Exception:  # noqa: BLE001 - shown by the parent
        return "unexpected", traceback.format_exc()


class Ranks:
    """A running group, driven from the test: each call performs a scenario on some ranks and returns their answers."""

    def __init__(self, adapter: str, size: int, timeout_s: float = 30.0) -> None:
        self.size = size
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        self.threads: list[threading.Thread] = []
        self.inboxes: list[queue.SimpleQueue[Scenario | None]] = []
        self.outboxes: list[queue.SimpleQueue[tuple[str, Any]]] = []
        self.memory: GroupMemory | None = None
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        if adapter == "threads":
            self._start_threads(size, timeout_s)
        else:
            self._start_processes(adapter, size, timeout_s)

    def _start_threads(self, size: int, timeout_s: float) -> None:
        shared = ThreadGroup(size, timeout_s=timeout_s)

        def serve(rank: int) -> None:
            group = shared.join(rank)
            while (scenario := self.inboxes[rank].get()) is not None:
                self.outboxes[rank].put(perform(scenario, group))
            group.close()

        for rank in range(size):
            self.inboxes.append(queue.SimpleQueue())
            self.outboxes.append(queue.SimpleQueue())
            self.threads.append(threading.Thread(target=serve, args=(rank,), name=f"rank-{rank}", daemon=True))
            self.threads[-1].start()

    def _start_processes(self, adapter: str, size: int, timeout_s: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["pytest", "common.engine.collectives.distributed", "common.engine.collectives.shared_memory"]
        )
        where: Any
        if adapter == "shared_memory":
            self.memory = GroupMemory.create(size, slot_bytes=SLOT_BYTES, num_splits=4)
            where = PassedFd(self.memory.fileno())
        else:
            self.folder = tempfile.TemporaryDirectory()
            where = str(Path(self.folder.name) / "store")
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_rank, args=(theirs, adapter, where, (rank, size), timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def start(self, scenario: Scenario, ranks: range | tuple[int, ...]) -> None:
        """Begin a scenario on `ranks`."""
        for rank in ranks:
            if self.threads:
                self.inboxes[rank].put(scenario)
            else:
                self.connections[rank].send(scenario)

    def answer(self, rank: int) -> tuple[str, Any]:
        """What `rank` answers to the scenario that it was given."""
        if self.threads:
            return self.outboxes[rank].get(timeout=PATIENCE_S)
        assert wait([self.connections[rank]], PATIENCE_S), f"rank {rank} hangs"
        answer: tuple[str, Any] = self.connections[rank].recv()
        return answer

    def __call__(self, scenario: Scenario) -> list[Any]:
        """Perform a scenario on all ranks; their values, all of which must be good."""
        self.start(scenario, range(self.size))
        answers = [self.answer(rank) for rank in range(self.size)]
        for kind, value in answers:
            assert kind == "ok", value
        return [value for _, value in answers]

    def kill(self, rank: int) -> None:
        """End a rank's process as a crash would; a thread cannot be killed, it leaves."""
        if self.threads:
            self.inboxes[rank].put(None)
            self.threads[rank].join(PATIENCE_S)
        else:
            self.processes[rank].kill()
            self.processes[rank].join(PATIENCE_S)

    def close(self) -> None:
        """End all ranks."""
        for inbox in self.inboxes:
            inbox.put(None)
        for thread in self.threads:
            thread.join(PATIENCE_S)
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(PATIENCE_S)
            process.close()
        if self.memory is not None:
            self.memory.close()
        if self.folder is not None:
            self.folder.cleanup()


@pytest.fixture(
    scope="module",
    params=[(adapter, size) for adapter in ADAPTERS for size in (1, 2, 3, 4)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A group that works: shared by the tests that leave it so."""
    running = Ranks(*request.param)
    yield running
    running.close()


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


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A rank's tensor: distinct in every rank, and so scaled that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(1000 + rank)
    scaled = torch.randn(shape, generator=generator) * 10.0 ** (3 * rank)
    return scaled.to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, for exact comparison between processes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


SHAPES = ((5,), (3, 7), (2, 3, 4), (0, 4), (3, 1000), (2050,))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def sum_everything(group: Collectives) -> list[bytes]:
    """All-reduce each shape (the last two are several chunks) in each dtype."""
    sums = []
    for dtype in DTYPES:
        for shape in SHAPES:
            tensor = values(group.rank, shape, dtype)
            group.all_reduce_sum(tensor)
            sums.append(raw(tensor))
    return sums


def test_sum_is_right_and_the_same_bits_on_every_rank(ranks: Ranks) -> None:
    """Sums are close to the exact sum (int64: equal), and all ranks hold identical bits."""
    answers = ranks(sum_everything)
    for answer in answers[1:]:
        assert answer == answers[0]
    position = 0
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = [values(rank, shape, dtype) for rank in range(ranks.size)]
            actual = torch.frombuffer(bytearray(answers[0][position] or b"\0" * 8), dtype=dtype)[
                : parts[0].numel()
            ].view(shape)
            wide = torch.int64 if dtype == torch.int64 else torch.float64
            exact = torch.stack([part.to(wide) for part in parts]).sum(0)
            scale = torch.stack([part.to(torch.float64).abs() for part in parts]).sum(0) if parts[0].numel() else exact
            error = (actual.to(torch.float64) - exact.to(torch.float64)).abs()
            bound = {torch.float32: 2e-7, torch.bfloat16: 2**-7, torch.int64: 0.0}[dtype] * ranks.size
            assert bool((error <= scale * bound).all()), (dtype, shape)
            position += 1


def sum_of_a_transposed_tensor(group: Collectives) -> bytes:
    """All-reduce in place through a view that is not contiguous."""
    base = torch.arange(12, dtype=torch.int64).view(3, 4) + group.rank
    group.all_reduce_sum(base.t())
    return raw(base)


def test_sum_in_place_of_a_non_contiguous_tensor(ranks: Ranks) -> None:
    """The caller's own memory changes, whatever its strides."""
    size = ranks.size
    expected = torch.arange(12, dtype=torch.int64).view(3, 4) * size + sum(range(size))
    assert ranks(sum_of_a_transposed_tensor) == [raw(expected)] * size


def gather_everything(group: Collectives) -> list[tuple[tuple[int, ...], bytes]]:
    """All-gather along the first and the last dimension."""
    gathered = []
    for shape in SHAPES:
        for dim in (0, -1):
            tensor = group.all_gather(values(group.rank, shape, torch.float32), dim)
            gathered.append((tuple(tensor.shape), raw(tensor)))
    return gathered


def test_all_gather_concatenates_in_rank_order(ranks: Ranks) -> None:
    """Every rank gets `torch.cat` of the ranks' tensors, and later collectives do not change it."""
    expected = []
    for shape in SHAPES:
        for dim in (0, -1):
            whole = torch.cat([values(rank, shape, torch.float32) for rank in range(ranks.size)], dim)
            expected.append((tuple(whole.shape), raw(whole)))
    assert ranks(gather_everything) == [expected] * ranks.size


def gather_to_every_root(group: Collectives) -> list[bytes | None]:
    """Gather to each rank in turn."""
    results = []
    for root in range(group.size):
        for shape in ((2, 5), (3, 1000)):
            tensor = group.gather_to(root, values(group.rank, shape, torch.bfloat16))
            results.append(None if tensor is None else raw(tensor))
    return results


def test_gather_reaches_the_root_alone(ranks: Ranks) -> None:
    """The root gets the concatenation, the others None."""
    answers = ranks(gather_to_every_root)
    for rank, answer in enumerate(answers):
        expected: list[bytes | None] = []
        for root in range(ranks.size):
            for shape in ((2, 5), (3, 1000)):
                whole = torch.cat([values(member, shape, torch.bfloat16) for member in range(ranks.size)], -1)
                expected.append(raw(whole) if root == rank else None)
        assert answer == expected


def broadcast_from_every_root(group: Collectives) -> list[bytes]:
    """Broadcast from each rank in turn, in one chunk and in several, and into a view."""
    results = []
    for root in range(group.size):
        for shape in ((4,), (3, 1000)):
            tensor = values(group.rank, shape, torch.float32)
            group.broadcast(root, tensor)
            results.append(raw(tensor))
        view = values(group.rank, (3, 4), torch.float32)
        group.broadcast(root, view.t())
        results.append(raw(view))
    return results


def test_broadcast_gives_all_ranks_the_roots_tensor(ranks: Ranks) -> None:
    """After a broadcast every rank holds the root's bytes."""
    expected = [
        raw(values(root, shape, torch.float32)) for root in range(ranks.size) for shape in ((4,), (3, 1000), (3, 4))
    ]
    assert ranks(broadcast_from_every_root) == [expected] * ranks.size


def count_with_barriers(group: Collectives) -> list[int]:
    """Many meetings in a row, to wrap the slots' double buffer many times."""
    seen = []
    for step in range(50):
        group.barrier()
        tensor = torch.tensor([step + group.rank])
        group.all_reduce_sum(tensor)
        seen.append(int(tensor))
    return seen


def test_many_collectives_in_a_row_do_not_mix(ranks: Ranks) -> None:
    """Fast and slow ranks never read a slot of another generation."""
    size = ranks.size
    assert ranks(count_with_barriers) == [[step * size + sum(range(size)) for step in range(50)]] * size


def sum_in_halves(group: Collectives) -> tuple[int, int, list[float], list[float]]:
    """Split into the even ranks and the odd ranks (in falling order), and sum in both groups, interleaved."""
    groups = [list(range(0, group.size, 2)), list(range(1, group.size, 2))[::-1]]
    half = group.split([members for members in groups if members])
    tensor = torch.tensor([float(group.rank), 1.0])
    half.all_reduce_sum(tensor)
    whole = torch.tensor([1.0])
    group.all_reduce_sum(whole)
    order = half.all_gather(torch.tensor([float(group.rank)]))
    return half.rank, half.size, [*tensor.tolist(), *whole.tolist()], order.tolist()


def test_sub_groups_work_beside_the_whole_group(ranks: Ranks) -> None:
    """A sub-group numbers its ranks by position in its list; its collectives involve nobody else."""
    for rank, answer in enumerate(ranks(sum_in_halves)):
        members = [list(range(0, ranks.size, 2)), list(range(1, ranks.size, 2))[::-1]][rank % 2]
        sums = [float(sum(members)), float(len(members)), float(ranks.size)]
        assert answer == (members.index(rank), len(members), sums, [float(member) for member in members])


def refuse_bad_calls(group: Collectives) -> list[str]:
    """Calls that break a rule, on every rank alike; the group must still work afterwards."""
    refused = []
    attempts: list[Callable[[], object]] = [
        lambda: group.all_reduce_sum(torch.zeros(2, dtype=torch.float64)),
        lambda: group.all_gather(torch.zeros(2, 3, 4), 1),
        lambda: group.all_gather(torch.tensor(1.0)),
        lambda: group.broadcast(group.size, torch.zeros(2)),
        lambda: group.gather_to(-1, torch.zeros(2)),
        lambda: group.split([[0], [0]]),
    ]
    for attempt in attempts:
        try:
            attempt()
        except InvalidValueError as error:
            refused.append(error.field)
    group.barrier()
    return refused


def test_bad_arguments_are_refused_by_name(ranks: Ranks) -> None:
    """A wrong dtype, dimension, root or partition is an error that names it, raised before anybody is waited for."""
    assert ranks(refuse_bad_calls) == [["tensor", "dim", "dim", "root", "root", "groups"]] * ranks.size


def reduce_one(group: Collectives) -> float:
    """One small all-reduce."""
    tensor = torch.ones(1)
    group.all_reduce_sum(tensor)
    return float(tensor)


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


@pytest.mark.parametrize("size", [2, 4])
def test_a_missing_rank_is_a_timeout_not_a_hang(fragile: Callable[..., Ranks], size: int) -> None:
    """A rank never comes: all others fail within the group's timeout, at least one saying so, and the late rank fails too."""
    group = fragile(size, timeout_s=3.0)
    group(say_rank)  # all have started: none is late by accident
    group(reduce_one)
    group.start(reduce_one, range(size - 1))
    kinds = [group.answer(rank)[0] for rank in range(size - 1)]
    assert set(kinds) <= {"CollectiveTimeoutError", "CollectiveAbortedError"}
    assert "CollectiveTimeoutError" in kinds
    group.start(reduce_one, (size - 1,))
    assert group.answer(size - 1)[0] in {"CollectiveAbortedError", "CollectiveTimeoutError"}


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


def test_a_timeout_is_an_abort() -> None:
    """Callers that handle aborts handle timeouts."""
    assert issubclass(CollectiveTimeoutError, CollectiveAbortedError)
