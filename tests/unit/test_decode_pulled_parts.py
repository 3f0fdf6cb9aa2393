"""What decode's ranks say of a pull becomes one cumulative report for each source rank."""

from __future__ import annotations

from contracts.handoff import PartDone
from contracts.manifest import Namespace, Role
from contracts.pull import ShardPull, ShardState, Transfer
from contracts.rank_pull import PulledPart, PullStopped, RoleMerged, ShardPulled
from services.decode.core.pulled_parts import PulledParts


def shard(source: int, rank: int, state: ShardState, num_bytes: int = 0, duration_ms: float = 0.0) -> ShardPull:
    """One shard, begun at 1000."""
    return ShardPull(
        source_rank=source,
        destination_rank=rank,
        state=state,
        num_bytes=num_bytes,
        started_ns=1000,
        duration_ms=duration_ms,
    )


def part(role: Role, source: int, *ranges: tuple[int, int]) -> PulledPart:
    """Some of one part of layer 3."""
    return PulledPart(namespace=Namespace.TARGET, role=role, layer=3, source_rank=source, ranges=ranges)


def pulled(of: ShardPull, *parts: PulledPart, lock: int = 1) -> ShardPulled:
    """A rank's word on a shard."""
    return ShardPulled(rank=of.destination_rank, seq=1, lock=lock, shard=of, parts=parts)


def done(role: Role, rank: int, *ranges: tuple[int, int]) -> PartDone:
    """That part as the broker hears of it."""
    return PartDone(namespace=Namespace.TARGET, role=role, layer=3, destination_rank=rank, ranges=ranges)


def test_reports_are_cumulative_and_by_source_rank() -> None:
    """Each change raises the revision of its source rank alone; bytes and times are those of shards that are done."""
    parts = PulledParts("r1-0", "i1")
    parts.begin(source_dp_rank=2)
    assert parts.reports() == ()
    assert parts.add(pulled(shard(0, 0, ShardState.PULLING))) == {0}
    assert parts.add(pulled(shard(0, 0, ShardState.DONE, 100, 2.0), part(Role.KEY, 0, (0, 40)))) == {0}
    assert parts.add(pulled(shard(1, 0, ShardState.DONE, 50, 3.0))) == {1}
    merged = RoleMerged(
        rank=0, seq=1, lock=1, role=Role.SSM, merge_ms=0.5, parts=(part(Role.SSM, 0, (0, 1)), part(Role.SSM, 1, (0, 1)))
    )
    assert parts.add(merged) == {0, 1}
    assert parts.add(PullStopped(rank=0, seq=1, lock=1, started_ns=0, ended_ns=9)) == set()
    first, second = parts.reports()
    assert (first.source_rank, first.source_dp_rank, first.transfer) == (0, 2, Transfer.PULL)
    assert (first.revision, first.num_bytes, first.push_ms) == (3, 100, 2.0)
    assert first.parts == (done(Role.KEY, 0, (0, 40)), done(Role.SSM, 0, (0, 1)))
    assert first.shards == (shard(0, 0, ShardState.DONE, 100, 2.0),)
    assert (second.source_rank, second.revision, second.parts) == (1, 2, (done(Role.SSM, 0, (0, 1)),))


def test_a_repeat_tells_nothing_new() -> None:
    """The engine may report from the beginning again: no revision changes."""
    parts = PulledParts("r1-0", "i1")
    parts.begin(source_dp_rank=0)
    report = pulled(shard(0, 1, ShardState.DONE, 7, 1.0), part(Role.VALUE, 0, (0, 16), (32, 40)))
    assert parts.add(report) == {0}
    before = parts.reports()
    assert parts.add(report) == set()
    assert parts.reports() == before
    assert before[0].parts == (done(Role.VALUE, 1, (0, 16), (32, 40)),)


def test_a_failed_shard_counts_no_bytes() -> None:
    """It is told as failed, and nothing of it is there."""
    parts = PulledParts("r1-0", "i1")
    parts.begin(source_dp_rank=0)
    parts.add(pulled(shard(1, 0, ShardState.FAILED, 0, 4.0)))
    (report,) = parts.reports()
    assert (report.source_rank, report.num_bytes, report.parts) == (1, 0, ())
    assert report.shards[0].state is ShardState.FAILED


def test_another_lock_begins_anew_and_revisions_go_on() -> None:
    """What the pull before had read does not count; its late report could not be told from a newer one by a lower revision."""
    parts = PulledParts("r1-0", "i1")
    parts.begin(source_dp_rank=0)
    parts.add(pulled(shard(0, 0, ShardState.DONE, 100, 2.0), part(Role.KEY, 0, (0, 40))))
    parts.begin(source_dp_rank=0)
    assert parts.reports() == ()
    assert parts.add(pulled(shard(0, 0, ShardState.PULLING), lock=2)) == {0}
    (report,) = parts.reports()
    assert (report.revision, report.parts, report.num_bytes) == (2, (), 0)


def test_whatever_is_known_of_a_handoff_makes_reports_of_it() -> None:
    """Parts without a shard too: each report names the handoff and the start of the worker, and the shards are in order."""
    parts = PulledParts("r1-0", "i1")
    merged = RoleMerged(rank=1, seq=1, lock=1, role=Role.CONV, merge_ms=0.5, parts=(part(Role.CONV, 2, (0, 1)),))
    assert parts.add(merged) == {2}
    assert parts.add(merged) == set()
    (report,) = parts.reports()
    assert (report.handoff_id, report.incarnation, report.source_dp_rank) == ("r1-0", "i1", 0)
    assert (report.source_rank, report.revision, report.parts) == (2, 1, (done(Role.CONV, 1, (0, 1)),))
    assert parts.add(pulled(shard(2, 1, ShardState.PULLING))) == {2}
    again = pulled(shard(2, 1, ShardState.DONE, 8, 1.0), part(Role.CONV, 2, (0, 1)), part(Role.KEY, 3, (0, 16)))
    assert parts.add(again) == {2, 3}
    assert parts.add(pulled(shard(2, 0, ShardState.PULLING))) == {2}
    assert [(each.source_rank, each.destination_rank) for each in parts.shards] == [(2, 0), (2, 1)]
    assert [each.source_rank for each in parts.reports()] == [2, 3]
    assert parts.report(3).revision == 1
    parts.begin(source_dp_rank=1)
    assert (parts.shards, parts.reports()) == ((), ())
