"""One replica of a worker: an engine, and what belongs to it alone - its memory, its schedule, the loop that drives it."""

from __future__ import annotations

import msgspec

from common.engine.port import Engine, EngineInfo
from common.worker.core.blocks import BlockPool
from common.worker.core.growth import Growth
from common.worker.core.replica_choice import ReplicaLoad
from common.worker.core.scheduler import Scheduler, StepLimits
from common.worker.engine_loop import EngineLoop, StepObserver


class StartedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that serves, and what it said of itself."""

    engine: Engine
    info: EngineInfo


class Replica:
    """Replica `dp_rank` of its worker. A sequence lives in one replica from its first memory to its last."""

    def __init__(
        self,
        started: StartedEngine,
        limits: StepLimits,
        observer: StepObserver,
        *,
        release_timeout_ms: int,
        growth: Growth | None = None,
    ) -> None:
        info, at = started.info, started.info.ranks[0].manifest.coordinates
        self.dp_rank = at.dp_rank
        self.engine = started.engine
        self.info = info
        self.pool = BlockPool(
            num_blocks=info.num_blocks,
            num_slots=info.num_slots,
            block_size=info.block_size,
            num_staging_rows=info.num_staging_rows,
            dp_rank=at.dp_rank,
            dp=at.dp_size,
            dcp=info.dcp,
        )
        self.scheduler = Scheduler(self.pool, limits, growth)
        self.loop = EngineLoop(
            started.engine, self.pool, self.scheduler, observer, release_timeout_ms=release_timeout_ms
        )

    @property
    def load(self) -> ReplicaLoad:
        """What new work is placed by."""
        return ReplicaLoad(
            dp_rank=self.dp_rank,
            num_blocks=self.pool.num_blocks,
            num_slots=self.pool.num_slots,
            num_free_blocks=self.pool.num_free_blocks,
            num_kept_blocks=self.pool.num_kept_blocks,
            num_free_slots=self.pool.num_free_places,
            num_waiting=self.scheduler.num_waiting,
            num_running=self.scheduler.num_running,
            num_prompt_tokens_left=self.scheduler.num_prompt_tokens_left,
        )
