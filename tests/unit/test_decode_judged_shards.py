"""Which connections a pull speaks for, and which against."""

from __future__ import annotations

import msgspec

from common.worker.core.doubts import Connection
from contracts.errors import ErrorCode, ErrorInfo
from contracts.pull import ShardPull, ShardState
from contracts.requests import WorkerRef
from services.decode.core.judged_shards import Judged, judge_shards

LINK = Connection(peer=WorkerRef(worker_id="p", incarnation="i"), own_dp_rank=1, peer_dp_rank=2)
FAILED = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message="shard of source rank 1: the peer does not answer")


def shard(source_rank: int, state: ShardState, started_ns: int = 5, *, is_stale: bool = False) -> ShardPull:
    """One that went to rank 3."""
    return ShardPull(source_rank=source_rank, destination_rank=3, state=state, started_ns=started_ns, is_stale=is_stale)


def over(source_rank: int) -> Connection:
    """Its connection."""
    return msgspec.structs.replace(LINK, own_rank=3, peer_rank=source_rank)


def test_a_pull_that_is_done_speaks_for_all_its_connections_and_for_the_link() -> None:
    """Whatever was held against them is over."""
    shards = (shard(0, ShardState.DONE), shard(1, ShardState.DONE))
    assert judge_shards(LINK, shards, None) == Judged(moved=(LINK, over(0), over(1)), failed=())


def test_of_a_pull_that_failed_only_the_shards_that_did_count() -> None:
    """One that arrived speaks for its connection, one that was not begun for none."""
    shards = (shard(0, ShardState.DONE), shard(1, ShardState.FAILED), shard(2, ShardState.FAILED, 0))
    assert judge_shards(LINK, shards, FAILED) == Judged(moved=(over(0),), failed=(over(1),))


def test_a_transfer_that_failed_without_a_shard_is_the_links_failure() -> None:
    """The ranks know of no link."""
    assert judge_shards(LINK, (), FAILED) == Judged(moved=(), failed=(LINK,))


def test_a_pull_that_somebody_ended_is_no_failure() -> None:
    """A request that was released, here or at its source, or that a merge failed for, says nothing against a connection."""
    cancelled = ErrorInfo(code=ErrorCode.CANCELLED, message="sequence 1 was released")
    shards = (shard(0, ShardState.DONE), shard(1, ShardState.FAILED))
    assert judge_shards(LINK, shards, cancelled) == Judged(moved=(over(0),), failed=())
    taken_back = (shard(0, ShardState.DONE), shard(1, ShardState.FAILED, is_stale=True))
    assert judge_shards(LINK, taken_back, FAILED) == Judged(moved=(over(0),), failed=())
    assert judge_shards(LINK, shards[:1], FAILED) == Judged(moved=(over(0),), failed=())
