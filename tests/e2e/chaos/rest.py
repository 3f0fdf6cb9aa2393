"""A mesh at rest: every worker serves, and holds nothing."""

from __future__ import annotations

from typing import Final

import aiohttp
from nats.errors import Error as NatsError

from common.runtime.clock import Deadline, SystemClock
from contracts.errors import PdmeshError
from tests.e2e.mesh_probe import Probe

_POLL_S: Final = 0.2


async def unrest_after(probe: Probe, num_workers: int, timeout_s: float) -> str:
    """Wait until the mesh is at rest, and return ""; or, once the time is up, what it lacks, or holds that it would not at rest."""
    clock = SystemClock()
    deadline = Deadline.after(clock, timeout_s)
    while lacking := await _unrest(probe, num_workers):
        if deadline.passed:
            return lacking
        await clock.sleep(_POLL_S)
    return ""


async def _unrest(probe: Probe, num_workers: int) -> str:
    try:
        async with probe.http.get(f"{probe.url}/ready") as response:
            if response.status != 200:
                return await response.text()
        records = await probe.workers()
        if len(records) != num_workers:
            return f"{len(records)} workers of {num_workers} have registered"
        for record in records:
            scan = await probe.scan(record.role, record.worker_id)
            held = (scan.handoff_ids, scan.held_blocks, scan.held_slots, scan.num_prompt_buffers)
            load = record.load
            if any(held) or any(scan.rank_sequences):
                return f"{record.worker_id} holds {held} and {scan.rank_sequences}"
            if (load.num_free_blocks, load.num_free_slots) != (record.num_blocks, record.num_slots):
                return f"{record.worker_id} has {load} left of {record.num_blocks} blocks, {record.num_slots} slots"
    except (aiohttp.ClientError, NatsError, PdmeshError, TimeoutError, OSError, KeyError) as error:
        return repr(error)
    return ""
