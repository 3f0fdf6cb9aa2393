"""Comparing two workers and compiling their plan takes a while for a large model: the event loop does not wait for it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from common.bus.memory import MemoryServer
from common.bus.storage import WORKERS_CONFIG
from common.engine.fake.engine import FakeEngine
from common.layout.replicas import plan_workers
from common.runtime.clock import SystemClock
from contracts.requests import WorkerRef
from services.prefill import meeting
from services.prefill.meeting import Meetings
from tests.integration.links_world import DecodePeer

PATIENCE_S = 30.0


class Network:
    """A bus in real time."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.clock = SystemClock()
        self.server = MemoryServer(self.clock)
        self.group = group


async def test_the_loop_goes_on_while_a_plan_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan waits for something that only the loop does; then it is there."""
    begun, gate = threading.Event(), threading.Event()

    def held(*arguments: Any) -> Any:
        begun.set()
        assert gate.wait(PATIENCE_S), "the loop stands still"
        return plan_workers(*arguments)

    monkeypatch.setattr(meeting, "plan_workers", held)
    async with asyncio.timeout(2 * PATIENCE_S), asyncio.TaskGroup() as group:
        network: Any = Network(group)
        peer = DecodePeer(network, "d", "j1")
        await network.server.connect().ensure_bucket(WORKERS_CONFIG)
        await peer.open()
        own = FakeEngine(network.clock, worker_id="p", incarnation="i1", tp=2)
        meetings = Meetings(network.server.connect(), network.clock, (await own.start()).ranks, asyncio.to_thread)
        met = group.create_task(meetings.meet(WorkerRef(worker_id="d", incarnation="j1")))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        assert not met.done()
        gate.set()
        assert (await met).terms.topology == "tp2 -> tp1"
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
