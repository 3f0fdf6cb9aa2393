"""A prefill worker on a made-up engine, and decode workers that are what a test says, on the in-memory bus in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from common.bus.memory import MemoryServer
from common.bus.port import Subscription
from common.bus.storage import EVENTS_CONFIG, LINKS_CONFIG, WORKERS_CONFIG
from common.engine.fake.engine import FakeEngine
from common.engine.port import EngineError
from common.runtime.metrics import Metrics
from common.runtime.offload import inline
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.engines import start_engines
from common.worker.host import WorkerHost
from common.worker.service import WorkerParts
from common.worker.settings import EngineKind, WorkerSettings
from contracts import subjects
from contracts.codec import decode, encode
from contracts.dataplane import RegionDescriptor
from contracts.errors import ErrorCode, ErrorInfo
from contracts.links import LinkEvent, LinkEventName, LinkRecord, LinkState
from contracts.manifest import RankManifest
from contracts.requests import WorkerRef
from contracts.workers import (
    DescribeRefused,
    DescribeWorker,
    WorkerDescription,
    WorkerRole,
    WorkerState,
)
from services.prefill.service import PrefillService
from tests.integration.worker_records import worker_record

PREFILL = WorkerRef(worker_id="prefill-0", incarnation="ip")


class CountingEngine(FakeEngine):
    """An engine that notes what it is linked with, takes its time, and fails as often as told."""

    link_s = 0.05
    failing_links = 0

    def __init__(self, clock: VirtualClock, **changes: Any) -> None:
        super().__init__(clock, **changes)
        self.calls: list[tuple[str, str, str]] = []
        self.linked: dict[str, str] = {}

    async def link(self, peer: WorkerRef, ranks: tuple[WorkerDescription, ...]) -> None:
        """Refuse a second start of a peer while the first is linked."""
        await self._clock.sleep(self.link_s)
        assert peer.worker_id not in self.linked, "two engine links at once for a pair"
        if self.failing_links:
            self.failing_links -= 1
            raise EngineError("rank 0: connection refused")
        await super().link(peer, ranks)
        self.calls.append(("link", peer.worker_id, peer.incarnation))
        self.linked[peer.worker_id] = peer.incarnation

    async def unlink(self, peer: WorkerRef) -> None:
        """Note it."""
        await self._clock.sleep(self.link_s)
        await super().unlink(peer)
        if self.linked.get(peer.worker_id) == peer.incarnation:
            self.calls.append(("unlink", peer.worker_id, peer.incarnation))
            del self.linked[peer.worker_id]


class Notes:
    """A log that can be read."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        """See `Log.info`."""
        self.lines.append((event, fields))

    error = info

    def of(self, event: str) -> list[dict[str, Any]]:
        """The fields of every line of one event."""
        return [fields for name, fields in self.lines if name == event]


class DecodePeer:
    """A decode worker that registers and describes itself. `spoil` changes its manifests, `answers` and `lives` its manners."""

    def __init__(self, world: LinksWorld, worker_id: str, incarnation: str) -> None:
        self.world = world
        self.ref = WorkerRef(worker_id=worker_id, incarnation=incarnation)
        self.bus = world.server.connect()
        self.state = WorkerState.READY
        self.answers = True
        self.lives = True
        self.num_described = 0
        self.transport = ""
        self.answers_as = incarnation
        self.refuses = ""
        self.manifests: tuple[RankManifest, ...] = ()

    async def open(self, **changes: Any) -> None:
        """Answer, then register; `changes` are those of its fake engine."""
        engine = FakeEngine(self.world.clock, worker_id=self.ref.worker_id, incarnation=self.ref.incarnation, **changes)
        self.manifests = tuple(rank.manifest for rank in (await engine.start()).ranks)
        subscription = await self.bus.subscribe(subjects.worker_rpc_filter(WorkerRole.DECODE, self.ref.worker_id))
        self.world.group.create_task(self._answer(subscription))
        self.world.group.create_task(self._heartbeats())

    async def _answer(self, subscription: Subscription) -> None:
        async for message in subscription:
            if not self.lives or not self.answers:
                continue
            rank = decode(message.data, DescribeWorker).rank
            self.num_described += 1
            if self.refuses:
                error = ErrorInfo(code=ErrorCode.INTERNAL, message=self.refuses)
                await message.respond(encode(DescribeRefused(error=error)))
                continue
            region = RegionDescriptor(
                transport=self.transport,
                peer_id=self.ref.worker_id,
                incarnation=self.ref.incarnation,
                region_id="r",
                base=0,
                length=1,
                num_cells=1,
                opaque="",
            )
            description = WorkerDescription(
                worker_id=self.ref.worker_id,
                incarnation=self.answers_as,
                num_ranks=len(self.manifests),
                manifest=self.manifests[rank],
                region=region if self.transport else None,
            )
            await message.respond(encode(description))

    async def _heartbeats(self) -> None:
        while self.lives:
            if self.bus.is_connected:
                await self.announce()
            await self.world.clock.sleep(2.0)

    async def announce(self) -> None:
        """Put the record."""
        record = worker_record(self.ref, WorkerRole.DECODE, state=self.state)
        await (await self.bus.ensure_bucket(WORKERS_CONFIG)).put(self.ref.worker_id, encode(record))

    async def drain(self) -> None:
        """Say that nothing new is taken."""
        self.state = WorkerState.DRAINING
        await self.announce()

    async def leave(self) -> None:
        """Sign off."""
        self.lives = False
        await (await self.bus.ensure_bucket(WORKERS_CONFIG)).delete(self.ref.worker_id)

    def die(self) -> None:
        """Fall silent, as after kill -9."""
        self.lives = False


class LinksWorld:
    """One prefill worker of two ranks, and what everybody can see of its links."""

    def __init__(self, clock: VirtualClock, group: asyncio.TaskGroup) -> None:
        self.clock = clock
        self.group = group
        self.server = MemoryServer(clock)
        self.bus = self.server.connect()
        self.worker_bus = self.server.connect()
        self.notes = Notes()
        self.metrics = Metrics()
        self.engine: CountingEngine
        self.service: PrefillService
        self.host: WorkerHost

    async def open(self) -> None:
        """Start the prefill worker."""
        await self.bus.ensure_stream(EVENTS_CONFIG)
        self.engine = CountingEngine(
            self.clock, worker_id=PREFILL.worker_id, incarnation=PREFILL.incarnation, tp=2, num_blocks=64
        )
        self.service = PrefillService(
            WorkerParts(
                settings=WorkerSettings(
                    worker_id=PREFILL.worker_id, model=Path("fake"), engine=EngineKind.FAKE, tp=2, num_blocks=64
                ),
                incarnation=PREFILL.incarnation,
                engines=await start_engines([self.engine]),
                bus=self.worker_bus,
                clock=self.clock,
                log=self.notes,
                metrics=self.metrics,
                group=self.group,
                offload=inline,
            )
        )
        self.host = WorkerHost(self.service, self.worker_bus, self.group, self.notes)
        await self.host.open()

    async def peer(self, worker_id: str = "decode-0", incarnation: str = "i0", **changes: Any) -> DecodePeer:
        """Start a decode worker."""
        peer = DecodePeer(self, worker_id, incarnation)
        await peer.open(**changes)
        return peer

    async def link(self, decode_id: str = "decode-0") -> LinkRecord | None:
        """What the bus says of a pair."""
        bucket = await self.bus.ensure_bucket(LINKS_CONFIG)
        entry = await bucket.get(subjects.link_key(PREFILL.worker_id, decode_id))
        return None if entry is None else decode(entry.value, LinkRecord)

    async def until(
        self, state: LinkState | None, decode_id: str = "decode-0", incarnation: str = "", within_s: float = 60.0
    ) -> LinkRecord | None:
        """Wait until the bus says that a pair is in a state; None: it has no record."""
        async with asyncio.timeout(within_s):
            while True:
                link = await self.link(decode_id)
                found = None if link is None else link.state
                if found is state and (not incarnation or (link and link.decode.incarnation == incarnation)):
                    return link
                await self.clock.sleep(0.05)

    async def linked(self, decode_id: str = "decode-0", incarnation: str = "") -> LinkRecord:
        """Wait until a pair is linked."""
        link = await self.until(LinkState.LINKED, decode_id, incarnation)
        assert link is not None
        return link

    async def events(self) -> Sequence[LinkEvent]:
        """The link events that the stream holds."""
        await self.worker_bus.flush_events()
        return [
            decode(stored.data, LinkEvent)
            async for stored in self.bus.read_stream(subjects.EVENTS_STREAM, "pd.v1.ev.prefill.*.*")
        ]

    async def told(self) -> list[tuple[str, str]]:
        """Their names, each with the start of the decode worker."""
        return [(event.event.value, event.decode.incarnation) for event in await self.events()]

    def gauge(self, state: LinkState) -> float:
        """What `pdmesh_links` shows of one state."""
        return self._shown(f'links{{state="{state}"}}')

    def transitions(self, name: LinkEventName) -> float:
        """How often `pdmesh_link_transitions_total` has counted one event."""
        return self._shown(f'link_transitions_total{{event="{name}"}}')

    def _shown(self, series: str) -> float:
        line = f"pdmesh_{series} "
        return next(
            float(each.removeprefix(line))
            for each in self.metrics.exposition().decode().splitlines()
            if each.startswith(line)
        )


def in_links_world(scenario: Callable[[LinksWorld], Awaitable[None]]) -> None:
    """Run a scenario in virtual time, then stop everything."""

    async def main(clock: VirtualClock) -> None:
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            world = LinksWorld(clock, group)
            await world.open()
            await scenario(world)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    run_virtual(main)
