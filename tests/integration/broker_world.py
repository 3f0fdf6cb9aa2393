"""A broker on a bus with scripted workers around it, and a router that listens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
import structlog

from common.bus.errors import BusError
from common.bus.memory import MemoryServer
from common.bus.port import Bus, Subscription
from common.layout.planner import plan
from common.runtime.clock import Clock
from common.runtime.metrics import Metrics
from common.runtime.offload import inline
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts import subjects
from contracts.codec import decode, encode
from contracts.events import HandoffEvent
from contracts.handoff import (
    Grant,
    HandoffRecord,
    PartDone,
    PartsReport,
    PrefillFinished,
    RequestEnded,
    Reserved,
    TakenOver,
)
from contracts.manifest import Role
from contracts.pull import PullEnded, RoleMerge, ShardPull, ShardState, Transfer
from contracts.requests import (
    Accepted,
    CancelRequest,
    CancelWork,
    DisaggregatedRoute,
    FinishReason,
    MixedRoute,
    Refused,
    SamplingParams,
    SubmitRequest,
    TokenFrame,
    WorkerRef,
)
from contracts.subjects import BrokerVerb, WorkerVerb
from contracts.workers import (
    WorkerRole,
)
from services.broker.app import open_broker
from services.broker.core.deadline_text import write_deadline
from services.broker.core.messages import first_record
from services.broker.edges import BrokerEdges
from services.broker.service import Broker
from services.broker.settings import BrokerSettings
from tests.integration.scripted_worker import GRANT, ScriptedWorker, manifests

HANDOFF, REQUEST, ROUTER = "r1-0", "r1", "router-0"
NUM_PROMPT_TOKENS = 40
SAMPLING = SamplingParams(max_tokens=12, seed=9)
PREFILL = WorkerRef(worker_id="prefill-0", incarnation="ip")
DECODE = WorkerRef(worker_id="decode-0", incarnation="id")
MIXED = WorkerRef(worker_id="mixed-0", incarnation="im")
SOURCE = Grant(worker_id="prefill-0", incarnation="ip", generation=3, block_ids=(5, 6, 7), slot=1, secret="ab" * 16)


class World:
    """One broker, a prefill worker of two ranks, a decode and a mixed worker of one, and a router."""

    def __init__(self, connect: Callable[[], Awaitable[Bus]], clock: Clock, group: asyncio.TaskGroup) -> None:
        self._connect = connect
        self.clock = clock
        self.group = group
        self.frames: asyncio.Queue[TokenFrame] = asyncio.Queue()
        self.pulled: tuple[Role, ...] = ()
        self.hints: list[CancelWork] = []
        self.metrics = Metrics()
        self._tasks: list[asyncio.Task[None]] = []
        self.bus: Bus
        self.prefill: ScriptedWorker
        self.decode: ScriptedWorker
        self.mixed: ScriptedWorker
        self.broker: Broker
        self.broker_bus: Bus
        self.edges: BrokerEdges | None = None

    async def open(self, *, with_broker: bool = True, **settings: Any) -> None:
        """Start everybody; the broker may also be a process of its own."""
        self.bus = await self._connect()
        self.prefill = await self._worker(WorkerRole.PREFILL, PREFILL, 2)
        self.decode = await self._worker(WorkerRole.DECODE, DECODE, 1)
        self.mixed = await self._worker(WorkerRole.MIXED, MIXED, 1)
        tokens = await self.bus.subscribe(subjects.tokens_filter(ROUTER))
        self._start(self._read(tokens, lambda data: self.frames.put_nowait(decode(data, TokenFrame))))
        hints = await self.bus.subscribe(f"{subjects.PREFIX}.cancel.>")
        self._start(self._read(hints, lambda data: self.hints.append(decode(data, CancelWork))))
        if with_broker:
            await self.start_broker(**settings)

    async def start_broker(self, *, fence: int = 1, **settings: Any) -> None:
        """Start a broker, or another one, maybe of a later term."""
        self.metrics = Metrics()
        self.broker_bus = await self._connect()
        self.broker, self.edges = await open_broker(
            BrokerSettings(**settings),
            bus=self.broker_bus,
            clock=self.clock,
            log=structlog.get_logger(),
            metrics=self.metrics,
            group=self.group,
            fence=fence,
            offload=inline,
        )

    async def _worker(self, role: WorkerRole, ref: WorkerRef, tp: int) -> ScriptedWorker:
        worker = ScriptedWorker(await self._connect(), role, ref, await manifests(self.clock, ref, tp))
        self._start(worker.answer(await worker.listen()))
        await worker.announce()
        self._start(self._heartbeats(worker))
        return worker

    async def _heartbeats(self, worker: ScriptedWorker) -> None:
        worker.scripts.setdefault("alive", lambda _message: None)
        while True:
            await self.clock.sleep(2.0)
            if "alive" in worker.scripts:
                with suppress(BusError):
                    await worker.announce()

    async def _read(self, subscription: Subscription, take: Callable[[bytes], None]) -> None:
        async for message in subscription:
            take(message.data)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self.group.create_task(work))

    async def stop_broker(self) -> None:
        """Let the broker hear nothing any more, as if it had died."""
        if self.edges is not None:
            await self.edges.close()

    async def close(self) -> None:
        """Stop everybody; whoever connected the buses closes them."""
        await self.stop_broker()
        for task in self._tasks:
            task.cancel()

    # The router.

    def submit_request(self, *, mixed: bool = False, **changes: Any) -> SubmitRequest:
        """A submit as the router sends it."""
        values: dict[str, Any] = {
            "handoff_id": HANDOFF,
            "request_id": REQUEST,
            "attempt": 0,
            "router_id": ROUTER,
            "route": MixedRoute(mixed=MIXED) if mixed else DisaggregatedRoute(prefill=PREFILL, decode=DECODE),
            "num_prompt_tokens": NUM_PROMPT_TOKENS,
            "prompt_hash": "h",
            "sampling": SAMPLING,
            "timeout_ms": 60_000,
        }
        return SubmitRequest(**(values | changes))

    async def submit(self, *, mixed: bool = False, **changes: Any) -> Accepted | Refused:
        """Submit, and return the answer."""
        return await self.ask(BrokerVerb.SUBMIT, self.submit_request(mixed=mixed, **changes))

    async def cancel(self, reason: str = "the client left", **changes: Any) -> Accepted | Refused:
        """Cancel, and return the answer."""
        return await self.ask(BrokerVerb.CANCEL, CancelRequest(handoff_id=HANDOFF, reason=reason, **changes))

    async def ask(self, verb: BrokerVerb, message: msgspec.Struct) -> Accepted | Refused:
        """Ask the broker."""
        reply = await self.bus.request(subjects.broker_rpc(verb), encode(message), timeout=30.0)
        answer: Accepted | Refused = decode(reply.data, Accepted | Refused)  # type: ignore[arg-type]  # a union is not a type
        return answer

    # What workers report.

    def pulls(self, *roles: Role) -> None:
        """Let decode pull these roles, and prefill allow it."""
        self.pulled = roles
        self.decode.scripts[WorkerVerb.RESERVE] = lambda message: Reserved(
            handoff_id=message.handoff_id, grant=GRANT, num_cached_tokens=0, prepare_ms=1.5, pulled=roles
        )

    def reports(self, revision: int = 1, transfer: Transfer = Transfer.PUSH) -> tuple[PartsReport, ...]:
        """The complete reports about both source ranks, of what is moved this way."""
        pulling = transfer is Transfer.PULL
        planned = plan(self.prefill.manifests, self.decode.manifests).parts
        return tuple(
            PartsReport(
                handoff_id=HANDOFF,
                incarnation=DECODE.incarnation if pulling else PREFILL.incarnation,
                source_rank=rank,
                revision=revision,
                parts=tuple(
                    PartDone(
                        namespace=part.namespace,
                        role=part.role,
                        layer=part.layer,
                        destination_rank=part.dst_rank,
                        ranges=((0, 1 if part.role in {Role.CONV, Role.SSM} else NUM_PROMPT_TOKENS),),
                    )
                    for part in planned
                    if part.src_rank == rank and (part.role in self.pulled) == pulling
                ),
                num_bytes=1000,
                push_ms=2.0,
                transfer=transfer,
                shards=(ShardPull(source_rank=rank, destination_rank=0, state=ShardState.DONE),) if pulling else (),
            )
            for rank in range(2)
        )

    async def publish_parts(self, *reports: PartsReport) -> None:
        """Report as prefill does."""
        for report in reports or self.reports():
            await self.prefill.bus.publish(subjects.parts(HANDOFF), encode(report))

    async def finish_prefill(self, **changes: Any) -> Accepted | Refused:
        """Say that the prompt is computed."""
        values: dict[str, Any] = {
            "first_token": 5,
            "queue_ms": 2.0,
            "compute_ms": 8.0,
            "response_prepare_ms": 1.25,
        } | changes
        if self.pulled:
            values = {"source": SOURCE} | values
        message = PrefillFinished(handoff_id=HANDOFF, **({"incarnation": PREFILL.incarnation} | values))
        return await self.ask(BrokerVerb.PREFILL_FINISHED, message)

    async def finish_pull(self, lock: int = 1, **changes: Any) -> Accepted | Refused:
        """Say that nothing is being read any more."""
        values: dict[str, Any] = {"incarnation": DECODE.incarnation, "wait_ms": 3.0, "total_ms": 4.0}
        values["merges"] = tuple(RoleMerge(role=role, merge_ms=0.25) for role in self.pulled)
        message = PullEnded(handoff_id=HANDOFF, lock=lock, **(values | changes))
        return await self.ask(BrokerVerb.PULL_ENDED, message)

    async def take_over(self) -> Accepted | Refused:
        """Say that decode has begun."""
        message = TakenOver(
            handoff_id=HANDOFF,
            incarnation=DECODE.incarnation,
            prepare_ms=0.5,
            enqueue_ms=0.25,
            total_ms=0.75,
            first_step_ns=1,
            first_token_prepare_ms=0.125,
            first_token_rpc_ms=0.0625,
        )
        return await self.ask(BrokerVerb.TAKEN_OVER, message)

    async def end(self, incarnation: str = DECODE.incarnation, **changes: Any) -> Accepted | Refused:
        """Say that the last token was sent."""
        values: dict[str, Any] = {"num_tokens": 12, "finish_reason": FinishReason.LENGTH} | changes
        message = RequestEnded(handoff_id=HANDOFF, incarnation=incarnation, **values)
        return await self.ask(BrokerVerb.ENDED, message)

    # What is to be seen.

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that must happen."""
        async with asyncio.timeout(120):
            while not condition():
                await self.clock.sleep(0.002)

    async def record(self) -> HandoffRecord:
        """The truth about the handoff."""
        bucket = await self.bus.ensure_bucket(self.broker._records._config)
        entry = await bucket.get(HANDOFF)
        assert entry is not None
        return decode(entry.value, HandoffRecord)

    async def events(self) -> list[HandoffEvent]:
        """Every event that was published."""
        assert await self.broker_bus.flush_events()
        return [
            decode(stored.data, HandoffEvent)
            async for stored in self.bus.read_stream(subjects.EVENTS_STREAM, subjects.EVENTS_FILTER)
        ]


def left_by_another(world: World, **changes: Any) -> HandoffRecord:
    """The first record of a handoff, as a broker that is gone wrote it."""
    deadline_at = write_deadline(world.clock.wall_time() + 60)
    return first_record(world.submit_request(**changes), fence=1, deadline_at=deadline_at)


async def next_broker(world: World) -> None:
    """The broker dies without a word, and another one begins."""
    await world.stop_broker()
    for worker in (world.prefill, world.decode):
        worker.heard.clear()
    await world.start_broker()


def in_world(scenario: Callable[[World, MemoryServer], Awaitable[None]], **settings: Any) -> None:
    """Run a scenario on the in-memory bus in virtual time, then stop everybody."""

    async def main(clock: VirtualClock) -> None:
        server = MemoryServer(clock)

        async def connect() -> Bus:
            return server.connect()

        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            world = World(connect, clock, group)
            await world.open(**settings)
            await scenario(world, server)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    run_virtual(main)
