"""A pusher's queue that is full: whose push fails then, and that the computation neither waits nor hears of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from common.dataplane.port import Outcome, TransferResult
from common.engine.transfer import push_lane
from contracts.rank import PartPushed, PushOutcome
from tests.unit.push_world import CLOCK, NUM_LAYERS, Reports, linked, make_pusher, task_of

PATIENCE_S = 60.0
MAX_QUEUED = 4
FULL = f"the queue to its worker is full: {MAX_QUEUED} pushes wait"


class World:
    """A pusher with short queues; what goes to worker "d" is held until the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports = Reports(PATIENCE_S)
        self.pusher = make_pusher(self.reports.put)
        self.peer = linked()
        self.gate = threading.Event()
        self.entered = threading.Event()

        def write(*_: object) -> TransferResult:
            if threading.current_thread().name == "pusher-0-d":
                self.entered.set()
                assert self.gate.wait(PATIENCE_S)
            return TransferResult(outcome=Outcome.DONE)

        monkeypatch.setattr(push_lane, "write_parts", write)
        monkeypatch.setattr(push_lane, "MAX_QUEUED", MAX_QUEUED)

    def submit(self, seq: int, *layers: int) -> None:
        """Queue what some layers of a sequence have ready."""
        self.pusher.submit([task_of(seq, self.peer, layer=layer) for layer in layers])

    def stand_still(self) -> None:
        """Let a write of sequence 1 begin, and not end."""
        self.submit(1, 0)
        assert self.entered.wait(PATIENCE_S)

    def release(self, seq: int) -> None:
        """As a rank releases a sequence."""
        self.pusher.drop([seq])
        assert self.pusher.wait_idle(seq, CLOCK.monotonic() + PATIENCE_S)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Nothing has been pushed."""
    made = World(monkeypatch)
    yield made
    made.gate.set()
    made.pusher.close()


def shown(reports: list[PartPushed]) -> list[tuple[int, int, PushOutcome]]:
    """Sequence, layer and outcome."""
    return [(report.seq, report.layer, report.outcome) for report in reports]


def test_what_finds_no_room_fails_alone_and_at_once(world: World) -> None:
    """One report says so while the peer stands still; all that was queued of the sequence is forgotten, and makes room for others."""
    world.stand_still()
    world.submit(2, 0, 1, 2)
    world.submit(3, 0)
    world.submit(2, 3)
    (report,) = world.reports.all()
    assert (report.seq, report.layer, report.outcome, report.reason) == (2, 3, PushOutcome.FAILED_QUIESCED, FULL)
    assert (report.rank, report.handoff_id, report.num_bytes, report.start, report.end) == (0, "h2", 0, 0, 1)
    world.submit(2, 4)
    world.submit(4, 0, 1, 2)
    assert world.reports.all() == [], "it is known of the second, and the fourth has room"
    assert world.pusher.num_queued == 5
    world.gate.set()
    done = [world.reports.next() for _ in range(5)]
    assert sorted(shown(done)) == [
        (seq, layer, PushOutcome.DONE) for seq, layer in [(1, 0), (3, 0), (4, 0), (4, 1), (4, 2)]
    ]


def test_a_sequence_number_that_is_used_again_starts_anew(world: World) -> None:
    """Released, the sequence that found no room is forgotten."""
    world.stand_still()
    world.submit(2, *range(MAX_QUEUED + 1))
    assert shown(world.reports.all()) == [(2, 0, PushOutcome.FAILED_QUIESCED)]
    world.gate.set()
    assert shown([world.reports.next()]) == [(1, 0, PushOutcome.DONE)]
    world.release(2)
    world.submit(2, 0)
    assert shown([world.reports.next()]) == [(2, 0, PushOutcome.DONE)]


def test_no_other_worker_is_concerned(world: World) -> None:
    """What one step has ready for a full queue and for another one parts ways: the other worker gets its share."""
    world.stand_still()
    world.submit(2, *range(MAX_QUEUED))
    other = linked()
    world.pusher.submit(
        [task_of(3, world.peer, layer=0), *(task_of(4, other, layer=layer, worker_id="e") for layer in range(2))]
    )
    found = [world.reports.next() for _ in range(3)]
    assert sorted(shown(found)) == [
        (3, 0, PushOutcome.FAILED_QUIESCED),
        (4, 0, PushOutcome.DONE),
        (4, 1, PushOutcome.DONE),
    ]


def test_memory_is_bounded_however_many_come(world: World) -> None:
    """A peer that stands still has a full queue behind it and no more, and each sequence that is too many is told of once."""
    world.stand_still()
    for layer in range(NUM_LAYERS):
        for seq in range(2, 40):
            world.submit(seq, layer)
            assert world.pusher.num_queued <= 1 + MAX_QUEUED
    refused = shown(world.reports.all())
    assert len(refused) == len({seq for seq, _, _ in refused}) == 38, "none of them has room for all of its layers"
    assert {outcome for _, _, outcome in refused} == {PushOutcome.FAILED_QUIESCED}


def test_what_a_failpoint_holds_back_takes_room_and_is_forgotten_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that leaves much later counts, and does not leave any more once its sequence has failed."""
    monkeypatch.setattr(push_lane, "MAX_QUEUED", 1)
    reports = Reports(PATIENCE_S)
    pusher = make_pusher(reports.put, "delay:role=ssm,ms=600000")
    try:
        pusher.submit([task_of(1, linked(), layer=0)])
        pusher.submit([task_of(1, linked(), layer=1)])
        assert shown([reports.next()]) == [(1, 1, PushOutcome.FAILED_QUIESCED)]
        assert pusher.wait_idle(1, CLOCK.monotonic() + PATIENCE_S)
        assert pusher.num_queued == 0
    finally:
        pusher.close()
