"""A router that is gone takes what it has asked for with it; one that is only out of sight does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import structlog
import structlog.testing

from common.bus.kept_record import PUT_EVERY_S, KeptRecord
from common.bus.memory import MemoryServer
from common.bus.port import Bucket
from common.bus.refusals import Refusals
from common.bus.storage import ROUTER_TTL_S, ROUTERS_CONFIG
from common.runtime.lifecycle import EXIT_FAILED, Lifecycle, serve
from common.runtime.metrics import Metrics
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts.codec import decode, encode
from contracts.handoff import HandoffState, ReleaseHandoff, RunMixed, RunPrefill
from contracts.requests import Accepted, Refused
from contracts.routers import RouterRecord
from services.broker.router_presence import RouterPresence
from services.router import app
from services.router.settings import RouterSettings
from services.router.token_inbox import TokenInbox
from services.router.twin import check_unique
from tests.integration.broker_world import HANDOFF, ROUTER, World, in_world
from tests.integration.router_world import router_world, write_model

FIRST, SECOND = "start-1", "start-2"
_SLACK_S: Final = 0.5
PLAIN = {"model": "tiny", "prompt": "hello"}


async def _routers(world: World) -> Bucket:
    return await world.bus.ensure_bucket(ROUTERS_CONFIG)


async def _live(world: World, incarnation: str, seconds: float) -> None:
    """Do as a router does, for some seconds."""
    bucket = await _routers(world)
    for _ in range(round(seconds / PUT_EVERY_S)):
        await bucket.put(ROUTER, encode(RouterRecord(router_id=ROUTER, incarnation=incarnation)))
        await world.clock.sleep(PUT_EVERY_S)


async def _computing(world: World, **changes: Any) -> None:
    answer = await world.submit(router_incarnation=FIRST, **changes)
    assert answer == Accepted(handoff_id=HANDOFF)
    await world.until(lambda: bool(world.prefill.of(RunPrefill) or world.mixed.of(RunMixed)))


async def _cancelled(world: World) -> None:
    """Everybody lets go, and the record says why."""
    await world.until(lambda: world.broker.num_in_flight == 0)
    record = await world.record()
    assert record.state is HandoffState.CANCELLED
    assert record.error is None or FIRST in record.error.message
    for worker in (world.prefill, world.decode):
        assert len(worker.of(ReleaseHandoff)) == 1


def test_a_router_that_falls_silent_takes_its_handoffs_with_it() -> None:
    """Its memory is back after its time to live; while it writes its record, nothing is taken from it."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await _computing(world)
        await _live(world, FIRST, 3 * ROUTER_TTL_S)
        assert world.broker.num_in_flight == 1
        died_at = world.clock.monotonic() - PUT_EVERY_S
        await _cancelled(world)
        assert world.clock.monotonic() - died_at <= ROUTER_TTL_S + _SLACK_S

    in_world(scenario)


def test_a_router_that_never_wrote_its_record_is_missed_too() -> None:
    """It named its start in the submit, and died before it was heard of."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await _computing(world)
        await _cancelled(world)

    in_world(scenario)


def test_another_start_ends_what_the_one_before_has_asked_for() -> None:
    """Nobody need wait for the time to live; what the new start asks for goes on."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await _live(world, FIRST, PUT_EVERY_S)
        await _computing(world)
        began = world.clock.monotonic()
        await (await _routers(world)).put(ROUTER, encode(RouterRecord(router_id=ROUTER, incarnation=SECOND)))
        await _cancelled(world)
        assert world.clock.monotonic() - began <= _SLACK_S
        names = {"handoff_id": "r2-0", "request_id": "r2", "router_incarnation": SECOND}
        assert not isinstance(await world.submit(mixed=True, **names), Refused)
        await _live(world, SECOND, 2 * ROUTER_TTL_S)
        assert world.broker.num_in_flight == 1

    in_world(scenario)


