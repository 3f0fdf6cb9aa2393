"""When failures that follow each other are reason to doubt a link."""

from __future__ import annotations

import pytest

from common.worker.core.doubts import MAX_FAILED_IN_A_ROW, Connection, Doubts
from contracts.requests import WorkerRef


def connection(**changes: int) -> Connection:
    """One of a link between workers of several ranks and replicas."""
    at = {"own_dp_rank": 0, "peer_dp_rank": 0, "own_rank": 0, "peer_rank": 0} | changes
    return Connection(peer=WorkerRef(worker_id="d0", incarnation="a"), **at)


ONE = connection()
OTHER_START = Connection(peer=WorkerRef(worker_id="d0", incarnation="b"), own_dp_rank=0, peer_dp_rank=0)
IN_A_ROW = [False] * (MAX_FAILED_IN_A_ROW - 1) + [True]


def test_so_many_failures_in_a_row_are_a_doubt_and_the_count_begins_anew() -> None:
    """Of one start of a peer: those of another do not count, nor those before something arrived."""
    doubts = Doubts()
    doubts.moved(ONE)
    for _ in range(2):
        assert [doubts.failed(ONE) for _ in range(MAX_FAILED_IN_A_ROW)] == IN_A_ROW
    assert not doubts.failed(ONE)
    doubts.moved(ONE)
    assert [doubts.failed(ONE) for _ in range(MAX_FAILED_IN_A_ROW)] == IN_A_ROW
    assert not doubts.failed(OTHER_START)


@pytest.mark.parametrize("other", [{"own_dp_rank": 1}, {"peer_dp_rank": 1}, {"own_rank": 1}, {"peer_rank": 1}])
def test_what_moves_over_other_connections_does_not_speak_for_one_that_is_dead(other: dict[str, int]) -> None:
    """Each pair of ranks has one of its own, in each pair of replicas; with the doubt all of them begin anew."""
    doubts, healthy = Doubts(), connection(**other)
    found = []
    assert not doubts.failed(healthy)
    for _ in range(MAX_FAILED_IN_A_ROW):
        found.append(doubts.failed(ONE))
        doubts.moved(healthy)
    assert found == IN_A_ROW
    for _ in range(MAX_FAILED_IN_A_ROW - 1):
        assert not doubts.failed(ONE)
        assert not doubts.failed(healthy)
    assert doubts.failed(healthy)
    assert not doubts.failed(ONE), "the link is made anew as a whole"


def test_what_nobody_can_tell_is_a_doubt_at_once() -> None:
    """The peer may still be reading what was sent."""
    doubts = Doubts()
    assert doubts.failed(ONE, is_unclear=True)
    assert not doubts.failed(ONE)


def test_a_link_that_is_gone_has_no_count() -> None:
    """The next one begins with none."""
    doubts = Doubts()
    for _ in range(3):
        assert not doubts.failed(ONE)
        for _ in range(MAX_FAILED_IN_A_ROW - 2):
            assert not doubts.failed(ONE)
        doubts.forget(ONE.peer)
    doubts.forget(ONE.peer)
