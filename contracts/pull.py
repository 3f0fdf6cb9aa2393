"""What is said of a pull: decode reads cache that a prefill worker holds, shard by shard, under the request's lock."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from contracts.codec import Versioned
from contracts.errors import ErrorInfo
from contracts.ids import Token
from contracts.manifest import Role
from contracts.numbers import Whole
from contracts.requests import WorkerRef


class Transfer(StrEnum):
    """Who moves bytes: the source writes them, or the destination reads them."""

    PUSH = "push"
    PULL = "pull"


class ShardState(StrEnum):
    """Where the pull of one shard is. At the begin of a pull all of its shards are waiting."""

    WAITING = "waiting"
    PULLING = "pulling"
    DONE = "done"
    FAILED = "failed"


class ShardPull(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The pull of what one source rank holds for one destination rank: one shard.

    `started_ns` is decode's monotonic clock when the read began, `duration_ms` how long it took until its end. `is_stale`: it failed
    because the source has taken its memory back.
    """

    source_rank: Whole
    destination_rank: Whole
    state: ShardState
    num_bytes: Whole = 0
    started_ns: Whole = 0
    duration_ms: float = 0.0
    reason: str = ""
    is_stale: bool = False


class RoleMerge(msgspec.Struct, frozen=True, kw_only=True):
    """How long one role's shards took to be merged into their final places, on the slowest rank, in ms."""

    role: Role
    merge_ms: float


class PullEnded(Versioned, frozen=True, kw_only=True, tag="pull_ended"):
    """Decode to broker: no shard is being read any more, and the lock is free.

    Without an `error` every part has been merged, and reported. `wait_ms` is the time from the first read to the end of the last,
    `parallel` whether shards were read side by side.
    """

    handoff_id: Token
    incarnation: Token
    lock: Whole
    wait_ms: float = 0.0
    merges: tuple[RoleMerge, ...] = ()
    total_ms: float = 0.0
    parallel: bool = True
    error: ErrorInfo | None = None


class RequestLock(msgspec.Struct, frozen=True, kw_only=True):
    """Who may move a request's bytes now by pulling: `holder`, since `taken_at`. Each taking has a higher `number`."""

    number: Whole
    holder: WorkerRef
    taken_at: str
