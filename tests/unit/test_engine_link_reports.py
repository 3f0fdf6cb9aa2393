"""Reports of links as the parent of the ranks takes them: complete, late, given up, or never."""

from __future__ import annotations

import pytest

from common.engine.port import EngineDeadError
from common.engine.ranks.link_reports import LinkReports
from contracts.rank import PeerLinked
from contracts.requests import WorkerRef

PEER = WorkerRef(worker_id="d", incarnation="j1")
RESTARTED = WorkerRef(worker_id="d", incarnation="j2")


def report(rank: int, attempt: int, peer: WorkerRef = PEER) -> PeerLinked:
    """A rank has linked."""
    return PeerLinked(rank=rank, peer=peer, attempt=attempt)


async def test_an_attempt_ends_with_the_last_ranks_report() -> None:
    """A rank that says it twice does not count for another."""
    reports = LinkReports(2)
    linking = reports.begin(PEER, 1)
    for _ in range(2):
        reports.put(1, report(1, 1))
    assert not linking.ended.done()
    reports.put(0, report(0, 1))
    await linking.ended
    assert (sorted(linking.reports), linking.is_given_up) == ([0, 1], False)


async def test_late_reports_are_dropped() -> None:
    """Those of an earlier attempt, of an earlier start, of a peer that is unlinked or was never heard of."""
    reports = LinkReports(1)
    first = reports.begin(PEER, 1)
    second = reports.begin(PEER, 2)
    await first.ended
    assert (first.is_given_up, second.is_given_up) == (True, False)
    reports.put(0, report(0, 1))
    restarted = reports.begin(RESTARTED, 3)
    reports.put(0, report(0, 3))
    assert (second.reports, restarted.reports) == ({}, {})
    reports.give_up(PEER)
    reports.give_up(PEER)
    reports.put(0, report(0, 2))
    assert (second.is_given_up, second.reports) == (True, {})
    reports.forget(second)
    reports.put(0, report(0, 3, RESTARTED))
    await restarted.ended
    reports.forget(restarted)
    reports.put(0, report(0, 3, RESTARTED))


async def test_forgetting_an_attempt_leaves_a_newer_one() -> None:
    """Whoever waited for the first one may come to it late."""
    reports = LinkReports(1)
    first, second = reports.begin(PEER, 1), reports.begin(PEER, 2)
    reports.forget(first)
    reports.put(0, report(0, 2))
    await second.ended
    assert not second.is_given_up


async def test_the_ranks_death_ends_every_wait() -> None:
    """Complete ones stay complete; a caller that was cancelled is no trouble."""
    reports = LinkReports(1)
    complete = reports.begin(PEER, 1)
    reports.put(0, report(0, 1))
    waiting, left = reports.begin(RESTARTED, 2), reports.begin(WorkerRef(worker_id="e", incarnation="k"), 3)
    left.ended.cancel()
    reports.die("rank 0 ended")
    await complete.ended
    with pytest.raises(EngineDeadError, match="rank 0 ended"):
        await waiting.ended
