"""What settings come to in a worker of one role, where that is not what they say. Pure.

The settings stay as they were given: whoever acts on one of these switches asks here, and whoever shows one shows both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from common.worker.settings import PulledRoles, WorkerSettings
from contracts.pull import Transfer
from contracts.rank import DrafterKind
from contracts.workers import WorkerRole

_NOTHING: Final = "nothing"


class EffectiveSwitches(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker goes by.

    `chunked_prefill`: prompts may be computed in pieces. `max_prompt_tokens`: the longest prompt that is computed at all; None
    where only memory bounds it. `mix_batch`: prompts and decoding share steps. `num_staging_rows`: of each rank.
    `dcp_interleave`: tokens in succession on one rank of a group. `num_speculative_tokens`: guesses for a sequence in one step;
    `drafter`: whose they are, or whose cache is kept for others.
    """

    chunked_prefill: bool
    mix_batch: bool
    max_prompt_tokens: int | None
    num_staging_rows: int
    dcp_interleave: int
    num_speculative_tokens: int = 0
    drafter: DrafterKind = DrafterKind.NONE


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A setting whose effect is not its value, and why."""

    key: str
    value: object
    effective: object
    reason: str


def is_prefill_chunked(settings: WorkerSettings, role: WorkerRole) -> bool:
    """Whether a worker of this role computes prompts in pieces. The only place that decides it, whatever may imply it one day."""
    return computes_prompts(role) and settings.chunked_prefill


def computes_prompts(role: WorkerRole) -> bool:
    """Whether a worker of this role computes prompts at all."""
    return role is not WorkerRole.DECODE


def effective_of(settings: WorkerSettings, role: WorkerRole) -> EffectiveSwitches:
    """What `settings` come to in a worker of `role`."""
    chunked = is_prefill_chunked(settings, role)
    return EffectiveSwitches(
        chunked_prefill=chunked,
        mix_batch=settings.mix_batch and settings.dcp == 1,
        max_prompt_tokens=settings.max_step_tokens if computes_prompts(role) and not chunked else None,
        num_staging_rows=settings.staging_rows_of(role),
        dcp_interleave=settings.dcp_interleave or settings.block_size,
        num_speculative_tokens=settings.depth_of(role),
        drafter=settings.drafter_of(role),
    )


def given_for_pulls(settings: WorkerSettings) -> tuple[str, ...]:
    """The settings which only a decode worker that pulls looks at, as far as they are not their defaults."""
    given = {
        "pull": settings.pull is not PulledRoles.STATES,
        "parallel_shard_pull": not settings.parallel_shard_pull,
        "num_staging_rows": settings.num_staging_rows != 0,
    }
    return tuple(key for key, is_given in given.items() if is_given)


def resolved_of(settings: WorkerSettings, role: WorkerRole) -> tuple[Resolved, ...]:
    """Every switch that comes to something else than was set, in the order of the settings; last those that come to nothing."""
    effective = effective_of(settings, role)
    found = [
        Resolved(key=key, value=getattr(settings, key), effective=getattr(effective, key), reason=reason)
        for key, reason in _reasons(settings, role)
        if getattr(settings, key) != getattr(effective, key)
    ]
    if role is WorkerRole.DECODE and settings.transfer is not Transfer.PULL:
        reason = f"this worker has transfer={settings.transfer}"
        found += [
            Resolved(key=key, value=getattr(settings, key), effective=_NOTHING, reason=reason)
            for key in given_for_pulls(settings)
        ]
    return tuple(found)


def _reasons(settings: WorkerSettings, role: WorkerRole) -> Iterator[tuple[str, str]]:
    """Why a switch may come to something else."""
    if settings.dcp > 1:
        yield "dcp_interleave", "0 means block_size"
    yield "chunked_prefill", "a decode worker computes no prompts"
    yield "mix_batch", f"with dcp={settings.dcp} prompts and decoding do not share steps"
    if role is not WorkerRole.DECODE:
        yield "num_staging_rows", f"a {role} worker pulls nothing"
    elif settings.transfer is Transfer.PULL:
        yield "num_staging_rows", "0 means num_slots"
    if settings.num_speculative_tokens:
        keeps = settings.drafter_of(role) is DrafterKind.MTP
        also = ": it keeps the draft head's cache for those who do" if keeps else ""
        yield "num_speculative_tokens", f"a prefill worker guesses nothing{also}"
        yield "drafter", "a prefill worker has nothing to keep for an n-gram drafter"