def test_a_router_that_signs_off_leaves_nothing_behind() -> None:
    """Its record is removed at the end of a drain: what is left then is cancelled at once."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await _live(world, FIRST, PUT_EVERY_S)
        await _computing(world)
        await (await _routers(world)).delete(ROUTER)
        await _cancelled(world)

    in_world(scenario)


def test_a_new_broker_misses_a_router_that_died_with_the_old_one() -> None:
    """Nobody heard of the router since, and its record has expired: the handoff that it left is found all the same."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await _computing(world)
        await world.stop_broker()
        await world.clock.sleep(2 * ROUTER_TTL_S)
        await world.start_broker()
        assert world.broker.num_in_flight == 1
        await world.until(lambda: world.broker.num_in_flight == 0)
        assert (await world.record()).state is HandoffState.CANCELLED

    in_world(scenario)


def test_an_outage_of_the_bus_says_nothing_of_routers() -> None:
    """Nobody could be heard: the handoff goes on when the bus is back, and so does its router."""

    async def scenario(world: World, server: MemoryServer) -> None:
        await _live(world, FIRST, PUT_EVERY_S)
        await _computing(world)
        server.go_down()
        await world.clock.sleep(2 * ROUTER_TTL_S)
        server.come_back()
        await _live(world, FIRST, 3 * ROUTER_TTL_S)
        assert world.broker.num_in_flight == 1

    in_world(scenario)


def test_silence_while_the_broker_stood_still_says_nothing() -> None:
    """A frozen broker that goes on takes no router for dead; one that stays silent afterwards is gone."""

    async def scenario(clock: VirtualClock) -> None:
        gone: list[tuple[str, str]] = []
        presence = RouterPresence(
            MemoryServer(clock).connect(),
            clock,
            structlog.get_logger(),
            on_gone=lambda router_id, start: gone.append((router_id, start)),
        )
        presence.heard(RouterRecord(router_id=ROUTER, incarnation=FIRST))
        await clock.sleep(2 * ROUTER_TTL_S)
        for _ in range(10):
            presence.judge_silence()
            await clock.sleep(0.1)
        assert gone == []
        for _ in range(round(2 * ROUTER_TTL_S / 0.1)):
            presence.judge_silence()
            await clock.sleep(0.1)
        assert gone == [(ROUTER, FIRST)]

    run_virtual(scenario)


def test_a_kept_record_is_written_again_and_removed_by_its_owner_alone() -> None:
    """It outlives its time to live while its process runs; what another start has written there since stays."""

    async def scenario(clock: VirtualClock) -> None:
        server = MemoryServer(clock)
        bucket = await server.connect().ensure_bucket(ROUTERS_CONFIG)
        starts = [KeptRecord(server.connect(), structlog.get_logger(), ROUTERS_CONFIG, _record_of(i)) for i in range(2)]
        async with asyncio.TaskGroup() as group:
            await starts[0].open()
            task = group.create_task(starts[0].run())
            await clock.sleep(3 * ROUTER_TTL_S)
            assert await bucket.get(ROUTER) is not None
            task.cancel()
        await starts[1].open()
        await starts[0].close()
        entry = await bucket.get(ROUTER)
        assert entry is not None
        assert decode(entry.value, RouterRecord).incarnation == "i1"
        await starts[1].close()
        assert await bucket.get(ROUTER) is None

    run_virtual(scenario)


def _record_of(number: int) -> Any:
    value = encode(RouterRecord(router_id=ROUTER, incarnation=f"i{number}"))
    return lambda: (ROUTER, value)


async def test_a_router_keeps_its_record_and_names_its_start_in_each_submit(tmp_path: Path) -> None:
    """Written before requests are taken; each start draws a name of its own."""
    starts = set()
    for number in range(2):
        async with router_world(tmp_path / str(number)) as world:
            bucket = await world.mesh.bus.ensure_bucket(ROUTERS_CONFIG)
            entry = await bucket.get("router-0")
            assert entry is not None
            starts.add(decode(entry.value, RouterRecord).incarnation)
            assert (await world.post("/v1/completions", PLAIN))[0] == 200
            assert world.mesh.submits[0].router_incarnation in starts
    assert len(starts) == 2


