"""The broker with real workers on made-up engines: many handoffs at once, on a bus that loses, repeats and reorders."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
from array import array
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.bus.errors import BusError
from common.bus.faults import SeededFaults
from common.bus.memory import MemoryServer
from common.bus.port import Bus, Subscription
from common.bus.storage import LINKS_CONFIG, handoffs_config
from common.engine.fake import FakeEngine, fake_token
from common.runtime.metrics import Metrics
from common.runtime.offload import inline
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.engines import start_engines
from common.worker.host import WorkerHost
from common.worker.service import WorkerParts, WorkerService
from common.worker.settings import EngineKind, PulledRoles, WorkerSettings
from contracts import ids, subjects
from contracts.codec import decode, encode
from contracts.handoff import HandoffRecord, HandoffState
from contracts.links import LinkRecord, LinkState
from contracts.pull import Transfer
from contracts.requests import (
    Accepted,
    CancelRequest,
    DisaggregatedRoute,
    FinishReason,
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

ROUTER = "router-0"
NUM_OUTPUT_TOKENS = 6


class Mesh:
    """Three workers and a broker, and a router that asks and listens. `dp` has the replicas of workers that have several."""

    def __init__(
        self,
        clock: VirtualClock,
        group: asyncio.TaskGroup,
        server: MemoryServer,
        dp: Mapping[type[WorkerService], int],
        decode: Mapping[str, Any],
    ) -> None:
        self.dp = dp
        self.decode = decode
        self.clock = clock
        self.group = group
        self.server = server
        self.bus: Bus = server.connect()
        self.services: list[WorkerService] = []
        self.frames: dict[str, list[TokenFrame]] = {}
        self.broker: Broker
        self.fence = 0

    async def open(self) -> None:
        """Start everybody and wait for the link."""
        tokens = await self.bus.subscribe(subjects.tokens_filter(ROUTER))
        self.group.create_task(self._read(tokens))
        for kind, tp in ((PrefillService, 2), (DecodeService, 1), (MixedService, 1)):
            await self._add(kind, tp, self.dp.get(kind, 1))
        await self.start_broker()
        bucket = await self.bus.ensure_bucket(LINKS_CONFIG)
        while True:
            entry = await bucket.get(subjects.link_key("prefill-0", "decode-0"))
            if entry is not None and decode(entry.value, LinkRecord).state is LinkState.LINKED:
                return
            await self.clock.sleep(0.1)

    async def start_broker(self) -> None:
        """Begin a term, with the next fence."""
        self.fence += 1
        begun = asyncio.Event()
        self._term = self.group.create_task(self._lead(begun), name=f"term-{self.fence}")
        await begun.wait()

    async def kill_broker(self) -> None:
        """It dies with everything that it had under way."""
        self._term.cancel()
        await asyncio.wait([self._term])

    async def _lead(self, begun: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self.broker, _ = await open_broker(
                BrokerSettings(call_timeout_s=0.3),
                bus=self.server.connect(),
                clock=self.clock,
                log=structlog.get_logger(),
                metrics=Metrics(),
                group=group,
                fence=self.fence,
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
            # Few enough for requests to wait in line at decode, longer than one call of the broker.
            num_slots=4 if kind is DecodeService else 32,
            reserve_wait_s=30.0,
            **(self.decode if kind is DecodeService else {}),
        )
        engines = [
            FakeEngine(
                self.clock,
                worker_id=worker_id,
                incarnation=f"i-{worker_id}",
                dp_rank=dp_rank,
                dp=dp,
                tp=tp,
                num_blocks=settings.num_blocks,
                num_slots=settings.num_slots,
                num_staging_rows=settings.staging_rows_of(kind.role),
                step_s=0.002,
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


PUSH: dict[str, Any] = {}
STATES: dict[str, Any] = {"transfer": Transfer.PULL, "parallel_shard_pull": False}
ALL: dict[str, Any] = {"transfer": Transfer.PULL, "pull": PulledRoles.ALL, "num_staging_rows": 3}


@pytest.mark.parametrize(
    ("seed", "decode"),
    [*((seed, PUSH) for seed in range(4)), (4, STATES), (6, STATES), (5, ALL), (7, ALL)],
    ids=str,
)
def test_every_handoff_ends_and_all_memory_comes_back(seed: int, decode: dict[str, Any]) -> None:
    """Thirty requests over a bad bus, a third of them cancelled at some moment: all end, finished ones with the right tokens.

    One replica or two at prefill, one or two at decode, too few slots there for all at once: the broker need not know. Decode is
    pushed to, or pulls the states, or everything.
    """
    rng = random.Random(seed)
    faults = SeededFaults(rng, loss=0.1, repeat=0.1, max_delay_s=0.01, protected=(f"{subjects.PREFIX}.tok",))

    async def scenario(mesh: Mesh) -> None:
        mesh.server.faults = faults
        plans = [
            (number, number % 5 == 0, rng.uniform(0.0, 0.1) if number % 3 == 0 else None) for number in range(1, 31)
        ]
        async with asyncio.TaskGroup() as requests:
            for number, mixed, cancel_after in plans:
                requests.create_task(mesh.serve(number, mixed=mixed, cancel_after=cancel_after))
        while mesh.broker.num_in_flight:
            await mesh.clock.sleep(0.1)
        states: list[HandoffState] = []
        for number, _, cancel_after in plans:
            handoff_id = ids.handoff_id(ids.request_id(number.to_bytes(10, "big")), 0)
            handoff = mesh.broker.handoff(handoff_id)
            assert handoff is not None
            states.append(handoff.state)
            finals = [frame for frame in mesh.frames[handoff_id] if frame.final]
            if handoff.state is HandoffState.FINISHED:
                start = handoff.record.num_prompt_tokens
                expected = [fake_token(number, position) for position in range(start, start + NUM_OUTPUT_TOKENS)]
                assert mesh.text(handoff_id) == expected
                assert {frame.finish_reason for frame in finals} == {FinishReason.LENGTH}
            else:
                assert handoff.state is HandoffState.CANCELLED
                assert cancel_after is not None
                assert finals
        assert HandoffState.FINISHED in states
        assert HandoffState.CANCELLED in states
        await mesh.clock.sleep(1.0)
        mesh.assert_empty()

    _run(scenario, {PrefillService: 1 + seed % 2, DecodeService: 1 + seed // 2 % 2}, decode)


@pytest.mark.parametrize(("seed", "transfer"), [(0, PUSH), (1, PUSH), (2, STATES), (3, ALL)], ids=str)
def test_every_handoff_goes_on_when_its_broker_dies(seed: int, transfer: dict[str, Any]) -> None:
    """Five brokers die under thirty requests, at whatever moment: each request ends with all of its tokens, in its first attempt."""
    rng = random.Random(seed)

    async def scenario(mesh: Mesh) -> None:
        async with asyncio.TaskGroup() as requests:
            for number in range(1, 31):
                requests.create_task(mesh.serve(number, mixed=number % 5 == 0, cancel_after=None))
            for _ in range(5):
                await mesh.clock.sleep(rng.uniform(0.0, 0.15))
                await mesh.kill_broker()
                await mesh.clock.sleep(rng.uniform(0.0, 0.05))
                await mesh.start_broker()
        while mesh.broker.num_in_flight:
            await mesh.clock.sleep(0.1)
        bucket = await mesh.bus.ensure_bucket(handoffs_config(BrokerSettings().record_ttl_s))
        for number in range(1, 31):
            handoff_id = ids.handoff_id(ids.request_id(number.to_bytes(10, "big")), 0)
            entry = await bucket.get(handoff_id)
            assert entry is not None
            record = decode(entry.value, HandoffRecord)
            assert (record.state, record.error) == (HandoffState.FINISHED, None)
            start = record.num_prompt_tokens
            expected = [fake_token(number, position) for position in range(start, start + NUM_OUTPUT_TOKENS)]
            assert mesh.text(handoff_id) == expected
        await mesh.clock.sleep(1.0)
        mesh.assert_empty()

    _run(scenario, {PrefillService: 1 + seed % 2, DecodeService: 1 + seed // 2 % 2}, transfer)


def _run(
    scenario: Callable[[Mesh], Awaitable[None]], dp: Mapping[type[WorkerService], int], decode: Mapping[str, Any]
) -> None:
    async def main(clock: VirtualClock) -> None:
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            mesh = Mesh(clock, group, MemoryServer(clock), dp, decode)
            await mesh.open()
            await scenario(mesh)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    run_virtual(main)
