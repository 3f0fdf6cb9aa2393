"""Two brokers of one partition: one leads, the other one stands by and takes over; in virtual time, and as processes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from common.bus.errors import BusTimeout, NoResponders, StorageRefused
from common.bus.memory import MemoryServer
from common.bus.server import NatsServer
from common.bus.storage import LEASE_TTL_S
from common.runtime.metrics import Metrics
from common.runtime.offload import inline
from contracts import subjects
from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import CommitHandoff, HandoffState, ReleaseHandoff, ReserveDecode, RunPrefill
from contracts.requests import Accepted
from contracts.subjects import WorkerVerb
from services.broker.app import make_leadership
from services.broker.settings import BrokerSettings
from tests.integration.broker_world import HANDOFF, World, in_world
from tests.integration.leadership_world import Candidate, fences, follow, leader_of, two

OK = Accepted(handoff_id=HANDOFF)
LOST = ErrorInfo(code=ErrorCode.WORKER_LOST, message="gone")
LEADING = ("standing_by", "leadership_began", "leadership_ended", "leadership_lost")
SOON_S = 0.2 * LEASE_TTL_S


def test_only_the_leader_is_asked() -> None:
    """The other one subscribes to nothing, however long it stands by; everybody can see who leads."""

    async def scenario(world: World, server: MemoryServer) -> None:
        first, second = await two(world, server)
        await world.clock.sleep(10 * LEASE_TTL_S)
        assert await leader_of(world) == "broker-0"
        assert (first.leads, second.leads) == (True, False)
        await second.die()
        assert await leader_of(world) == "broker-0"
        await first.die()
        with pytest.raises(NoResponders):
            await leader_of(world)
        entry = server.buckets[subjects.LEASES_BUCKET].last("broker.0")
        assert entry is not None
        assert json.loads(entry.value)["holder"] == "broker-0"
        assert b"pdmesh_broker_leads 0.0" in first.metrics.exposition()
        assert b"pdmesh_broker_terms_total 1.0" in first.metrics.exposition()

    in_world(scenario, with_broker=False)


def test_who_leads_and_who_stands_by_is_logged() -> None:
    """The one that stands by says so once and for whom, and both say when they begin and end to lead."""

    async def scenario(world: World, server: MemoryServer) -> None:
        with capture_logs() as lines:
            first, second = await two(world, server)
            await world.clock.sleep(3 * LEASE_TTL_S)
            assert [(line["event"], line.get("leader")) for line in lines if line["event"] in LEADING] == [
                ("leadership_began", None),
                ("standing_by", "broker-0"),
            ]
            lines.clear()
            await first.stop()
            await follow(world, second)
            assert [line["event"] for line in lines if line["event"] in LEADING] == [
                "leadership_ended",
                "leadership_began",
            ]

    in_world(scenario, with_broker=False)


def test_the_second_takes_over_what_a_dead_leader_had_committed() -> None:
    """Within the ttl of the lease it leads, with a larger fence, and the handoff ends well."""

    async def scenario(world: World, server: MemoryServer) -> None:
        first, second = await two(world, server)
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        await world.publish_parts()
        assert await world.finish_prefill() == OK
        await world.until(lambda: bool(world.decode.of(CommitHandoff)))
        await first.die()
        died_at = world.clock.monotonic()
        await follow(world, second)
        assert world.clock.monotonic() - died_at <= LEASE_TTL_S + SOON_S
        assert await leader_of(world) == "broker-1"
        await world.until(lambda: len(set(fences(world, CommitHandoff))) == 2)
        assert await world.take_over() == OK
        assert await world.end() == OK
        await world.until(lambda: world.broker.num_in_flight == 0)
        assert (await world.record()).state is HandoffState.FINISHED
        assert max(fences(world, CommitHandoff)) > fences(world, ReserveDecode)[0]

    in_world(scenario, with_broker=False)


def test_the_second_goes_on_with_what_a_dead_leader_had_not_committed() -> None:
    """Decode answers with its grant, prefill with what it has reported: the request ends well, under the larger fence."""

    async def scenario(world: World, server: MemoryServer) -> None:
        first, second = await two(world, server)
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        await world.publish_parts(world.reports()[0])
        await first.die()
        await follow(world, second)
        await world.until(lambda: len(world.prefill.of(RunPrefill)) > 1)
        assert fences(world, RunPrefill)[-1] > fences(world, RunPrefill)[0]
        await world.publish_parts()
        assert await world.finish_prefill() == OK
        await world.until(lambda: bool(world.decode.of(CommitHandoff)))
        assert await world.take_over() == OK
        assert await world.end() == OK
        await world.until(lambda: world.broker.num_in_flight == 0)
        assert (await world.record()).state is HandoffState.FINISHED
        assert world.frames.empty()

    in_world(scenario, with_broker=False)


def test_what_had_failed_is_released_and_told_by_the_next_leader() -> None:
    """A leader that dies right after it wrote the end down: memory and the router do not wait for the deadline."""

    async def scenario(world: World, server: MemoryServer) -> None:
        first, second = await two(world, server)
        workers = (world.prefill, world.decode)
        answering = [worker.scripts[WorkerVerb.RELEASE] for worker in workers]
        for worker in workers:
            worker.scripts[WorkerVerb.RELEASE] = lambda _message: None
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        assert await world.finish_prefill(first_token=None, error=LOST) == OK
        await world.until(lambda: bool(world.prefill.of(ReleaseHandoff)) and bool(world.decode.of(ReleaseHandoff)))
        assert world.frames.get_nowait().error == LOST
        await first.die()
        for worker, script in zip(workers, answering, strict=True):
            worker.heard.clear()
            worker.scripts[WorkerVerb.RELEASE] = script
        await follow(world, second)
        await world.until(lambda: world.broker.num_in_flight == 0)
        assert world.prefill.of(ReleaseHandoff)
        assert world.decode.of(ReleaseHandoff)
        assert world.frames.get_nowait().error == LOST
        assert (await world.record()).error == LOST
        ends = [event.event for event in await world.events() if event.event is EventName.REQUEST_FAILED]
        assert len(ends) == 1

    in_world(scenario, with_broker=False)


def test_a_leader_that_is_told_to_stop_hands_over_at_once() -> None:
    """It ends its work and gives the lease back: the other one need not wait for the ttl."""

    async def scenario(world: World, server: MemoryServer) -> None:
        first, second = await two(world, server)
        began = world.clock.monotonic()
        await first.stop()
        await follow(world, second)
        assert world.clock.monotonic() - began <= SOON_S
        assert await leader_of(world) == "broker-1"
        await second.stop()
        with pytest.raises(NoResponders):
            await leader_of(world)

    in_world(scenario, with_broker=False)


def test_a_server_that_refuses_to_keep_the_lease_ends_the_process() -> None:
    """What a retry does not change is an error of the service, not a reason to stand by for ever."""

    async def scenario(world: World, server: MemoryServer) -> None:
        bus = server.connect()

        async def refuse(_config: object) -> None:
            raise StorageRefused("no room")

        bus.ensure_bucket = refuse  # type: ignore[method-assign,assignment]  # the server's answer
        leadership = make_leadership(
            BrokerSettings(), bus=bus, clock=world.clock, log=structlog.get_logger(), metrics=Metrics(), offload=inline
        )
        with pytest.raises(StorageRefused):
            await leadership.run()

    in_world(scenario, with_broker=False)


def test_a_term_that_cannot_be_opened_is_given_back() -> None:
    """The bus fails while the records are read: the lease is free for another one, and is tried for again."""

    async def scenario(world: World, server: MemoryServer) -> None:
        bus = server.connect()
        good, failures = bus.ensure_stream, [BusTimeout("no answer"), BusTimeout("no answer")]

        async def fail_twice(config: Any) -> None:
            if failures:
                raise failures.pop()
            await good(config)

        bus.ensure_stream = fail_twice  # type: ignore[method-assign]  # the server's answer
        candidate = Candidate(world, bus, "broker-0")
        await follow(world, candidate)
        assert b"pdmesh_broker_terms_total 3.0" in candidate.metrics.exposition()
        assert await leader_of(world) == "broker-0"

    in_world(scenario, with_broker=False)


async def test_two_broker_processes_on_one_server(tmp_path: Path) -> None:
    """Both are up, one of them leads; when it is told to stop, it exits with 0 and the other one leads."""

    async def started(broker_id: str, url: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "services.broker", f"nats_url={url},broker_id={broker_id}"),
            stderr=asyncio.subprocess.PIPE,
        )

    async def until_logged(process: asyncio.subprocess.Process, event: str) -> None:
        assert process.stderr is not None
        while json.loads(await process.stderr.readline())["event"] != event:
            pass

    with NatsServer(tmp_path / "nats") as server:
        processes: list[asyncio.subprocess.Process] = []
        try:
            async with asyncio.timeout(60):
                processes.append(await started("broker-0", server.url))
                await until_logged(processes[0], "leadership_began")
                processes.append(await started("broker-1", server.url))
                await until_logged(processes[1], "service_ready")
                processes[0].send_signal(signal.SIGTERM)
                await until_logged(processes[1], "leadership_began")
                await processes[0].communicate()
                assert processes[0].returncode == 0
                processes[1].send_signal(signal.SIGTERM)
                await processes[1].communicate()
                assert processes[1].returncode == 0
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    await process.communicate()
