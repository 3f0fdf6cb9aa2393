"""A small real mesh for unfriendly peers: router, broker and a worker of each role with fake engines, in one process.

It runs over the in-memory bus or over NATS. A `Stranger` is on the same bus and sends what no service would.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import aiohttp
import nats
from nats.aio.client import Client

from common.bus.memory import MemoryBus, MemoryServer
from common.bus.nats import NatsBus
from common.bus.port import Bus, Message
from common.bus.server import NatsServer
from common.engine.fake.engine import FakeEngine
from common.engine.fake.tokens import fake_token
from common.runtime.clock import Clock, SystemClock
from common.runtime.lifecycle import Lifecycle, serve
from common.runtime.metrics import Metrics
from common.runtime.offload import inline
from common.worker.engines import start_engines
from common.worker.host import WorkerHost
from common.worker.service import WorkerParts, WorkerService
from common.worker.settings import EngineKind, WorkerSettings
from contracts.operations import Service
from services.broker.app import open_broker
from services.broker.service import Broker
from services.broker.settings import BrokerSettings
from services.decode.service import DecodeService
from services.mixed.service import MixedService
from services.prefill.service import PrefillService
from services.router import app
from services.router.settings import RouterSettings
from tests.integration.lease_holder import LeaseHolder

PATIENCE_S = 30.0
STEP_S = 0.001
MODEL = Path(__file__).parents[2] / "models" / "tiny"
PROMPT = tuple(range(5, 45))
NUM_BLOCKS = 4096
ROLES: tuple[type[WorkerService], ...] = (PrefillService, DecodeService, MixedService)


OpenBus: TypeAlias = MemoryBus | NatsBus


@dataclass(slots=True)
class RecordedLog:
    """A log that remembers its lines."""

    lines: list[tuple[str, str, Mapping[str, Any]]] = field(default_factory=list)

    def info(self, event: str, **fields: Any) -> None:
        """See `Log.info`."""
        self.lines.append(("info", event, fields))

    def error(self, event: str, **fields: Any) -> None:
        """See `Log.error`."""
        self.lines.append(("error", event, fields))

    def of(self, event: str) -> list[Mapping[str, Any]]:
        """The lines of one event."""
        return [fields for _, name, fields in self.lines if name == event]


class RawSender(Protocol):
    """Sends whatever it is given, past every check of ours."""

    async def __call__(self, subject: str, data: bytes, reply: str = "") -> None:
        """Send it."""


class Network(Protocol):
    """A bus that services connect to."""

    async def connect(self, name: str, group: asyncio.TaskGroup, log: RecordedLog) -> OpenBus:
        """A new connection."""
        ...

    async def raw(self) -> RawSender:
        """A way past all connections of ours."""
        ...


class MemoryNetwork:
    """The in-memory bus."""

    def __init__(self, clock: Clock) -> None:
        self._server = MemoryServer(clock)

    async def connect(self, name: str, group: asyncio.TaskGroup, log: RecordedLog) -> OpenBus:
        """A new connection."""
        del name, group, log
        return self._server.connect()

    async def raw(self) -> RawSender:
        """Into the server by the side."""
        bus = self._server.connect()

        async def send(subject: str, data: bytes, reply: str = "") -> None:
            self._server.route(Message(subject, data, {}, reply, bus))

        return send


class NatsNetwork:
    """A real server."""

    def __init__(self, server: NatsServer, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self._client: Client | None = None

    async def connect(self, name: str, group: asyncio.TaskGroup, log: RecordedLog) -> OpenBus:
        """A new connection."""
        return await NatsBus.connect(self._server.url, name=name, tasks=group, clock=self._clock, log=log)

    async def raw(self) -> RawSender:
        """By a client that is not ours."""
        client = self._client = await nats.connect(self._server.url)

        async def send(subject: str, data: bytes, reply: str = "") -> None:
            await client.publish(subject, data, reply=reply)
            await client.flush()

        return send

    async def close(self) -> None:
        """Close that client."""
        if self._client is not None:
            await self._client.close()


class Stranger:
    """Somebody on the bus who obeys no contract."""

    def __init__(self, bus: OpenBus, send: RawSender) -> None:
        self.bus = bus
        self.send = send
        self._count = 0

    async def ask(self, subject: str, data: bytes) -> bytes:
        """Send, and return the first answer."""
        self._count += 1
        inbox = f"stranger.{self._count}"
        async with asyncio.timeout(PATIENCE_S), await self.bus.subscribe(inbox) as answers:
            await self.send(subject, data, inbox)
            return (await anext(aiter(answers))).data


@dataclass(slots=True)
class HostileMesh:
    """What a test works with."""

    url: str
    session: aiohttp.ClientSession
    stranger: Stranger
    broker: Broker
    workers: dict[str, WorkerService]
    log: RecordedLog
    metrics: dict[Service, Metrics]
    clock: Clock

    async def stream(self, seed: int, num_tokens: int, **fields: Any) -> list[int]:
        """The token ids of a streamed completion, which ends well or fails the test."""
        body = request_body(seed, num_tokens, **fields)
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            blocks = (await response.text()).split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""], blocks[-3:]
        chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
        return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]

    def counted(self, service: Service, name: str, **labels: str) -> float:
        """One figure of a service; 0 for a series that is not there yet."""
        shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"pdmesh_{name}{{{shown}}} " if shown else f"pdmesh_{name} "
        lines = self.metrics[service].exposition().decode().splitlines()
        found = [line.removeprefix(wanted) for line in lines if line.startswith(wanted)]
        return float(found[0]) if found else 0.0

    async def refused_of(self, service: Service, row: str, *, at_least: int) -> float:
        """Wait until a service has refused so many messages of a row of the table, and return how many it has."""
        await self.until(lambda: self.counted(service, "messages_refused_total", row=row) >= at_least)
        return self.counted(service, "messages_refused_total", row=row)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await self.clock.sleep(0.01)

    async def settled(self) -> None:
        """Wait until nothing is under way any more and all memory is back."""
        await self.until(lambda: not self.broker.num_in_flight and all(map(_is_empty, self.workers.values())))

    def assert_unharmed(self) -> None:
        """No task has died, and no handler has failed for a reason of its own."""
        harm = {"task_failed", "request_failed", "service_failed", "generation_crashed", "request_crashed"}
        harm |= {"effect_failed", "effect_dropped", "report_failed", "cancel_failed", "answer_too_large"}
        assert [line for line in self.log.lines if line[1] in harm] == []


def request_body(seed: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """A streamed completion of so many tokens, with their ids."""
    return {
        "model": "tiny",
        "prompt": list(PROMPT),
        "max_tokens": num_tokens,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    } | fields


def expected(seed: int, num_tokens: int) -> list[int]:
    """What the fake engines say to it."""
    return [fake_token(seed, position) for position in range(len(PROMPT), len(PROMPT) + num_tokens)]


def _is_empty(worker: WorkerService) -> bool:
    load, settings = worker.replicas.load, worker.settings
    free = (load.num_free_blocks, load.num_free_slots) == (settings.num_blocks, settings.num_slots)
    return free and len(worker.table) == 0 and len(worker.prompts) == 0


@contextlib.asynccontextmanager
async def hostile_mesh(network: Network, clock: Clock, **router: Any) -> AsyncIterator[HostileMesh]:
    """Run the mesh until the test leaves the context."""
    log = RecordedLog()
    metrics: dict[Service, Metrics] = {service: Metrics() for service in Service}
    defaults: dict[str, Any] = {"port": 0, "expected_workers": tuple(f"{kind.role}-0" for kind in ROLES)}
    settings = RouterSettings(model=MODEL, **(defaults | router))
    started: asyncio.Future[tuple[Lifecycle, int]] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        broker_bus = await network.connect("broker-0", group, log)
        lease = LeaseHolder(broker_bus, clock)
        await lease.put()
        leading = group.create_task(lease.run(), name="lease")
        broker, edges = await open_broker(
            BrokerSettings(),
            bus=broker_bus,
            clock=clock,
            log=log,
            metrics=metrics[Service.BROKER],
            group=group,
            offload=inline,
        )
        workers, hosts = {}, []
        for kind in ROLES:
            bus = await network.connect(f"{kind.role}-0", group, log)
            workers[f"{kind.role}-0"], host = await _host(
                kind, bus, group, clock=clock, log=log, metrics=metrics[Service(kind.role)]
            )
            hosts.append((host, bus))
        router_bus = await network.connect("router-0", group, log)

        async def main(lifecycle: Lifecycle) -> None:
            registry = metrics[Service.ROUTER]
            port = await app.start(
                settings, lifecycle, bus=router_bus, clock=clock, log=log, entropy=os.urandom, registry=registry
            )
            started.set_result((lifecycle, port))

        life = group.create_task(serve(main, log=log, drain_timeout_s=5.0, handle_signals=False), name="router")
        async with asyncio.timeout(PATIENCE_S):
            lifecycle, port = await started
        stranger = Stranger(await network.connect("stranger", group, log), await network.raw())
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}"
            await _until_ready(url, session, clock)
            yield HostileMesh(url, session, stranger, broker, workers, log, metrics, clock)
        lifecycle.request_drain("the test is over")
        async with asyncio.timeout(PATIENCE_S):
            assert await life == 0
        leading.cancel()
        await edges.close()
        for task in asyncio.all_tasks():
            # A broker that asks workers who are not there, as at a process's end.
            if task.get_name().startswith("orphans-"):
                task.cancel()
        for host, _ in hosts:
            await host.close()
        for opened in (*(bus for _, bus in hosts), broker_bus, router_bus, stranger.bus):
            await opened.close()


async def _host(
    kind: type[WorkerService],
    bus: Bus,
    group: asyncio.TaskGroup,
    *,
    clock: Clock,
    log: RecordedLog,
    metrics: Metrics,
) -> tuple[WorkerService, WorkerHost]:
    worker_id, incarnation = f"{kind.role}-0", f"i-{kind.role}-0"
    settings = WorkerSettings(
        worker_id=worker_id,
        model=MODEL,
        engine=EngineKind.FAKE,
        num_blocks=NUM_BLOCKS,
        deadline_grace_s=0.5,
    )
    engine = FakeEngine(
        clock,
        worker_id=worker_id,
        incarnation=incarnation,
        num_blocks=settings.num_blocks,
        num_slots=settings.num_slots,
        step_s=STEP_S,
    )
    service = kind(
        WorkerParts(
            settings=settings,
            incarnation=incarnation,
            engines=await start_engines([engine]),
            bus=bus,
            clock=clock,
            log=log,
            metrics=metrics,
            group=group,
        )
    )
    host = WorkerHost(service, bus, group, log)
    await host.open()
    return service, host


async def _until_ready(url: str, session: aiohttp.ClientSession, clock: Clock) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with session.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
            await clock.sleep(0.02)


@contextlib.asynccontextmanager
async def mesh_over(kind: str, tmp_path: Path, **router: Any) -> AsyncIterator[HostileMesh]:
    """The mesh over `memory` or over `nats`."""
    clock = SystemClock()
    if kind == "memory":
        async with hostile_mesh(MemoryNetwork(clock), clock, **router) as mesh:
            yield mesh
        return
    with NatsServer(tmp_path / "nats") as server:
        network = NatsNetwork(server, clock)
        try:
            async with hostile_mesh(network, clock, **router) as mesh:
                yield mesh
        finally:
            await network.close()
