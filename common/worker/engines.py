"""Makes and starts the engines that a worker's settings name: one for each of its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import assert_never

from common.engine.fake import FakeEngine
from common.engine.port import Engine
from common.engine.rank_group import RankGroup
from common.engine.rank_launch import ProcessLauncher
from common.runtime.clock import Clock
from common.worker.replica import StartedEngine
from common.worker.settings import EngineKind, WorkerSettings
from contracts.rank import StartRank


def make_engines(
    settings: WorkerSettings, incarnation: str, clock: Clock, *, num_staging_rows: int = 0
) -> tuple[Engine, ...]:
    """Engines that have not been started, in the order of their dp rank."""
    return tuple(
        _make_engine(settings, incarnation, clock, dp_rank, num_staging_rows) for dp_rank in range(settings.dp)
    )


async def start_engines(engines: Sequence[Engine]) -> tuple[StartedEngine, ...]:
    """Start all engines, side by side. When one fails the others are cancelled; whoever made them stops them."""
    async with asyncio.TaskGroup() as group:
        starts = [group.create_task(engine.start(), name=f"start-{n}") for n, engine in enumerate(engines)]
    return tuple(
        StartedEngine(engine=engine, info=start.result()) for engine, start in zip(engines, starts, strict=True)
    )


def _make_engine(
    settings: WorkerSettings, incarnation: str, clock: Clock, dp_rank: int, num_staging_rows: int
) -> Engine:
    match settings.engine:
        case EngineKind.RANKS:
            starts = tuple(
                _start_of(settings, incarnation, dp_rank, rank, num_staging_rows) for rank in range(settings.tp)
            )
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
                num_staging_rows=num_staging_rows,
            )
        case _:
            assert_never(settings.engine)


def _start_of(settings: WorkerSettings, incarnation: str, dp_rank: int, rank: int, num_staging_rows: int) -> StartRank:
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
        num_staging_rows=num_staging_rows,
        max_step_tokens=settings.max_step_tokens,
        max_step_sequences=settings.num_slots,
        dtype=settings.dtype,
        device=settings.device,
        collectives=settings.collectives,
        collective_timeout_ms=settings.collective_timeout_ms,
        transport=settings.transport,
        transport_dir=str(settings.transport_dir),
        transport_host=settings.transport_host,
        transport_advertise_host=settings.transport_advertise_host,
        failpoints=settings.failpoints,
    )
