"""What a worker's asyncio process and its rank processes say of a pull: see `contracts.rank`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from contracts.errors import ErrorInfo
from contracts.handoff import Grant
from contracts.manifest import Namespace, Role
from contracts.pull import ShardPull


class PullShards(msgspec.Struct, frozen=True, kw_only=True, tag="pull_shards"):
    """Read the caches of `roles` of a bound sequence from every rank of `source`, a grant to read in a linked source worker.

    KEY and VALUE of the tokens from `num_cached_tokens` to the end of the prompt go straight into the sequence's blocks, BOOTSTRAP
    straight into its slot. CONV and SSM go into its staging row, and from there into its slot once every shard of this rank is there. With `parallel` the shards
    are read side by side, else one after the other. `lock` numbers the pulls of a sequence. Answered by `Done` as soon as it has
    begun; `ShardPulled`, `RoleMerged` and at last `PullStopped` follow.
    """

    seq: int
    lock: int
    source: Grant
    roles: tuple[Role, ...]
    num_cached_tokens: int
    parallel: bool
    timeout_ms: int


class PulledPart(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What has arrived of one part: tokens `[start, end)` of KEY or VALUE, counted by those that this rank keeps, `[0, 1)` of a slot."""

    namespace: Namespace
    role: Role
    layer: int
    source_rank: int
    ranges: tuple[tuple[int, int], ...]


class ShardPulled(msgspec.Struct, frozen=True, kw_only=True, tag="shard_pulled"):
    """The read of one shard has begun (state `pulling`), or is over (`done`, `failed`). A shard that never began only fails.

    `parts` are those that are in their places: all but CONV and SSM, which are once they are merged.
    """

    rank: int
    seq: int
    lock: int
    shard: ShardPull
    parts: tuple[PulledPart, ...] = ()


class RoleMerged(msgspec.Struct, frozen=True, kw_only=True, tag="role_merged"):
    """All shards are there, and the states of one role are in the sequence's slot: `parts` of all source ranks."""

    rank: int
    seq: int
    lock: int
    role: Role
    merge_ms: float
    parts: tuple[PulledPart, ...]


class PullStopped(msgspec.Struct, frozen=True, kw_only=True, tag="pull_stopped"):
    """Nothing is read or merged any more for this pull, at this rank. With an `error` nothing has been merged.

    `started_ns` is when the rank began with the pull, `ended_ns` when the last shard was over and merged (host monotonic).
    """

    rank: int
    seq: int
    lock: int
    started_ns: int
    ended_ns: int
    error: ErrorInfo | None = None


PullReport: TypeAlias = ShardPulled | RoleMerged | PullStopped
