"""Makes and starts the engines that a worker's settings name: one for each of its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import assert_never

from common.engine.fake.engine import FakeEngine
from common.engine.port import Engine
from common.engine.ranks.group import RankGroup
from common.engine.ranks.launch import ProcessLauncher
from common.runtime.clock import Clock
from common.worker.replica import StartedEngine
from common.worker.settings import EngineKind, WorkerSettings
from contracts.rank import StartRank
from contracts.workers import WorkerRole


def make_engines(settings: WorkerSettings, role: WorkerRole, incarnation: str, clock: Clock) -> tuple[Engine, ...]:
    """Engines of a worker of `role` that have not been started, in the order of their dp rank."""
    return tuple(_make_engine(settings, role, incarnation, clock, dp_rank) for dp_rank in range(settings.dp))


async def start_engines(engines: Sequence[Engine]) -> tuple[StartedEngine, ...]:
    """Start all engines, side by side. When one fails the others are cancelled; whoever made them stops them."""
    async with asyncio.TaskGroup() as group:
        starts = [group.create_task(engine.start(), name=f"start-{n}") for n, engine in enumerate(engines)]
    return tuple(
        StartedEngine(engine=engine, info=start.result()) for engine, start in zip(engines, starts, strict=True)
    )


def _make_engine(settings: WorkerSettings, role: WorkerRole, incarnation: str, clock: Clock, dp_rank: int) -> Engine:
    match settings.engine:
        case EngineKind.RANKS:
            starts = tuple(_start_of(settings, role, incarnation, dp_rank, rank) for rank in range(settings.tp))
            return RankGroup(starts, ProcessLauncher())
        case EngineKind.FAKE:
            return FakeEngine(
                clock,
                worker_id=settings.worker_id,
                incarnation=incarnation,
                dp_rank=dp_rank,
                dp=settings.dp,
                tp=settings.tp,
                dcp=settings.dcp,
                block_size=settings.block_size,
                num_blocks=settings.num_blocks,
                num_slots=settings.num_slots,
                num_staging_rows=settings.staging_rows_of(role),
                drafter=settings.drafter_of(role),
                num_speculative_tokens=settings.depth_of(role),
                mtp_draft_body_tp1=settings.mtp_draft_body_tp1,
            )
        case _:
            assert_never(settings.engine)


def _start_of(settings: WorkerSettings, role: WorkerRole, incarnation: str, dp_rank: int, rank: int) -> StartRank:
    return StartRank(
        worker_id=settings.worker_id,
        incarnation=incarnation,
        dp_rank=dp_rank,
        dp=settings.dp,
        rank=rank,
        tp=settings.tp,
        dcp=settings.dcp,
        model_dir=str(settings.model),
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        num_slots=settings.num_slots,
        num_staging_rows=settings.staging_rows_of(role),
        max_step_tokens=settings.max_step_tokens,
        max_step_sequences=settings.num_slots,
        dtype=settings.dtype,
        device=settings.device,
        drafter=settings.drafter_of(role),
        num_speculative_tokens=settings.depth_of(role),
        mtp_draft_body_tp1=settings.mtp_draft_body_tp1,
        collectives=settings.collectives,
        collective_timeout_ms=settings.collective_timeout_ms,
        transport=settings.transport,
        transport_dir=str(settings.transport_dir),
        transport_host=settings.transport_host,
        transport_advertise_host=settings.transport_advertise_host,
        failpoints=settings.failpoints,
    )
