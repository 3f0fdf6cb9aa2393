"""Groups of ranks for the suite of the collectives: processes or threads of any adapter, driven from the test."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined] # exported at run time, not to the checker

from common.engine.collectives.distributed import DistributedCollectives
from common.engine.collectives.group_memory import GroupMemory
from common.engine.collectives.passed_fd import PassedFd
from common.engine.collectives.port import CollectiveAbortedError, Collectives
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


def reduce_one(group: Collectives) -> float:
    """One small all-reduce."""
    tensor = torch.ones(1)
    group.all_reduce_sum(tensor)
    return float(tensor)
