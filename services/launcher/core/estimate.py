"""What a pair of workers of some sizes would hold and move, before anything is started: `pdmesh plan`."""

from __future__ import annotations

import msgspec

from common.engine.model.config import ModelConfig
from contracts.errors import InvalidValueError
from services.launcher.core.cuts import Cuts, cuts_of
from services.launcher.core.handoff_estimate import HandoffEstimate, estimate_handoff
from services.launcher.core.worker_estimate import WorkerEstimate, WorkerSize, estimate_worker


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, for requests of one length."""

    config: ModelConfig
    cuts: Cuts
    prefill: WorkerEstimate
    decode: WorkerEstimate
    handoff: HandoffEstimate

    @property
    def workers(self) -> tuple[WorkerEstimate, WorkerEstimate]:
        """Both workers, in the order of a request's way."""
        return self.prefill, self.decode


def make_estimate(
    config: ModelConfig, prefill: WorkerSize, decode: WorkerSize, *, num_tokens: int, memory_bytes: int | None
) -> Estimate:
    """Lay out both workers and plan the handoff.

    Raises `InvalidValueError` for a cut or a length that is not legal, `PlanRefusedError` for workers that could not be linked.
    """
    if not 1 <= num_tokens <= config.max_position_embeddings:
        rule = f"1 to max_position_embeddings ({config.max_position_embeddings})"
        raise InvalidValueError(field="tokens", value=num_tokens, rule=rule)
    source, destination = (
        estimate_worker(config, size, num_tokens=num_tokens, memory_bytes=memory_bytes) for size in (prefill, decode)
    )
    return Estimate(
        config=config,
        cuts=cuts_of(config, (prefill.tp, decode.tp, decode.dcp)),
        prefill=source,
        decode=destination,
        handoff=estimate_handoff(config, prefill, destination, num_tokens),
    )
