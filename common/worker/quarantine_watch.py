"""Finds that too much of a worker's memory waits for writers that do not stop: only a new start gets it back."""

from __future__ import annotations

from typing import Final

from common.dataplane.tcp_transfer import SILENCE_S
from common.runtime.clock import Clock
from common.worker.replica_set import ReplicaSet

MAX_SHARE: Final = 0.1
"""Of the blocks or slots of one replica."""
PATIENCE_S: Final = SILENCE_S + 5.0
"""How long: a writer that was killed, or wakes up, gives its memory back within this time; so does one whose peer stands still, over tcp."""
_LOOK_EVERY_S: Final = 1.0


async def wait_overrun(replicas: ReplicaSet, clock: Clock) -> str:
    """Return, once more than `MAX_SHARE` of a pool has been quarantined for `PATIENCE_S` without a pause, which and how much."""
    since: float | None = None
    while True:
        await clock.sleep(_LOOK_EVERY_S)
        now = clock.monotonic()
        overrun = _overrun(replicas)
        if not overrun:
            since = None
        elif since is None:
            since = now
        elif now - since >= PATIENCE_S:
            return overrun


def _overrun(replicas: ReplicaSet) -> str:
    for replica in replicas:
        pool = replica.pool
        counts = (
            ("blocks", pool.num_quarantined_blocks, pool.num_blocks),
            ("slots", pool.num_quarantined_slots, pool.num_slots),
        )
        for what, num_quarantined, num_all in counts:
            if num_quarantined > MAX_SHARE * num_all:
                return f"{num_quarantined} of {num_all} {what} of replica {replica.dp_rank}"
    return ""
