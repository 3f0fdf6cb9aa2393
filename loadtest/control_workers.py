"""`python -m loadtest.control_workers NATS_URL`: a prefill and a decode worker that compute nothing and answer at once.

What they say of their caches is that of fake engines; every part is reported as pushed as soon as the prompt is asked for.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
import structlog

from common.bus.nats import NatsBus
from common.bus.port import Bus, Message
from common.bus.storage import WORKERS_CONFIG
from common.engine.fake.engine import FakeEngine
from common.layout.planner import plan
from common.runtime.clock import SystemClock
from common.runtime.tasks import BoundedTasks
from contracts import subjects
from contracts.codec import Versioned, decode, encode
from contracts.handoff import (
    CommitHandoff,
    Grant,
    HandoffList,
    PartDone,
    PartsReport,
    PrefillFinished,
    Released,
    ReleaseHandoff,
    RequestEnded,
    Reserved,
    ReserveDecode,
    RunPrefill,
    TakenOver,
)
from contracts.manifest import PlannedPart, RankManifest, Role
from contracts.requests import Accepted, FinishReason, TokenFrame, WorkerRef
from contracts.subjects import BrokerVerb, WorkerVerb
from contracts.workers import (
    DescribeWorker,
    WorkerDescription,
    WorkerLoad,
    WorkerRecord,
    WorkerRole,
    WorkerState,
)

PREFILL: Final = WorkerRef(worker_id="prefill-0", incarnation="ip")
DECODE: Final = WorkerRef(worker_id="decode-0", incarnation="id")
PREFILL_TP: Final = 2
DECODE_TP: Final = 1
BLOCK_SIZE: Final = 16
FIRST_TOKEN: Final = 7
_NUM_TOKENS: Final = 2
_HEARTBEAT_S: Final = 2.0
_REQUEST_S: Final = 10.0
_MAX_REPORTS: Final = 8192

Planned: TypeAlias = tuple[PlannedPart, ...]


def parts_of(planned: Planned, source_rank: int, num_prompt_tokens: int) -> tuple[PartDone, ...]:
    """All that one source rank owes, as done."""
    return tuple(
        PartDone(
            namespace=part.namespace,
            role=part.role,
            layer=part.layer,
            destination_rank=part.dst_rank,
            ranges=((0, 1 if part.role in {Role.CONV, Role.SSM} else num_prompt_tokens),),
        )
        for part in planned
        if part.src_rank == source_rank
    )


def grant_for(command: ReserveDecode) -> Grant:
    """Blocks enough for the request. Nobody writes there, so that all requests may have the same."""
    num_blocks = -(-(command.num_prompt_tokens + command.sampling.max_tokens) // BLOCK_SIZE)
    return Grant(
        worker_id=DECODE.worker_id,
        incarnation=DECODE.incarnation,
        generation=1,
        block_ids=tuple(range(num_blocks)),
        slot=0,
    )


class InstantWorkers:
    """Both workers, on one connection: what they cost is not to be mistaken for the broker's."""

    def __init__(
        self, bus: Bus, group: asyncio.TaskGroup, manifests: dict[WorkerRole, tuple[RankManifest, ...]]
    ) -> None:
        self._bus = bus
        self._manifests = manifests
        self._planned = plan(manifests[WorkerRole.PREFILL], manifests[WorkerRole.DECODE]).parts
        self._tasks = BoundedTasks(group, name="report", limit=_MAX_REPORTS)
        self._router_of: dict[str, tuple[str, str, int]] = {}

    async def serve(self, role: WorkerRole, worker: WorkerRef) -> None:
        """Answer one worker's requests, for ever."""
        subscription = await self._bus.subscribe(subjects.worker_rpc_filter(role, worker.worker_id))
        await self._announce(role, worker)
        async with subscription:
            async for message in subscription:
                await message.respond(encode(self._answer(role, worker, message)))

    async def announce(self, role: WorkerRole, worker: WorkerRef) -> None:
        """Keep the worker's record alive, for ever."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            await self._announce(role, worker)

    async def _announce(self, role: WorkerRole, worker: WorkerRef) -> None:
        load = WorkerLoad(num_free_blocks=1 << 16, num_free_slots=1 << 12, num_waiting=0, num_running=0)
        record = WorkerRecord(
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            role=role,
            state=WorkerState.READY,
            model="fake",
            model_fingerprint="fake",
            tp=len(self._manifests[role]),
            dp=1,
            dcp=1,
            block_size=BLOCK_SIZE,
            num_blocks=1 << 16,
            num_slots=1 << 12,
            max_sequence_tokens=1 << 16,
            load=load,
        )
        bucket = await self._bus.ensure_bucket(WORKERS_CONFIG)
        await bucket.put(worker.worker_id, encode(record))

    def _answer(self, role: WorkerRole, worker: WorkerRef, message: Message) -> Versioned:
        match subjects.verb_of(message.subject):
            case WorkerVerb.RESERVE:
                reserve = decode(message.data, ReserveDecode)
                self._router_of[reserve.handoff_id] = (reserve.router_id, reserve.request_id, reserve.attempt)
                return Reserved(
                    handoff_id=reserve.handoff_id, grant=grant_for(reserve), num_cached_tokens=0, prepare_ms=0.0
                )
            case WorkerVerb.RUN:
                run = decode(message.data, RunPrefill)
                self._tasks.try_start(partial(self._compute, run))
                return Accepted(handoff_id=run.handoff_id)
            case WorkerVerb.COMMIT:
                commit = decode(message.data, CommitHandoff)
                self._tasks.try_start(partial(self._take_over, commit))
                return Accepted(handoff_id=commit.handoff_id)
            case WorkerVerb.RELEASE:
                return Released(handoff_id=decode(message.data, ReleaseHandoff).handoff_id)
            case WorkerVerb.DESCRIBE:
                return WorkerDescription(
                    worker_id=worker.worker_id,
                    incarnation=worker.incarnation,
                    num_ranks=len(self._manifests[role]),
                    manifest=self._manifests[role][decode(message.data, DescribeWorker).rank],
                    region=None,
                )
            case WorkerVerb.HANDOFFS:
                return HandoffList(incarnation=worker.incarnation, handoff_ids=())
            case verb:
                raise AssertionError(f"nobody should ask {role} for {verb}")

    async def _compute(self, run: RunPrefill) -> None:
        for rank in range(PREFILL_TP):
            report = PartsReport(
                handoff_id=run.handoff_id,
                incarnation=PREFILL.incarnation,
                source_rank=rank,
                revision=1,
                parts=parts_of(self._planned, rank, run.num_prompt_tokens),
                num_bytes=0,
                push_ms=0.0,
            )
            await self._bus.publish(subjects.parts(run.handoff_id), encode(report))
        await self._tell(
            BrokerVerb.PREFILL_FINISHED,
            PrefillFinished(handoff_id=run.handoff_id, incarnation=PREFILL.incarnation, first_token=FIRST_TOKEN),
        )

    async def _take_over(self, commit: CommitHandoff) -> None:
        router_id, request_id, attempt = self._router_of.pop(commit.handoff_id, ("", "", 0))
        if not router_id:
            return  # delivered once more
        await self._tell(
            BrokerVerb.TAKEN_OVER,
            TakenOver(
                handoff_id=commit.handoff_id,
                incarnation=DECODE.incarnation,
                prepare_ms=0.0,
                enqueue_ms=0.0,
                total_ms=0.0,
                first_step_ns=0,
            ),
        )
        frame = TokenFrame(
            handoff_id=commit.handoff_id,
            request_id=request_id,
            attempt=attempt,
            index=0,
            token_ids=(commit.first_token,) * _NUM_TOKENS,
            final=True,
            num_tokens=_NUM_TOKENS,
            finish_reason=FinishReason.LENGTH,
        )
        await self._bus.publish(subjects.tokens(router_id, request_id), encode(frame))
        await self._tell(
            BrokerVerb.ENDED,
            RequestEnded(
                handoff_id=commit.handoff_id,
                incarnation=DECODE.incarnation,
                num_tokens=_NUM_TOKENS,
                finish_reason=FinishReason.LENGTH,
            ),
        )

    async def _tell(self, verb: BrokerVerb, message: msgspec.Struct) -> None:
        await self._bus.request(subjects.broker_rpc(verb), encode(message), timeout=_REQUEST_S)


async def _main(url: str) -> None:
    clock = SystemClock()
    manifests: dict[WorkerRole, tuple[RankManifest, ...]] = {}
    for role, worker, tp in ((WorkerRole.PREFILL, PREFILL, PREFILL_TP), (WorkerRole.DECODE, DECODE, DECODE_TP)):
        engine = FakeEngine(clock, worker_id=worker.worker_id, incarnation=worker.incarnation, tp=tp)
        manifests[role] = tuple(rank.manifest for rank in (await engine.start()).ranks)
    async with asyncio.TaskGroup() as group:
        bus = await NatsBus.connect(url, name="workers", tasks=group, clock=clock, log=structlog.get_logger())
        workers = InstantWorkers(bus, group, manifests)
        tasks: tuple[Callable[[WorkerRole, WorkerRef], Awaitable[None]], ...] = (workers.serve, workers.announce)
        for role, worker in ((WorkerRole.PREFILL, PREFILL), (WorkerRole.DECODE, DECODE)):
            for task in tasks:
                group.create_task(_run(task, role, worker), name=f"{role}-{task.__name__}")


async def _run(task: Callable[[WorkerRole, WorkerRef], Awaitable[Any]], role: WorkerRole, worker: WorkerRef) -> None:
    await task(role, worker)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
