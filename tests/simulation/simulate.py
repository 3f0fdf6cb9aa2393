"""Runs a schedule from the first start to the last pool at its baseline, and judges it."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Final

from common.runtime.virtual_time import VirtualClock
from services.broker import driver as broker_driver
from services.broker.core.events import Event
from services.broker.core.handoff import Handoff
from services.broker.core.step import step
from services.broker.core.turn import Outcome
from tests.simulation.bounds import watched_tasks
from tests.simulation.coverage import UNREACHABLE, pair_of
from tests.simulation.faults import FaultPlayer
from tests.simulation.liveness import Liveness, check_way
from tests.simulation.plane import Plane
from tests.simulation.processes import SimulationLoop, simulation_loop
from tests.simulation.schedule import BLOCK_SIZE, NUM_FAULTS, NUM_REQUESTS, Ask, Schedule, make_schedule
from tests.simulation.sim_mesh import SimulatedMesh
from tests.simulation.sim_router import Client
from tests.simulation.terms import LOOKED_OVER_S, open_records
from tests.simulation.verdicts import Verdicts

_OPENING_S: Final = 30.0
_STEP_S: Final = 0.25
_GRACE_S: Final = 1.0
_SETTLING_S: Final = 40.0
_REAPING_S: Final = 30.0
_PASSAGE_S: Final = 30.0
_PASSAGE_EVERY: Final = 3
"""Schedules of which one ends with a request more: it costs as much as a tenth of the others together."""
_RECORDS_S: Final = 1.0
_TURNS: Final = 3
_ASK_AGAIN_S: Final = 0.25


def simulate(seed: int, *, traced: bool = False, checks: bool = True) -> Verdicts:
    """Run the schedule of a seed. Without `checks` the data plane lets stale writes in: a planted fault."""
    verdicts = Verdicts(traced=traced)
    run_schedule(make_schedule(seed), verdicts, checks=checks)
    return verdicts


def run_schedule(schedule: Schedule, verdicts: Verdicts, *, checks: bool = True) -> None:
    """Run a schedule; what it comes to is in `verdicts`."""
    loop = SimulationLoop()
    clock = VirtualClock(loop)
    verdicts.clock = clock
    plane = Plane(
        random.Random(schedule.seed + 3),
        verdicts,
        revocable=schedule.revocable,
        needs_peer=schedule.needs_peer,
        checks=checks,
    )

    def noted(handoff: Handoff, event: Event) -> Outcome:
        pair = pair_of(handoff, event)
        if pair is None:
            verdicts.saw("came_after_it_made_way")
        else:
            verdicts.pairs.add(pair)
            if pair in UNREACHABLE:
                verdicts.broken(
                    "coverage", f"{handoff.handoff_id} met {pair[1]} while {pair[0]}: that was thought impossible"
                )
        return step(handoff, event)

    broker_driver.__dict__["step"] = noted  # where the broker calls it
    try:
        mesh = SimulatedMesh(schedule, verdicts, clock, plane)
        with watched_tasks(verdicts):
            loop.run_until_complete(_play(mesh))
        for mistake in (*loop.mistakes, *(each for process in mesh.everybody for each in process.failures())):
            verdicts.broken("no mistakes", mistake)
        loop.run_until_complete(_reap(mesh))
    finally:
        broker_driver.__dict__["step"] = step
        loop.close()


async def _play(mesh: SimulatedMesh) -> None:
    schedule, clock, loop = mesh.schedule, mesh.clock, simulation_loop()
    for name in schedule.processes:
        mesh.start(name)
    while not mesh.has_route:
        await clock.sleep(_STEP_S)
        if clock.monotonic() > _OPENING_S:
            mesh.verdicts.broken("I5", "no route was found before anything had gone wrong")
            return
    began = clock.monotonic()
    clients = [Client(ask, mesh.verdicts) for ask in schedule.asks]
    for client in clients:
        loop.call_outside(client.ask.at_s, partial(_ask, mesh, client))
    faults = FaultPlayer(mesh)
    faults.plan(schedule.faults)
    liveness = Liveness(mesh, faults, clients)
    ends = began + max(ask.at_s + ask.timeout_s for ask in schedule.asks)
    last = max(ends, began + max(fault.at_s + fault.for_s for fault in schedule.faults))
    while True:
        await clock.sleep(_STEP_S)
        mesh.check_pools()
        mesh.check_terms()
        _check_deadlines(mesh, clients)
        liveness.look()
        now = clock.monotonic()
        over = all(client.ended for client in clients) and faults.num_playing == 0
        unrest = mesh.unrest() if over else "requests or faults are under way"
        if not unrest:
            break
        if over:
            liveness.look_over()
        if now > last + _SETTLING_S:
            mesh.verdicts.broken("I6", unrest)
            break
    for client in clients:
        if not client.ended:
            mesh.verdicts.broken("I5", f"request {client.ask.number} never ended")
    await check_way(mesh)
    num_asked = mesh.verdicts.seen["asked"]
    if num_asked < NUM_REQUESTS[0] or faults.num_acted < NUM_FAULTS[0]:
        mesh.verdicts.broken("coverage", f"{num_asked} requests and {faults.num_acted} faults are not a whole schedule")
    if not schedule.seed % _PASSAGE_EVERY:
        await _check_passage(mesh)
    await _check_records(mesh)


def _ask(mesh: SimulatedMesh, client: Client) -> None:
    seat = mesh.seats[client.ask.router]
    if seat.router is None or seat.process is None or seat.process.is_dead or seat.router.is_draining:
        mesh.verdicts.saw("router_not_there")  # whoever asks tries again
        simulation_loop().call_outside(_ASK_AGAIN_S, partial(_ask, mesh, client))
        return
    client.asked_at = mesh.clock.monotonic()
    mesh.verdicts.saw("asked")
    seat.clients.append(client)
    mesh.clients.append(client)
    client.task = seat.process.spawn(seat.router.serve(client))
    client.task.add_done_callback(client.let_go)
    if client.ask.leaves_after_s is not None:
        simulation_loop().call_outside(client.ask.leaves_after_s, client.task.cancel)


def _check_deadlines(mesh: SimulatedMesh, clients: list[Client]) -> None:
    """A request has ended by its deadline, unless its router stands still: that says nothing to anybody."""
    now = mesh.clock.monotonic()
    for client in clients:
        seat = mesh.seats[client.ask.router]
        due = max(client.due or client.asked_at, seat.frozen_until)
        if client.asked_at and not client.ended and now > due + _GRACE_S:
            mesh.verdicts.broken("I5", f"request {client.ask.number} goes on after its deadline")
            client.end("overdue")


async def _check_passage(mesh: SimulatedMesh) -> None:
    """To see a way is not to go it: one more request, of one of the routers, gets its answer."""
    schedule = mesh.schedule
    ask = Ask(
        number=len(schedule.asks),
        router=schedule.routers[-1],
        at_s=0.0,
        num_prompt_tokens=BLOCK_SIZE + 1,
        max_tokens=2,
        seed=schedule.seed,
        temperature=0.0,
        timeout_s=_PASSAGE_S,
        leaves_after_s=None,
    )
    client = Client(ask, mesh.verdicts)
    mesh.verdicts.corrupts = False
    _ask(mesh, client)
    until = mesh.clock.monotonic() + _PASSAGE_S + _GRACE_S
    while not client.ended and mesh.clock.monotonic() < until:
        await mesh.clock.sleep(_STEP_S)
    if not client.has_answer:
        how = client.ended or "nothing"
        mesh.verdicts.broken("liveness", f"all is over, and a request that is asked now ends with {how}")


async def _check_records(mesh: SimulatedMesh) -> None:
    """Every record says in the end that its handoff is over.

    One that a leader could not write, and one that a deposed leader wrote as its last, wait for the leader's later look at the bucket.
    """
    until = mesh.clock.monotonic() + LOOKED_OVER_S
    is_told = False
    while left := open_records(mesh.server):
        if not is_told:
            is_told = True
            mesh.verdicts.saw("record_left_open")
        if mesh.clock.monotonic() > until:
            for record, _ in left:
                mesh.verdicts.broken("I5", f"the record of {record.handoff_id} says {record.state} for ever")
            return
        await mesh.clock.sleep(_RECORDS_S)


async def _reap(mesh: SimulatedMesh) -> None:
    """End every task in order, those of the dead too: nothing that they say is heard."""
    mesh.verdicts.closed = True
    for process in mesh.everybody:
        simulation_loop().go_on(process)
    for client in mesh.clients:  # first: what they begin when they leave needs a process that goes on
        if client.task is not None:
            client.task.cancel()
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    for seat in mesh.seats.values():
        if seat.bus is not None:
            seat.bus.vanish()
    for _ in range(_TURNS):  # a task group that fails while it is cancelled forgets that it was, before Python 3.13
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_REAPING_S)
