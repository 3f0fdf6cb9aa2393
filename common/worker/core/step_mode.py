"""Which kind of step was built, for those who count them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from common.worker.core.effective import EffectiveSwitches, computes_prompts
from contracts.rank import StepItem
from contracts.workers import WorkerRole


class StepMode(StrEnum):
    """Kinds of steps: whole prompts alone; prompts of which some are in pieces; decoding alone; prompts and decoding."""

    PREFILL = "prefill"
    CHUNK = "chunk"
    DECODE = "decode"
    MIXED = "mixed"


def modes_of(effective: EffectiveSwitches, role: WorkerRole) -> tuple[StepMode, ...]:
    """The modes that a worker of this role can build with these switches."""
    is_possible = {
        StepMode.PREFILL: computes_prompts(role),
        StepMode.CHUNK: effective.chunked_prefill,
        StepMode.DECODE: role is not WorkerRole.PREFILL,
        StepMode.MIXED: role is WorkerRole.MIXED and effective.mix_batch,
    }
    return tuple(mode for mode, possible in is_possible.items() if possible)


def mode_of(prompts: Iterable[StepItem], *, num_items: int) -> StepMode:
    """The mode of a step of `num_items`, of which `prompts` compute what is known already: a prompt, or a part of it."""
    whole = [item.start == 0 and item.last_chunk for item in prompts]
    if not whole:
        return StepMode.DECODE
    if len(whole) < num_items:
        return StepMode.MIXED
    return StepMode.PREFILL if all(whole) else StepMode.CHUNK
