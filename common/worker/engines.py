"""Chooses the engine that a worker's settings name."""

from __future__ import annotations

from typing import assert_never

from common.engine.fake import FakeEngine
from common.engine.port import Engine
from common.engine.rank_group import RankGroup
from common.engine.rank_launch import ProcessLauncher
from common.runtime.clock import Clock
from common.worker.settings import EngineKind, WorkerSettings
from contracts.rank import StartRank


def make_engine(settings: WorkerSettings, incarnation: str, clock: Clock) -> Engine:
    """An engine that has not been started."""
    match settings.engine:
        case EngineKind.RANKS:
            starts = tuple(_start_of(settings, incarnation, rank) for rank in range(settings.tp))
            return RankGroup(starts, ProcessLauncher())
        case EngineKind.FAKE:
            return FakeEngine(
                clock,
                worker_id=settings.worker_id,
                incarnation=incarnation,
                tp=settings.tp,
                block_size=settings.block_size,
                num_blocks=settings.num_blocks,
                num_slots=settings.num_slots,
            )
        case _:
            assert_never(settings.engine)


def _start_of(settings: WorkerSettings, incarnation: str, rank: int) -> StartRank:
    return StartRank(
        worker_id=settings.worker_id,
        incarnation=incarnation,
        rank=rank,
        tp=settings.tp,
        model_dir=str(settings.model),
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        num_slots=settings.num_slots,
        max_step_tokens=settings.max_step_tokens,
        max_step_sequences=settings.num_slots,
        dtype=settings.dtype,
        device=settings.device,
        collectives=settings.collectives,
        collective_timeout_ms=settings.collective_timeout_ms,
        transport=settings.transport,
        transport_dir=str(settings.transport_dir),
        failpoints=settings.failpoints,
    )