@asynccontextmanager
async def _first_router(
    server: MemoryServer, clock: VirtualClock
) -> AsyncIterator[tuple[KeptRecord, Callable[[str], None]]]:
    """A router as far as its id is concerned: it listens for tokens and keeps its record, unless that is stopped."""
    bus = server.connect()
    refusals = Refusals(structlog.get_logger(), clock, Metrics())
    inbox = TokenInbox(bus, refusals, router_id=ROUTER, max_waiting_frames=8)
    record = KeptRecord(bus, structlog.get_logger(), ROUTERS_CONFIG, _record_of(1))
    await record.open()
    async with asyncio.TaskGroup() as group:
        tasks = {
            "tokens": group.create_task(inbox.run(await inbox.open())),
            "lease": group.create_task(record.run()),
        }
        await clock.sleep(2.5 * PUT_EVERY_S)
        yield record, lambda name: _stop(tasks[name])
        for task in tasks.values():
            task.cancel()


def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()


async def _start_of(server: MemoryServer, clock: VirtualClock, model: Path, router_id: str) -> list[str]:
    """Start a router; return what its log says of a start that ends early. Another one never gets as far as HTTP here."""
    with structlog.testing.capture_logs() as lines:

        async def main(lifecycle: Lifecycle) -> None:
            await app.start(
                RouterSettings(model=model, router_id=router_id, port=0),
                lifecycle,
                bus=server.connect(),
                clock=clock,
                log=structlog.get_logger(),
                registry=Metrics(),
                entropy=bytes,
            )

        assert await serve(main, log=structlog.get_logger(), handle_signals=False) == EXIT_FAILED
    return [f"{line['event']} {line.get('error', '')}" for line in lines]


def test_a_second_router_of_an_id_does_not_begin(tmp_path: Path) -> None:
    """It ends before it serves, and says who has the id and what to change; the first one keeps its record and is not disturbed."""
    model = write_model(tmp_path / "tiny")

    async def scenario(clock: VirtualClock) -> None:
        server = MemoryServer(clock)
        async with _first_router(server, clock):
            lines = await _start_of(server, clock, model, ROUTER)
            assert "router_id_taken " in lines
            (failed,) = [line for line in lines if line.startswith("task_failed")]
            for part in ("RouterIdTakenError", "router_id: 'router-0'", "the start i1 is at work", "PD_ROUTER_ID"):
                assert part in failed
            assert not [line for line in lines if line.startswith("message_refused")]
            await clock.sleep(2 * ROUTER_TTL_S)
            entry = await (await server.connect().ensure_bucket(ROUTERS_CONFIG)).get(ROUTER)
            assert entry is not None
            assert decode(entry.value, RouterRecord).incarnation == "i1"

    run_virtual(scenario)


@pytest.mark.parametrize(
    ("stopped", "signs_off", "within_s"),
    [(("lease", "tokens"), False, 0.1), (("lease", "tokens"), True, 0.1), (("lease",), False, 2 * PUT_EVERY_S)],
)
def test_a_router_takes_the_id_of_one_that_is_not_at_work(
    stopped: tuple[str, ...], signs_off: bool, within_s: float
) -> None:
    """At once where the other one was killed or has signed off; where it stands still, once it has put no record for a while."""

    async def scenario(clock: VirtualClock) -> None:
        server = MemoryServer(clock)
        async with _first_router(server, clock) as (record, stop):
            for name in stopped:
                stop(name)
            if signs_off:
                await record.close()
            await clock.sleep(0.1)
            began = clock.monotonic()
            await check_unique(ROUTER, server.connect(), structlog.get_logger())
            assert clock.monotonic() - began <= within_s

    run_virtual(scenario)


def test_a_router_is_not_mistaken_for_one_of_another_id() -> None:
    """Routers side by side have ids of their own."""

    async def scenario(clock: VirtualClock) -> None:
        server = MemoryServer(clock)
        async with _first_router(server, clock):
            await check_unique("router-1", server.connect(), structlog.get_logger())

    run_virtual(scenario)
