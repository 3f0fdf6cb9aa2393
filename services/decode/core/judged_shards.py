"""What a pull says of the connections that it used: over which something arrived, and over which it did not. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from common.worker.core.doubts import Connection
from contracts.errors import ErrorCode, ErrorInfo
from contracts.pull import ShardPull, ShardState


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Connections over which a shard arrived, and those over which one failed to."""

    moved: tuple[Connection, ...]
    failed: tuple[Connection, ...]


def judge_shards(link: Connection, shards: Iterable[ShardPull], error: ErrorInfo | None) -> Judged:
    """Judge a pull over `link`, that of the two replicas, by its shards and by the `error` that it ended with.

    A shard that never began, or whose source took its memory back, says nothing of its connection. A transfer that failed without a shard, as when the ranks know of no link,
    is a failure of the link as a whole.
    """
    found = tuple(shards)
    arrived = tuple(_over(link, shard) for shard in found if shard.state is ShardState.DONE)
    if error is None:
        return Judged(moved=(link, *arrived), failed=())
    if error.code is not ErrorCode.TRANSFER_FAILED:
        return Judged(moved=arrived, failed=())
    failed = tuple(_over(link, shard) for shard in found if _was_lost(shard))
    return Judged(moved=arrived, failed=failed if found else (link,))


def _was_lost(shard: ShardPull) -> bool:
    return shard.state is ShardState.FAILED and shard.started_ns > 0 and not shard.is_stale


def _over(link: Connection, shard: ShardPull) -> Connection:
    return msgspec.structs.replace(link, own_rank=shard.destination_rank, peer_rank=shard.source_rank)
