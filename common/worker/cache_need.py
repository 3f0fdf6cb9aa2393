"""How much memory a worker's caches take, and that this machine has it: known before any rank starts."""

from __future__ import annotations

from typing import Final

import msgspec

from common.dataplane.shm_memory import CELL_BYTES, data_offset
from common.engine.model.config import load_config
from common.engine.ranks.cache_shape import cache_shape
from common.layout.region import lay_out
from common.runtime.host_memory import HostMemory
from common.runtime.settings import SettingsError, SettingsProblem
from common.worker.settings import EngineKind, WorkerSettings
from contracts.errors import InvalidValueError
from contracts.manifest import Coordinates, Dtype, Role
from contracts.rank import DrafterKind
from contracts.workers import WorkerRole

_PAGED: Final = frozenset({Role.KEY, Role.VALUE})
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class CacheNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What the caches of all ranks of all replicas take together, whatever the transport: each rank allocates all of its own at once.

    `num_bytes` are all, with what a region has beside its data. One more block in `num_blocks` takes `block_bytes`, one more slot in
    `num_slots` takes `slot_bytes`, one more staging row `row_bytes`.
    """

    num_bytes: int
    block_bytes: int
    slot_bytes: int
    row_bytes: int


def cache_need(settings: WorkerSettings, role: WorkerRole) -> CacheNeed | None:
    """What a worker of `role` with these settings would allocate; None for an engine that allocates nothing.

    Raises `InvalidValueError` for a checkpoint that cannot be read or a cut that is not legal.
    """
    if settings.engine is not EngineKind.RANKS:
        return None
    shape = cache_shape(
        load_config(settings.model),
        dtype=Dtype(settings.dtype),
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        num_slots=settings.num_slots,
        num_speculative_tokens=settings.depth_of(role),
        keeps_draft=settings.drafter_of(role) is DrafterKind.MTP,
        draft_whole=settings.mtp_draft_body_tp1,
    )
    num_staging_rows = settings.staging_rows_of(role)
    num_bytes = block_bytes = slot_bytes = row_bytes = 0
    for rank in range(settings.tp):
        at = Coordinates(tp_rank=rank, tp_size=settings.tp, dcp_rank=rank % settings.dcp, dcp_size=settings.dcp)
        region = lay_out(shape, at, num_staging_rows)
        num_bytes += data_offset(settings.num_blocks + settings.num_slots) + region.nbytes
        row_bytes += region.staging.row_stride
        block_bytes += CELL_BYTES
        slot_bytes += CELL_BYTES
        for cache in region.caches.values():
            if cache.role in _PAGED:
                block_bytes += cache.entry_bytes
            else:
                slot_bytes += cache.entry_bytes
    dp = settings.dp
    return CacheNeed(
        num_bytes=dp * num_bytes, block_bytes=dp * block_bytes, slot_bytes=dp * slot_bytes, row_bytes=dp * row_bytes
    )


def check_cache_fits(settings: WorkerSettings, role: WorkerRole, memory: HostMemory | None) -> None:
    """Raise `SettingsError` when the caches are more than `memory` holds: it names the setting that is too large, and by how much.

    A checkpoint that cannot be read and an illegal cut are left to the ranks, which check more of them; and so is a machine of
    which nothing is known.
    """
    try:
        need = cache_need(settings, role)
    except InvalidValueError:
        return
    if need is None or memory is None or need.num_bytes <= memory.num_bytes:
        return
    num_staging_rows = settings.staging_rows_of(role)
    # Unless it is said how many there are, a row comes with each slot.
    rows_alone = num_staging_rows if settings.num_staging_rows else 0
    slot_bytes = need.slot_bytes + (need.row_bytes if num_staging_rows and not rows_alone else 0)
    all_slots = settings.num_slots * slot_bytes + rows_alone * need.row_bytes
    depth = settings.depth_of(role)
    if all_slots + need.block_bytes > memory.num_bytes and (fitting := _depth_that_fits(settings, role, memory)) >= 0:
        key, most, others = "num_speculative_tokens", fitting, "it, num_slots or dp"
    elif all_slots + need.block_bytes > memory.num_bytes:
        left = memory.num_bytes - need.block_bytes - rows_alone * need.row_bytes
        levers = (("num_staging_rows", rows_alone), ("num_speculative_tokens", depth))
        others = ", ".join([*(name for name, is_used in levers if is_used), "it"]) + " or dp"
        key, most = "num_slots", left // slot_bytes
    else:
        guesses = ", num_speculative_tokens" if depth else ""
        most, others = (memory.num_bytes - all_slots) // need.block_bytes, f"it, num_slots{guesses} or dp"
        key = "num_blocks"
    rule = (
        f"at most about {max(0, min(most, getattr(settings, key) - 1))}: with dp={settings.dp} and tp={settings.tp} the caches of all ranks "
        f"take {_shown(need.num_bytes)}, and {_shown(memory.num_bytes)} are available ({memory.bound}); the weights come on "
        f"top. Lower {others}, or give this worker more memory"
    )
    raise SettingsError([SettingsProblem(key=key, value=str(getattr(settings, key)), rule=rule)])


def _depth_that_fits(settings: WorkerSettings, role: WorkerRole, memory: HostMemory) -> int:
    """The most guesses, below those that are set, with which everything would fit; -1 if it would not even without."""
    for depth in reversed(range(settings.depth_of(role))):
        need = cache_need(msgspec.structs.replace(settings, num_speculative_tokens=depth), role)
        if need is not None and need.num_bytes <= memory.num_bytes:
            return depth
    return -1


def _shown(num_bytes: int) -> str:
    """As people say it, with the bytes themselves."""
    amount, unit = float(num_bytes), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {_UNITS[unit]} ({num_bytes} bytes)" if unit else f"{num_bytes} bytes"
