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
from common.bus.port import Bus
from common.bus.server import NatsServer
from common.bus.storage import LEASE_TTL_S, WORKER_TTL_S
from common.runtime.metrics import Metrics
from common.runtime.offload import inline
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import CommitHandoff, HandoffState, ReleaseHandoff, ReserveDecode, RunPrefill
from contracts.requests import Accepted, Ping, Pong
from contracts.subjects import BrokerVerb, WorkerVerb
from services.broker.app import make_leadership
from services.broker.leadership import Leadership
from services.broker.settings import BrokerSettings
from tests.integration.broker_world import HANDOFF, World, in_world

OK = Accepted(handoff_id=HANDOFF)
LOST = ErrorInfo(code=ErrorCode.WORKER_LOST, message="gone")
LEADING = ("standing_by", "leadership_began", "leadership_ended", "leadership_lost")
SOON_S = 0.2 * LEASE_TTL_S


class Candidate:
    """One broker process, as far as leading goes."""

    def __init__(self, world: World, bus: Bus, broker_id: str) -> None:
        self.metrics = Metrics()
        self.bus = bus
        self.leadership: Leadership = make_leadership(
            BrokerSettings(broker_id=broker_id),
            bus=bus,
            clock=world.clock,
            log=structlog.get_logger(),
            metrics=self.metrics,
            offload=inline,
        )
        self.task = world.group.create_task(self.leadership.run(), name=broker_id)

    @property
    def leads(self) -> bool:
        """Whether it leads now."""
        return self.leadership.broker is not None

    async def die(self) -> None:
        """Stop without a word."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def stop(self) -> None:
        """End as a process does that was told to."""
        await self.leadership.drain()
        await self.die()
        await self.leadership.release()


async def two(world: World, server: MemoryServer) -> tuple[Candidate, Candidate]:
    """One that leads, one that stands by."""
    first = Candidate(world, server.connect(), "broker-0")
    await first.leadership.wait_settled()
    second = Candidate(world, server.connect(), "broker-1")
    await second.leadership.wait_settled()
    assert (first.leads, second.leads) == (True, False)
    assert first.leadership.broker is not None
    world.broker, world.broker_bus = first.leadership.broker, first.bus
    return first, second


async def leader_of(world: World) -> str:
    """Who answers."""
    reply = await world.bus.request(subjects.broker_rpc(BrokerVerb.PING), encode(Ping()), timeout=1.0)
    return decode(reply.data, Pong).broker_id


async def follow(world: World, candidate: Candidate) -> None:
    """Wait until this one leads."""
    await world.until(lambda: candidate.leads)
    assert candidate.leadership.broker is not None
    world.broker, world.broker_bus = candidate.leadership.broker, candidate.bus


def fences(world: World, kind: type[Any]) -> list[int]:
    """The fences of what the workers were told."""
    return [message.fence for worker in (world.prefill, world.decode) for message in worker.of(kind)]


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


def test_a_leader_that_cannot_renew_stops_before_anybody_else_begins() -> None:
    """A server that stands still: the leader ends its term by its own clock, and after the thaw one of both leads."""

    async def scenario(world: World, server: MemoryServer) -> None:
        first, second = await two(world, server)
        await world.clock.sleep(0.5 * LEASE_TTL_S)
        server.freeze()
        await world.clock.sleep(0.75 * LEASE_TTL_S)
        assert (first.leads, second.leads) == (False, False)
        await world.clock.sleep(2 * LEASE_TTL_S)
        server.thaw()
        await world.until(lambda: first.leads or second.leads)
        assert not (first.leads and second.leads)
        leader = first if first.leads else second
        await follow(world, leader)
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        assert b"pdmesh_broker_leads 1.0" in leader.metrics.exposition()

    in_world(scenario, with_broker=False)


@pytest.mark.parametrize("moment_s", [20.0, 21.25, 22.0, 23.75, 25.5, 27.75, 29.75])
def test_a_leader_takes_nobody_for_gone_while_the_server_stands_still(moment_s: float) -> None:
    """Its workers fall silent before its lease ends, whenever that begins; but so would it be itself, if anybody listened."""

    async def scenario(world: World, server: MemoryServer) -> None:
        alone = Candidate(world, server.connect(), "broker-0")
        await follow(world, alone)
        await world.clock.sleep(moment_s - world.clock.monotonic())
        server.freeze()
        with capture_logs() as frozen:
            await world.until(lambda: not alone.leads)
        server.thaw()
        assert "worker_gone" not in {line["event"] for line in frozen}

    in_world(scenario, with_broker=False)


def test_a_leader_misses_a_worker_in_time_while_it_keeps_its_lease() -> None:
    """Renewals that come in time are no reason to wait."""

    async def scenario(world: World, server: MemoryServer) -> None:
        alone = Candidate(world, server.connect(), "broker-0")
        await follow(world, alone)
        await world.clock.sleep(2 * LEASE_TTL_S)
        with capture_logs() as logs:
            del world.decode.scripts["alive"]
            await world.clock.sleep(WORKER_TTL_S + 0.5)
        assert [line["worker_id"] for line in logs if line["event"] == "worker_gone"] == ["decode-0"]

    in_world(scenario, with_broker=False)


def test_a_lone_broker_leads_again_after_it_has_lost_its_lease() -> None:
    """The same process begins a new term with all of its metrics; a drain that meets the loss does not hang."""

    async def scenario(world: World, server: MemoryServer) -> None:
        alone = Candidate(world, server.connect(), "broker-0")
        await alone.leadership.wait_settled()
        await follow(world, alone)
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        server.freeze()
        await world.until(lambda: not alone.leads)
        server.thaw()
        await follow(world, alone)
        await world.until(lambda: world.broker.num_in_flight == 0)
        left = await world.record()  # nobody finished it before its deadline
        assert left.error is not None
        assert (left.state, left.error.code) == (HandoffState.FAILED, ErrorCode.DEADLINE_EXCEEDED)
        assert b"pdmesh_broker_terms_total 2.0" in alone.metrics.exposition()
        assert await world.submit(handoff_id="r2-0", request_id="r2") == Accepted(handoff_id="r2-0")
        draining = world.group.create_task(alone.leadership.drain(), name="drain")
        await world.clock.sleep(1.0)
        assert not draining.done()
        server.freeze()
        async with asyncio.timeout(LEASE_TTL_S):
            await draining
        server.thaw()
        await alone.task  # who drains begins no new term

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
