"""What pushes say of the links that they use: which failures count, against which connection, and how often."""

from __future__ import annotations

import pytest

from common.worker.core.doubts import MAX_FAILED_IN_A_ROW
from contracts.rank import PushOutcome
from contracts.requests import WorkerRef
from services.prefill.core import transfers as module
from services.prefill.core.transfers import Transfers
from tests.integration.part_pushes import part_pushed

PEER = WorkerRef(worker_id="d", incarnation="a")
FAILED, LOST, DONE = PushOutcome.FAILED_QUIESCED, PushOutcome.INDETERMINATE, PushOutcome.DONE


class World:
    """A peer that has been linked, and any number of handoffs to it."""

    def __init__(self) -> None:
        self.transfers = Transfers()
        self.transfers.linked(PEER, 100)
        self.number = 0

    def begin(self, bound_ns: int = 200, dp_rank: int = 0) -> str:
        """One more handoff."""
        self.number += 1
        handoff = f"h{self.number}"
        self.transfers.begins(handoff, PEER, dp_rank)
        self.transfers.bound(handoff, bound_ns)
        return handoff

    def note(self, handoff: str, outcome: PushOutcome, rank: int = 0) -> bool:
        """Whether that is reason to doubt the link."""
        found = self.transfers.doubted(0, part_pushed(handoff, outcome, rank=rank))
        assert found in {None, PEER}
        return found is not None


@pytest.fixture
def world() -> World:
    """No handoff yet."""
    return World()


def test_a_connection_that_fails_every_handoff_is_a_doubt_whatever_moves_over_others(world: World) -> None:
    """A handoff counts once for it, however many of its parts failed."""
    found = []
    for _ in range(MAX_FAILED_IN_A_ROW):
        handoff = world.begin()
        assert not world.note(handoff, DONE, rank=1)
        found.append(world.note(handoff, FAILED))
        assert not world.note(handoff, FAILED)
        assert not world.note(handoff, DONE, rank=1)
    assert found == [False] * (MAX_FAILED_IN_A_ROW - 1) + [True]


def test_a_replica_that_is_dead_is_not_spoken_for_by_another(world: World) -> None:
    """Each replica of the peer has connections of its own."""
    found = []
    for _ in range(MAX_FAILED_IN_A_ROW):
        found.append(world.note(world.begin(dp_rank=1), FAILED))
        assert not world.note(world.begin(dp_rank=0), DONE)
    assert found[-1]


def test_what_arrives_over_a_connection_speaks_for_it(world: World) -> None:
    """The failures before it do not count any more."""
    for _ in range(3):
        for _ in range(MAX_FAILED_IN_A_ROW - 1):
            assert not world.note(world.begin(), FAILED)
        assert not world.note(world.begin(), DONE)


@pytest.mark.parametrize("outcome", [PushOutcome.STALE, PushOutcome.NOT_TRIED])
def test_memory_that_was_taken_back_and_what_was_not_sent_say_nothing(world: World, outcome: PushOutcome) -> None:
    """However many there are."""
    assert not any(world.note(world.begin(), outcome) for _ in range(2 * MAX_FAILED_IN_A_ROW))


def test_an_unknown_end_counts_at_once_and_after_the_handoff_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write is given up later than its request; other failures of a handoff that is over do not count. Few are remembered."""
    monkeypatch.setattr(module, "MAX_ENDED", 2)
    assert world.note(world.begin(), LOST)
    first, second, third = (world.begin() for _ in range(3))
    for handoff in (first, second, third):
        assert world.transfers.ends(handoff) == PEER
    assert world.transfers.ends(third) is None
    assert not any(world.note(second, FAILED) for _ in range(2 * MAX_FAILED_IN_A_ROW))
    assert world.note(second, LOST)
    assert not world.note(first, LOST), "forgotten"
    assert not world.note("never begun", LOST)


def test_only_what_was_bound_to_a_link_speaks_against_it(world: World) -> None:
    """A handoff stays with the connections that it began with, which a new link closes; without a link nothing is doubted."""
    early = world.begin(bound_ns=99)
    assert not world.note(early, LOST)
    assert world.note(world.begin(bound_ns=100), LOST)
    late = world.begin()
    for _ in range(MAX_FAILED_IN_A_ROW - 1):
        assert not world.note(world.begin(), FAILED)
    world.transfers.unlinked(PEER)
    assert not world.note(late, LOST)
    world.transfers.linked(PEER, 300)
    assert not world.note(late, LOST)
    assert not world.note(world.begin(bound_ns=300), FAILED), "the count began anew"
    assert world.transfers.count(PEER) == world.number
