"""What a lane makes of the tasks that are queued behind a write that failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.dataplane.port import Outcome, TransferResult
from common.engine.transfer import push_lane
from common.engine.transfer.peers import Peer
from contracts.rank import PushOutcome
from tests.unit.push_world import Reports, linked, make_pusher, task_of

PATIENCE_S = 60.0
DONE = TransferResult(outcome=Outcome.DONE)
LOST = TransferResult(outcome=Outcome.INDETERMINATE, reason="it has been silent for 10 s")
FAILED = TransferResult(outcome=Outcome.FAILED_QUIESCED, reason="the deadline has passed")
STALE = TransferResult(outcome=Outcome.FAILED_QUIESCED, reason="the generation is another", is_stale=True)


class World:
    """A pusher whose writes come to what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports = Reports(PATIENCE_S)
        self.results: list[TransferResult] = []
        self.pusher = make_pusher(self.reports.put)
        monkeypatch.setattr(push_lane, "write_parts", lambda *_: self.results.pop(0))

    def push(self, seq: int, peer: Peer) -> tuple[PushOutcome, str]:
        """Push one part of a sequence, and wait for what is said of it."""
        self.pusher.submit([task_of(seq, peer)])
        report = self.reports.next()
        assert (report.seq, report.num_bytes) == (seq, 8 if report.outcome is PushOutcome.DONE else 0)
        return report.outcome, report.reason


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Nothing has been pushed."""
    made = World(monkeypatch)
    yield made
    made.pusher.close()


def test_after_a_write_without_an_end_no_other_sequence_waits_for_the_same_link(world: World) -> None:
    """Each would wait as long for a peer that stands still. The link that is made in its place is tried again."""
    old, new = linked(), linked()
    world.results += [DONE, LOST]
    assert world.push(1, old) == (PushOutcome.DONE, "")
    assert world.push(2, old) == (PushOutcome.INDETERMINATE, LOST.reason)
    for seq in (3, 1):
        outcome, reason = world.push(seq, old)
        assert outcome is PushOutcome.FAILED_QUIESCED, "it counts against the link, until that is made anew"
        assert reason == "an earlier write to the same peer has no end: it has been silent for 10 s"
    outcome, reason = world.push(3, old)
    assert outcome is PushOutcome.NOT_TRIED
    world.results += [DONE]
    assert world.push(4, new) == (PushOutcome.DONE, "")
    assert world.results == []


@pytest.mark.parametrize(
    ("result", "outcome"), [(FAILED, PushOutcome.FAILED_QUIESCED), (STALE, PushOutcome.STALE)], ids=["failed", "stale"]
)
def test_after_a_write_that_failed_only_its_own_sequence_is_given_up(
    world: World, result: TransferResult, outcome: PushOutcome
) -> None:
    """What comes of others is seen when they are tried; memory that was taken back is told from what failed."""
    peer = linked()
    world.results += [result, DONE]
    assert world.push(1, peer) == (outcome, result.reason)
    assert world.push(1, peer) == (PushOutcome.NOT_TRIED, f"an earlier part failed: {result.reason}")
    assert world.push(2, peer) == (PushOutcome.DONE, "")
