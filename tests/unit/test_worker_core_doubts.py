"""When failures that follow each other are reason to doubt a link."""

from __future__ import annotations

from common.worker.core.doubts import MAX_FAILED_IN_A_ROW, Doubts
from contracts.requests import WorkerRef

PEER, OTHER = (WorkerRef(worker_id=name, incarnation="i") for name in ("d0", "d1"))


def test_so_many_failures_in_a_row_are_a_doubt_and_the_count_begins_anew() -> None:
    """Of one peer: those of another one do not count, nor those before something arrived."""
    doubts = Doubts()
    doubts.moved(PEER)
    for _ in range(2):
        found = [doubts.failed(PEER, is_unclear=False) for _ in range(MAX_FAILED_IN_A_ROW)]
        assert found == [False] * (MAX_FAILED_IN_A_ROW - 1) + [True]
    assert not doubts.failed(PEER, is_unclear=False)
    doubts.moved(PEER)
    found = [doubts.failed(PEER, is_unclear=False) for _ in range(MAX_FAILED_IN_A_ROW)]
    assert found == [False] * (MAX_FAILED_IN_A_ROW - 1) + [True]
    assert not doubts.failed(OTHER, is_unclear=False)


def test_what_nobody_can_tell_is_a_doubt_at_once() -> None:
    """The peer may still be reading what was sent."""
    assert Doubts().failed(PEER, is_unclear=True)
