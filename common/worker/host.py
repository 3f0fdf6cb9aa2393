"""Sets a worker service to work on a bus: answers, heartbeats, steps and sweeps, each in a task of the process's group."""

from __future__ import annotations

import asyncio
from typing import Never

from common.bus.port import Bus
from common.bus.rpc import RpcEdge
from common.bus.storage import ROUTERS_CONFIG
from common.engine.port import Engine
from common.runtime.lifecycle import EXIT_QUARANTINED, Log, ServiceEnded
from common.worker.quarantine_watch import wait_overrun
from common.worker.registration import Registration
from common.worker.service import WorkerService
from common.worker.twin import check_unique
from contracts import subjects


async def _watch_life(engine: Engine) -> None:
    """End with `EngineDeadError` once the engine is lost: a worker must not look ready until the next request finds out."""
    while True:
        await engine.next_progress()


class WorkerHost:
    """One service on one bus. Order matters: whoever reads the worker's record may ask it at once."""

    def __init__(self, service: WorkerService, bus: Bus, group: asyncio.TaskGroup, log: Log) -> None:
        self._service = service
        self._bus = bus
        self._group = group
        self._log = log
        self._tasks: list[asyncio.Task[None]] = []
        self.registration = Registration(bus, service.clock, log, service.record)

    async def open(self) -> None:
        """Answer, compute, then announce. Raises `BusError`."""
        service = self._service
        await check_unique(service.ref, self._bus, self._log)
        edge = RpcEdge(self._bus, self._group, self._log, service.metrics)
        subject_filter = subjects.worker_rpc_filter(service.role, service.settings.worker_id)
        cancels = await self._bus.subscribe(subjects.cancel_filter(service.settings.worker_id))
        read = await edge.serve(subject_filter, service.handlers())
        bucket = await self.registration.open()
        routers = await self._bus.ensure_bucket(ROUTERS_CONFIG)
        works = {
            "rpc": read(),
            **{f"steps-{replica.dp_rank}": replica.loop.run() for replica in service.replicas},
            **{f"life-{replica.dp_rank}": _watch_life(replica.engine) for replica in service.replicas},
            "cancels": service.run_cancels(cancels),
            "sweeps": service.run_sweeps(),
            "routers": service.routers.run(routers),
            "router_ticks": service.routers.run_ticks(routers),
            "registration": self.registration.run(),
            "own_lease": self.registration.run_lease(),
            "quarantine": self._leave_when_overrun(),
            **service.role_tasks(bucket),
        }
        self._tasks = [self._group.create_task(work, name=name) for name, work in works.items()]

    async def drain(self) -> None:
        """Say that nothing new is taken, and wait until all that was taken has ended."""
        self._service.draining = True
        self.registration.announce()
        await self._service.drain()

    async def _leave_when_overrun(self) -> Never:
        """Drain and end the process, to come back whole, once too much memory is quarantined. Raises `ServiceEnded`."""
        overrun = await wait_overrun(self._service.replicas, self._service.clock)
        reason = f"{overrun} are quarantined: their writers do not stop"
        self._log.error("quarantine_overrun", reason=reason)
        try:
            async with asyncio.timeout(self._service.settings.drain_timeout_s):
                await self.drain()
        except TimeoutError:
            self._log.error("drain_cut_short", step="quarantine", timeout_s=self._service.settings.drain_timeout_s)
        raise ServiceEnded(reason, status=EXIT_QUARANTINED)

    async def close(self) -> None:
        """Leave the mesh and stop the tasks."""
        await self.registration.close()
        for task in self._tasks:
            task.cancel()
