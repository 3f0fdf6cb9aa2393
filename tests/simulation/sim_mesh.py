"""The whole mesh in one process: the real shells, each in a simulated process of its own, and somebody who starts them again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from common.bus.faults import SeededFaults
from common.engine.port import EngineDeadError
from common.runtime.clock import Clock
from common.runtime.lifecycle import ServiceEnded
from common.runtime.offload import inline
from common.worker.core.admission import Command
from common.worker.engines import start_engines
from common.worker.host import WorkerHost
from common.worker.service import WorkerParts, WorkerService
from common.worker.settings import EngineKind, PulledRoles, WorkerSettings
from contracts.errors import PdmeshError
from contracts.pull import Transfer
from services.broker.app import make_leadership
from services.broker.leadership import Leadership
from services.broker.settings import BrokerSettings
from services.decode.service import DecodeService
from services.mixed.service import MixedService
from services.prefill.service import PrefillService
from tests.simulation.bounds import BoundsObserver
from tests.simulation.plane import Plane
from tests.simulation.processes import Process, simulation_loop
from tests.simulation.schedule import BLOCK_SIZE, Pulls, Schedule, WorkerPlan
from tests.simulation.silent_metrics import SilentMetrics
from tests.simulation.sim_bus import SimulatedBus, SimulatedServer
from tests.simulation.sim_engine import SimulatedEngine
from tests.simulation.sim_router import MODEL, Client, SimulatedRouter, open_router
from tests.simulation.terms import KEEP_ENDED_S, TermLog
from tests.simulation.verdicts import Verdicts

_RESTART_S: Final = 0.5
_LEAVE_S: Final = 2.0
RELEASE_TIMEOUT_S: Final = 10.0
RESERVE_WAIT_S: Final = 4.0
"""How long a reservation waits for memory on a decode worker."""
_KINDS: Final[dict[str, type[WorkerService]]] = {
    "prefill": PrefillService,
    "decode": DecodeService,
    "mixed": MixedService,
}


@dataclass(eq=False)
class Seat:
    """A service by name, and its present start. `host` and `engines` are of a worker, `leadership` and `term` of a broker, `router` of a router."""

    name: str
    num_starts: int = 0
    process: Process | None = None
    bus: SimulatedBus | None = None
    life: asyncio.Task[None] | None = None
    service: WorkerService | None = None
    host: WorkerHost | None = None
    engines: tuple[SimulatedEngine, ...] = ()
    leadership: Leadership | None = None
    term: TermLog | None = None
    router: SimulatedRouter | None = None
    clients: list[Client] = field(default_factory=list)
    frozen_until: float = 0.0

    @property
    def is_up(self) -> bool:
        """Whether it has a process that has not ended."""
        return self.process is not None and not self.process.is_dead


class SimulatedMesh:
    """Everybody, and the network between them."""

    def __init__(self, schedule: Schedule, verdicts: Verdicts, clock: Clock, plane: Plane) -> None:
        self.schedule = schedule
        self.verdicts = verdicts
        self.clock = clock
        self.plane = plane
        self.noise = SeededFaults(random.Random(schedule.seed + 1))
        self.server = SimulatedServer(clock, self.noise, BoundsObserver(verdicts))
        self.seats = {name: Seat(name) for name in schedule.processes}
        self.everybody: list[Process] = []
        self.clients: list[Client] = []
        self._rng = random.Random(schedule.seed + 2)
        self._workers = {worker.worker_id: worker for worker in schedule.workers}

    def start(self, name: str) -> None:
        """Let a service begin, as another start of it, unless it runs."""
        seat = self.seats[name]
        if seat.is_up:
            return
        seat.num_starts += 1
        process = seat.process = Process(name)
        self.everybody.append(process)
        bus = seat.bus = self.server.link()
        self.verdicts.say(name, f"start {seat.num_starts}")
        seat.life = process.spawn(self._life(seat, process, self._body(seat, bus)))

    def kill(self, name: str, *, restart_s: float) -> bool:
        """Let a service die at once, and start it again later. Says whether there was one."""
        seat = self.seats[name]
        if seat.process is None or seat.process.is_dead:
            return False
        self.verdicts.say(name, "killed")
        seat.process.is_dead = True
        self._end(seat, restart_s)
        return True

    def drain(self, name: str, *, limit_s: float) -> bool:
        """Let a service end in order: it drains, at most so long, takes its leave, and is started again. Says whether it runs."""
        seat = self.seats[name]
        if seat.process is None or not seat.process.runs:
            return False
        seat.process.spawn(self._leave(seat, seat.process, limit_s))
        return True

    async def _leave(self, seat: Seat, process: Process, limit_s: float) -> None:
        host, leadership, router, life = seat.host, seat.leadership, seat.router, seat.life
        try:
            async with asyncio.timeout(limit_s):
                if host is not None:
                    await host.drain()
                if leadership is not None:
                    await leadership.drain()
                if router is not None:
                    await router.drain(limit_s)
            self.verdicts.saw("drained" if router is None else "router_drained")
            left = [client.ask.number for client in seat.clients if not client.ended]
            if left and seat.process is process:
                self.verdicts.broken("I5", f"{seat.name} has drained, and requests {left} go on")
        except TimeoutError:
            self.verdicts.saw("drain_cut_short")
        if life is not None:
            life.cancel()
        with suppress(PdmeshError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                if host is not None:
                    await host.registration.close()
                if leadership is not None:
                    await leadership.release()
                if router is not None:
                    await router.close()
        if seat.process is process and not process.is_dead:
            process.is_dead = True
            self.verdicts.say(seat.name, "has left")
            self._end(seat, _RESTART_S)

    def _end(self, seat: Seat, restart_s: float) -> None:
        if seat.bus is not None:
            seat.bus.vanish()
        for engine in seat.engines:
            engine.lose()
        seat.service, seat.host, seat.engines, seat.leadership, seat.router = None, None, (), None, None
        self.plane.still.forget(seat.name)
        for client in seat.clients:
            client.end("router died")
        seat.clients.clear()
        simulation_loop().call_outside(restart_s, lambda: self.start(seat.name))

    async def _life(self, seat: Seat, process: Process, body: Callable[[asyncio.TaskGroup], Awaitable[None]]) -> None:
        """One start of a service, until something in it ends it."""
        how = "ended"
        try:
            async with asyncio.TaskGroup() as group:
                await body(group)
        except* (ServiceEnded, EngineDeadError) as errors:
            how = repr(errors.exceptions[0])
        except* PdmeshError as errors:
            how = repr(errors.exceptions[0])
        except* Exception as errors:  # noqa: BLE001 - whatever it is, it must not happen
            self.verdicts.broken("no mistakes", f"{seat.name} ended with {errors.exceptions!r}")
        if seat.process is process and not process.is_dead:
            process.is_dead = True
            self.verdicts.saw("exit")
            self.verdicts.say(seat.name, f"exit: {how}")
            self._end(seat, _RESTART_S)

    def _body(self, seat: Seat, bus: SimulatedBus) -> Callable[[asyncio.TaskGroup], Awaitable[None]]:
        worker = self._workers.get(seat.name)
        if worker is not None:
            return lambda group: self._run_worker(seat, bus, worker, group)
        if seat.name in self.schedule.brokers:
            return lambda group: self._run_broker(seat, bus, group)
        return lambda group: self._run_router(seat, bus, group)

    async def _run_worker(self, seat: Seat, bus: SimulatedBus, plan: WorkerPlan, group: asyncio.TaskGroup) -> None:
        settings = WorkerSettings(
            worker_id=plan.worker_id,
            model=Path("fake"),
            engine=EngineKind.FAKE,
            tp=plan.tp,
            dp=plan.dp,
            dcp=plan.dcp,
            block_size=BLOCK_SIZE,
            num_blocks=plan.num_blocks,
            num_slots=plan.num_slots,
            prefill_chunk_tokens=plan.chunk_tokens,
            reserve_wait_s=RESERVE_WAIT_S,
            release_timeout_ms=20,
            deadline_grace_s=2.0,
            reserve_output_tokens=plan.reserved_output_tokens,
            served_model_name=MODEL,  # else each of its records would look for where the model lies
            **_guess_settings(plan),
            **_pull_settings(plan),
        )
        incarnation = f"i{seat.num_starts}-{plan.worker_id}"
        engines = tuple(SimulatedEngine(self.plane, plan, incarnation, rank) for rank in range(plan.dp))
        seat.engines = engines
        log = self.verdicts.log(seat.name)
        service = _KINDS[plan.role](
            WorkerParts(
                settings=settings,
                incarnation=incarnation,
                engines=await start_engines(engines),
                bus=bus,
                clock=self.clock,
                log=log,
                metrics=SilentMetrics(),
                group=group,
                offload=inline,
                set_log_level=lambda _level: None,
            )
        )
        watch_fences(service, self.verdicts)
        seat.service = service
        seat.host = WorkerHost(service, bus, group, log)
        await seat.host.open()

    async def _run_broker(self, seat: Seat, bus: SimulatedBus, group: asyncio.TaskGroup) -> None:
        del group
        settings = BrokerSettings(
            broker_id=seat.name,
            call_timeout_s=0.5,
            release_timeout_s=RELEASE_TIMEOUT_S,
            store_timeout_s=2.0,
            keep_ended_s=KEEP_ENDED_S,
        )
        seat.term = TermLog(self.verdicts, seat.name, self.server)
        seat.leadership = make_leadership(
            settings,
            bus=bus,
            clock=self.clock,
            log=seat.term,
            metrics=SilentMetrics(),
            offload=inline,
        )
        await seat.leadership.run()

    async def _run_router(self, seat: Seat, bus: SimulatedBus, group: asyncio.TaskGroup) -> None:
        rng = random.Random(self._rng.getrandbits(64))
        seat.router = await open_router(seat.name, bus, self.clock, self.verdicts.log(seat.name), group, rng)

    # What is to be seen.

    @property
    def has_route(self) -> bool:
        """Whether every router has a way for a request."""
        routers = [self.seats[name].router for name in self.schedule.routers]
        return all(router is not None and router.has_route for router in routers)

    @property
    def is_well(self) -> bool:
        """Whether the bus answers, everybody runs and is connected, and a broker leads. What they make of it is another question."""
        seats = self.seats.values()
        return (
            self.server.answers
            and all(seat.is_up and seat.process is not None and seat.process.runs for seat in seats)
            and all(seat.bus is not None and not seat.bus.is_cut for seat in seats)
            and any(self.leads(name) for name in self.schedule.brokers)
        )

    def leads(self, name: str) -> bool:
        """Whether a broker leads, as far as it knows."""
        leadership = self.seats[name].leadership
        return leadership is not None and leadership.broker is not None

    def unrest(self, *, prompts: bool = True) -> str:
        """Who still holds or does something; "" once everything is as it was in the beginning.

        Without `prompts`, those do not count that nobody has asked to run: each waits for a while before its worker asks what became of it.
        """
        leaders = [seat.leadership.broker for seat in self.seats.values() if seat.leadership is not None]
        brokers = [broker for broker in leaders if broker is not None]
        if not brokers:
            return "no broker leads"
        for broker in brokers:
            if broker.num_in_flight or broker._driver.num_running:
                num_effects = broker._driver.num_running
                return (
                    f"{broker.broker_id} has {broker.num_in_flight} handoffs in flight, and does {num_effects} things"
                )
        if self.plane.transfers:
            return f"{len(self.plane.transfers)} transfers are under way"
        for name in self._workers:
            found = self._unrest_of(self.seats[name], prompts=prompts)
            if found:
                return f"{name}: {found}"
        for name in self.schedule.routers:
            router = self.seats[name].router
            found = "it is not there" if router is None else router.unrest
            if found:
                return f"{name}: {found}"
        return ""

    @staticmethod
    def _unrest_of(seat: Seat, *, prompts: bool) -> str:
        service = seat.service
        if service is None:
            return "it is not there"
        load = service.replicas.load
        if (load.num_free_blocks, load.num_free_slots) != (service.replicas.num_blocks, service.replicas.num_slots):
            return f"{load.num_free_blocks} blocks and {load.num_free_slots} slots are free"
        num_prompts = len(service.prompts) if prompts else 0
        if len(service.table) or num_prompts or len(service.tokens):
            return f"{len(service.table)} handoffs, {num_prompts} prompts, {len(service.tokens)} streams"
        owned = sum(engine.memory.num_owned for engine in seat.engines)
        return f"{owned} sequences own memory of the ranks" if owned else ""

    def check_terms(self) -> None:
        """Note what a broker that has begun to lead has left behind."""
        for name in self.schedule.brokers:
            seat = self.seats[name]
            broker = None if seat.leadership is None else seat.leadership.broker
            if broker is not None and seat.term is not None:
                seat.term.judge(broker)

    def check_pools(self) -> None:
        """Raise nothing, but note a block that has no place, or two."""
        for name in self._workers:
            service = self.seats[name].service
            if service is not None:
                try:
                    service.replicas.check_integrity()
                except AssertionError as error:
                    self.verdicts.broken("I1", f"{name}: {error}")


def _guess_settings(plan: WorkerPlan) -> dict[str, Any]:
    """What a worker that guesses is told."""
    if not plan.guesses.depth:
        return {}
    return {"num_speculative_tokens": plan.guesses.depth, "drafter": plan.guesses.drafter.value}


def _pull_settings(plan: WorkerPlan) -> dict[str, Any]:
    """What only a decode worker is told."""
    if plan.role != "decode":
        return {}
    if plan.pulls is Pulls.NOTHING:
        return {"verify_cache": plan.verifies}
    return {
        "transfer": Transfer.PULL,
        "pull": PulledRoles(plan.pulls.value),
        "parallel_shard_pull": plan.is_parallel,
        "verify_cache": plan.verifies,
    }


def watch_fences(service: WorkerService, verdicts: Verdicts) -> None:
    """Hold every command that a worker takes against the highest fence that it has taken: a deposed broker must not be obeyed."""
    inner, admits = service.check_command, service.table.admits_fence
    highest = 0

    def admits_fence(fence: int) -> bool:
        nonlocal highest
        highest = max(highest, fence)
        return admits(fence)

    async def check(command: Command) -> None:
        await inner(command)
        if command.fence < highest:
            text = f"{service.settings.worker_id} obeyed fence {command.fence} after {highest} for {command.handoff_id}"
            verdicts.broken("fences", text)

    table: Any = service.table  # watches around methods of these objects alone
    table.admits_fence = admits_fence
    watched: Any = service
    watched.check_command = check
