"""Three workers on made-up engines, a real broker, and a router that asks and listens: on one bus, in virtual time."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from array import array
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from common.bus.errors import BusError
from common.bus.memory import MemoryServer
from common.bus.port import Bus, Subscription
from common.bus.storage import LINKS_CONFIG
from common.engine.fake.engine import FakeEngine
from common.runtime.metrics import Metrics
from common.runtime.offload import inline
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.engines import start_engines
from common.worker.host import WorkerHost
from common.worker.service import WorkerParts, WorkerService
from common.worker.settings import EngineKind, WorkerSettings
from contracts import ids, subjects
from contracts.codec import decode, encode
from contracts.links import LinkRecord, LinkState
from contracts.requests import (
    Accepted,
    CancelRequest,
    DisaggregatedRoute,
    MixedRoute,
    PromptFrame,
    Refused,
    SamplingParams,
    SubmitRequest,
    TokenFrame,
    WorkerRef,
)
from contracts.subjects import BrokerVerb, WorkerVerb
from services.broker.app import open_broker
from services.broker.service import Broker
from services.broker.settings import BrokerSettings
from services.decode.service import DecodeService
from services.mixed.service import MixedService
from services.prefill.service import PrefillService
from tests.integration.lease_holder import LeaseHolder

ROUTER = "router-0"
NUM_OUTPUT_TOKENS = 6
KINDS: tuple[type[WorkerService], ...] = (PrefillService, DecodeService, MixedService)
TP: Mapping[type[WorkerService], int] = {PrefillService: 2, DecodeService: 1, MixedService: 1}
"""Ranks of a replica, unless a test says otherwise."""


class Mesh:
    """Three workers and a broker, and a router that asks and listens. `dp` has the replicas of workers that have several.

    `tp` are the ranks of a replica; `decode` are settings of the decode worker, `everybody` of all workers, and `broker` of the broker.
    Without `has_mixed` there are two workers. A step of an engine takes `step_s`.
    """

    def __init__(
        self,
        clock: VirtualClock,
        group: asyncio.TaskGroup,
        server: MemoryServer,
        dp: Mapping[type[WorkerService], int],
        decode: Mapping[str, Any],
        *,
        tp: Mapping[type[WorkerService], int] = TP,
        everybody: Mapping[str, Any] | None = None,
        broker: Mapping[str, Any] | None = None,
        has_mixed: bool = True,
        step_s: float = 0.002,
    ) -> None:
        self.kinds = KINDS if has_mixed else KINDS[:2]
        self.step_s = step_s
        self.broker_settings = BrokerSettings(**({"call_timeout_s": 0.3} | dict(broker or {})))
        self.dp = dp
        self.tp = tp
        self.settings = {"num_slots": 32, "reserve_wait_s": 30.0} | dict(everybody or {})
        # Few enough slots for requests to wait in line at decode, longer than one call of the broker.
        self.decode = {"num_slots": 4} | dict(decode)
        self.clock = clock
        self.group = group
        self.server = server
        self.bus: Bus = server.connect()
        self.services: list[WorkerService] = []
        self.frames: dict[str, list[TokenFrame]] = {}
        self.broker: Broker
        self.lease = LeaseHolder(self.bus, clock, fence=0)

    async def open(self) -> None:
        """Start everybody and wait for the link."""
        tokens = await self.bus.subscribe(subjects.tokens_filter(ROUTER))
        self.group.create_task(self._read(tokens))
        for kind in self.kinds:
            await self._add(kind, self.tp[kind], self.dp.get(kind, 1))
        await self.start_broker()
        self.group.create_task(self.lease.run(), name="lease")
        await self.wait_linked()

    async def wait_linked(self) -> None:
        """Wait until the bus says that the pair is linked."""
        bucket = await self.bus.ensure_bucket(LINKS_CONFIG)
        while True:
            entry = await bucket.get(subjects.link_key("prefill-0", "decode-0"))
            if entry is not None and decode(entry.value, LinkRecord).state is LinkState.LINKED:
                return
            await self.clock.sleep(0.1)

    async def start_broker(self) -> None:
        """Begin a term, with the next fence."""
        await self.lease.lead(self.lease.fence + 1)
        begun = asyncio.Event()
        self._term = self.group.create_task(self._lead(begun), name=f"term-{self.lease.fence}")
        await begun.wait()

    async def kill_broker(self) -> None:
        """It dies with everything that it had under way."""
        self._term.cancel()
        await asyncio.wait([self._term])

    async def _lead(self, begun: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self.broker, _ = await open_broker(
                self.broker_settings,
                bus=self.server.connect(),
                clock=self.clock,
                log=structlog.get_logger(),
                metrics=Metrics(),
                group=group,
                fence=self.lease.fence,
                offload=inline,
            )
            begun.set()

    async def _add(self, kind: type[WorkerService], tp: int, dp: int) -> None:
        worker_id = f"{kind.role}-0"
        settings = WorkerSettings(
            worker_id=worker_id,
            model=Path("fake"),
            engine=EngineKind.FAKE,
            tp=tp,
            dp=dp,
            **(self.settings | (self.decode if kind is DecodeService else {})),
        )
        engines = [
            FakeEngine(
                self.clock,
                worker_id=worker_id,
                incarnation=f"i-{worker_id}",
                dp_rank=dp_rank,
                dp=dp,
                tp=tp,
                dcp=settings.dcp,
                num_blocks=settings.num_blocks,
                num_slots=settings.num_slots,
                num_staging_rows=settings.staging_rows_of(kind.role),
                drafter=settings.drafter_of(kind.role),
                num_speculative_tokens=settings.depth_of(kind.role),
                step_s=self.step_s,
            )
            for dp_rank in range(dp)
        ]
        for each in engines:
            each.reads.read_s.update({0: 0.02, 1: 0.01})
        parts = WorkerParts(
            settings=settings,
            incarnation=f"i-{worker_id}",
            engines=await start_engines(engines),
            bus=self.server.connect(),
            clock=self.clock,
            log=structlog.get_logger(),
            metrics=Metrics(),
            group=self.group,
            offload=inline,
        )
        service = kind(parts)
        await WorkerHost(service, parts.bus, self.group, parts.log).open()
        self.services.append(service)

    async def _read(self, subscription: Subscription) -> None:
        async for message in subscription:
            frame = decode(message.data, TokenFrame)
            self.frames.setdefault(frame.handoff_id, []).append(frame)

    async def ask(self, subject: str, data: bytes) -> Accepted | Refused:
        """Ask until somebody answers: delivery."""
        while True:
            try:
                reply = await self.bus.request(subject, data, timeout=0.3)
            except BusError:
                await self.clock.sleep(0.01)
                continue
            answer: Accepted | Refused = decode(reply.data, Accepted | Refused)  # type: ignore[arg-type]  # a union is not a type
            return answer

    async def serve(self, number: int, *, mixed: bool, cancel_after: float | None) -> None:
        """One request, from its prompt to its submit, and perhaps to its cancel."""
        request = ids.request_id(number.to_bytes(10, "big"))
        handoff = ids.handoff_id(request, 0)
        prompt = list(range(1, 41 + number % 30))
        data = array("I", prompt).tobytes()
        digest = hashlib.sha256(data).hexdigest()
        role, worker = ("mixed", "mixed-0") if mixed else ("prefill", "prefill-0")
        frame = PromptFrame(
            handoff_id=handoff,
            index=0,
            num_frames=1,
            num_prompt_tokens=len(prompt),
            prompt_hash=digest,
            timeout_ms=60_000,
            ids_b64=base64.b64encode(data).decode(),
        )
        answer = await self.ask(subjects.worker_rpc(role, worker, WorkerVerb.PROMPT), encode(frame))
        assert isinstance(answer, Accepted)
        refs = {
            name: WorkerRef(worker_id=name, incarnation=f"i-{name}") for name in ("prefill-0", "decode-0", "mixed-0")
        }
        submit = SubmitRequest(
            handoff_id=handoff,
            request_id=request,
            attempt=0,
            router_id=ROUTER,
            route=MixedRoute(mixed=refs["mixed-0"])
            if mixed
            else DisaggregatedRoute(prefill=refs["prefill-0"], decode=refs["decode-0"]),
            num_prompt_tokens=len(prompt),
            prompt_hash=digest,
            sampling=SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, seed=number, temperature=0.0),
            timeout_ms=30_000,
        )
        assert isinstance(await self.ask(subjects.broker_rpc(BrokerVerb.SUBMIT), encode(submit)), Accepted)
        if cancel_after is not None:
            await self.clock.sleep(cancel_after)
            cancel = CancelRequest(handoff_id=handoff, reason="the client left")
            assert isinstance(await self.ask(subjects.broker_rpc(BrokerVerb.CANCEL), encode(cancel)), Accepted)

    def assert_empty(self) -> None:
        """All memory is back where it was."""
        for service in self.services:
            service.replicas.check_integrity()
            assert service.replicas.load.num_free_blocks == service.settings.dp * service.settings.num_blocks
            free_slots = sum(replica.pool.num_free_slots for replica in service.replicas)
            assert free_slots == service.settings.dp * service.settings.num_slots
            assert len(service.table) == 0

    def text(self, handoff_id: str) -> list[int]:
        """What a router makes of the frames: repeats dropped, order restored."""
        at = {frame.index + n: token for frame in self.frames[handoff_id] for n, token in enumerate(frame.token_ids)}
        return [at[index] for index in range(len(at))]


def run_mesh(
    scenario: Callable[[Mesh], Awaitable[None]],
    dp: Mapping[type[WorkerService], int],
    decode: Mapping[str, Any],
    **options: Any,
) -> None:
    """Run a scenario on a new mesh, then stop it. `options` are those of `Mesh`."""

    async def main(clock: VirtualClock) -> None:
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            mesh = Mesh(clock, group, MemoryServer(clock), dp, decode, **options)
            await mesh.open()
            await scenario(mesh)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    run_virtual(main)
