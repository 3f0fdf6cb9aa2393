"""The broker on a real NATS server: one handoff in this process, one through a broker process of its own, and an outage."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog

from common.bus.nats import NatsBus
from common.bus.port import Bus
from common.bus.server import NatsServer
from common.runtime.clock import SystemClock
from contracts.events import EventName
from contracts.handoff import CommitHandoff, HandoffState, ReleaseHandoff, RunPrefill
from contracts.requests import Accepted
from tests.integration.broker_world import HANDOFF, World

OK = Accepted(handoff_id=HANDOFF)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that the test may stop."""
    with NatsServer(tmp_path / "nats") as started:
        yield started


@asynccontextmanager
async def world_on(server: NatsServer, **options: Any) -> AsyncIterator[World]:
    """A broker and scripted workers, each on a connection of its own."""
    clock = SystemClock()
    buses: list[NatsBus] = []
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:

        async def connect() -> Bus:
            bus = await NatsBus.connect(server.url, name="test", tasks=group, clock=clock, log=structlog.get_logger())
            buses.append(bus)
            return bus

        world = World(connect, clock, group)
        try:
            await world.open(**options)
            yield world
        finally:
            await world.close()
            for bus in buses:
                await bus.close()


async def whole_handoff(world: World) -> None:
    """From submit to end, as workers and router see it."""
    assert await world.submit() == OK
    await world.until(lambda: bool(world.prefill.of(RunPrefill)))
    await world.publish_parts()
    assert await world.finish_prefill() == OK
    await world.until(lambda: bool(world.decode.of(CommitHandoff)))
    assert await world.take_over() == OK
    assert await world.end() == OK
    await world.until(lambda: bool(world.prefill.of(ReleaseHandoff)))


async def test_a_handoff_over_nats(server: NatsServer) -> None:
    """The same protocol as on the in-memory bus: the record is finished, and the stream tells the story."""
    async with world_on(server) as world:
        await whole_handoff(world)
        await world.until(lambda: world.broker.num_in_flight == 0)
        record = await world.record()
        assert (record.state, record.num_tokens) == (HandoffState.FINISHED, 12)
        names = [event.event for event in await world.events()]
        assert names[0] is EventName.REQUEST_SUBMITTED
        assert {EventName.LEDGER_CLOSED, EventName.HANDOFF_COMMITTED, EventName.REQUEST_FINISHED} <= set(names)


async def test_a_restart_of_the_server_in_the_middle_of_a_prefill(server: NatsServer) -> None:
    """The server is killed and started again: the handoff that was acknowledged ends well."""
    async with world_on(server) as world:
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        before = world.bus.reconnects
        await asyncio.to_thread(server.kill)
        await world.until(lambda: not world.bus.is_connected)
        await asyncio.to_thread(server.start)
        await world.bus.reconnected(before)
        for each in (world.broker_bus, world.prefill.bus, world.decode.bus):
            await each.reconnected(0)
        assert await world.finish_prefill() == OK
        await world.publish_parts()
        await world.until(lambda: bool(world.decode.of(CommitHandoff)))
        assert await world.take_over() == OK
        assert await world.end() == OK
        await world.until(lambda: world.broker.num_in_flight == 0)
        assert (await world.record()).state is HandoffState.FINISHED


async def test_the_broker_as_a_process(server: NatsServer) -> None:
    """`python -m services.broker` serves, tells its health and metrics, drains on SIGTERM and exits with 0."""
    async with world_on(server, with_broker=False) as world:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.broker",
            f"nats_url={server.url}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stderr is not None
            lines: list[dict[str, Any]] = []
            while not any(line["event"] == "service_ready" for line in lines):
                lines.append(json.loads(await process.stderr.readline()))
            port = next(line["port"] for line in lines if line["event"] == "admin_port_opened")
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                for path in ("/health", "/ready"):
                    async with http.get(path) as response:
                        assert response.status == 200
                await whole_handoff(world)
                # The record is written after the worker's report is answered.
                text = ""
                while 'pdmesh_broker_handoffs_total{reason="length",state="finished"} 1.0' not in text:
                    async with http.get("/metrics") as response:
                        text = await response.text()
            process.send_signal(signal.SIGTERM)
            rest = (await process.stderr.read()).decode().splitlines()
            assert await process.wait() == 0
            assert json.loads(rest[-1])["event"] == "service_stopped"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_settings_that_are_wrong_end_the_process_with_status_2() -> None:
    """Every problem is named, and nothing is started."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.broker",
        "broker_id=No,max_in_flight=0,colour=blue",
        stderr=asyncio.subprocess.PIPE,
    )
    _, text = await process.communicate()
    assert process.returncode == 2
    assert b"max_in_flight" in text
    assert b"colour" in text
