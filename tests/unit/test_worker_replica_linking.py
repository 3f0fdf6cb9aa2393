"""Linking replicas with a peer that takes its time: the engine's loop goes on."""

from __future__ import annotations

import asyncio

import pytest

from common.engine.fake.engine import FakeEngine
from common.engine.port import EngineError
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.core.blocks import Reservation
from common.worker.core.scheduler import StepLimits
from common.worker.core.sequence import Sequence
from common.worker.engine_loop import StepOutcome
from common.worker.engines import start_engines
from common.worker.replica_set import ReplicaSet
from contracts.errors import ErrorInfo
from contracts.requests import WorkerRef
from contracts.workers import WorkerDescription

PEER = WorkerRef(worker_id="slow", incarnation="i1")
"""Who does not answer for a minute."""


class SlowEngine(FakeEngine):
    """Notes what it is asked; a link takes a minute, and then fails on replica 1."""

    def __init__(self, clock: VirtualClock, dp_rank: int, calls: list[str]) -> None:
        super().__init__(clock, worker_id="w", incarnation="i", dp_rank=dp_rank, dp=2, num_blocks=4, num_slots=4)
        self.dp_rank = dp_rank
        self.calls = calls

    async def link(self, peer: WorkerRef, ranks: tuple[WorkerDescription, ...]) -> None:
        """Wait for the peer."""
        del peer, ranks
        await self._clock.sleep(60.0)
        if self.dp_rank == 1:
            raise EngineError("the peer does not answer")
        self.calls.append("linked 0")

    async def unlink(self, peer: WorkerRef) -> None:
        """Note it."""
        await super().unlink(peer)
        self.calls.append(f"unlinked {self.dp_rank}")


class Mute:
    """An observer that does nothing."""

    async def bound(self, sequence: Sequence) -> None:
        """See `StepObserver.bound`."""

    async def stepped(self, outcome: StepOutcome) -> None:
        """See `StepObserver.stepped`."""

    async def failed(self, sequences: tuple[Sequence, ...], error: ErrorInfo) -> None:
        """See `StepObserver.failed`."""

    async def preempted(self, sequence: Sequence) -> None:
        """See `StepObserver.preempted`."""

    def released(self, *, quarantined: bool) -> None:
        """See `StepObserver.released`."""

    def quarantined(self, sequence: Sequence, memory: Reservation) -> None:
        """See `StepObserver.quarantined`."""

    def quarantine_ended(self, handoff_id: str, memory: Reservation) -> None:
        """See `StepObserver.quarantine_ended`."""

    def release_failed(self, sequence: Sequence, error: ErrorInfo) -> None:
        """See `StepObserver.release_failed`."""


def test_no_command_waits_for_a_link_and_a_failure_is_forgotten_by_all_replicas() -> None:
    """The lock of no engine's loop is held meanwhile; when one replica fails, all of them unlink."""

    async def main(clock: VirtualClock) -> None:
        calls: list[str] = []
        limits = StepLimits(max_step_tokens=16, prefill_chunk_tokens=16)
        engines = await start_engines([SlowEngine(clock, dp_rank, calls) for dp_rank in range(2)])
        replicas = ReplicaSet(engines, limits, Mute(), release_timeout_ms=100)

        async def link() -> None:
            try:
                await replicas.link(PEER, ())
            except EngineError as error:
                calls.append(error.message)

        async with asyncio.timeout(200), asyncio.TaskGroup() as group:
            group.create_task(link())
            for _ in range(2):
                await clock.sleep(30.0)
                async with asyncio.timeout(1.0):
                    for replica in replicas:
                        await replica.loop.lock.acquire()
                        replica.loop.lock.release()
        assert calls == ["linked 0", "unlinked 0", "unlinked 1", "the peer does not answer"]

    run_virtual(main)


class ReplacingEngine(FakeEngine):
    """Like ranks: a link with a peer that is being linked already ends the attempt before. The first one would take a minute."""

    def __init__(self, clock: VirtualClock, dp_rank: int) -> None:
        super().__init__(clock, worker_id="w", incarnation="i", dp_rank=dp_rank, dp=2, num_blocks=4, num_slots=4)
        self.linked: set[WorkerRef] = set()
        self.is_replaced: asyncio.Event | None = None

    async def link_source(self, peer: WorkerRef, ranks: tuple[WorkerDescription, ...]) -> None:
        """Wait for another attempt, if this is the first one."""
        del ranks
        if self.is_replaced is None:
            self.is_replaced = asyncio.Event()
            await self.is_replaced.wait()
            raise EngineError("it was linked anew")
        self.is_replaced.set()
        self.linked.add(peer)

    async def unlink(self, peer: WorkerRef) -> None:
        """Note it."""
        self.linked.discard(peer)


def test_an_attempt_that_another_one_replaced_leaves_the_new_link_alone() -> None:
    """Neither its failure nor the end that its caller asked for, and that waited for its turn, undoes what was linked meanwhile."""

    async def main(clock: VirtualClock) -> None:
        limits = StepLimits(max_step_tokens=16, prefill_chunk_tokens=16)
        engines = [ReplacingEngine(clock, dp_rank) for dp_rank in range(2)]
        engines[1].is_replaced = asyncio.Event()
        replicas = ReplicaSet(await start_engines(engines), limits, Mute(), release_timeout_ms=100)

        async def first() -> None:
            with pytest.raises(EngineError, match="anew"):
                await replicas.link_source(PEER, ())

        async with asyncio.timeout(200), asyncio.TaskGroup() as group:
            group.create_task(first())
            await clock.sleep(1.0)
            await replicas.link_source(PEER, ())
        assert [engine.linked for engine in engines] == [{PEER}, {PEER}]
        is_wanted = False
        async with asyncio.TaskGroup() as group, replicas[1].loop.lock:
            group.create_task(replicas.unlink(PEER, is_wanted=lambda: is_wanted))
            await clock.sleep(1.0)
            is_wanted = True
        assert [engine.linked for engine in engines] == [set(), {PEER}]
        await replicas.unlink(PEER)
        assert [engine.linked for engine in engines] == [set(), set()]

    run_virtual(main)
