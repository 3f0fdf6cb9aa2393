"""What a lane makes of the tasks that are queued behind a write that failed."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from common.dataplane.failpoints import parse_failpoints
from common.dataplane.fake import FakeDataPlane
from common.dataplane.fake_network import FakeNetwork
from common.dataplane.port import Outcome, TransferResult
from common.engine.transfer import push_lane
from common.engine.transfer.link_shaper import LinkShaper
from common.engine.transfer.peers import Peer
from common.engine.transfer.push_faults import PushFaults
from common.engine.transfer.push_lane import PushTask
from common.engine.transfer.pusher import Pusher
from common.runtime.clock import SystemClock
from contracts.handoff import Grant
from contracts.manifest import Namespace, Role
from contracts.rank import PartPushed, PushOutcome

PATIENCE_S = 60.0
DONE = TransferResult(outcome=Outcome.DONE)
LOST = TransferResult(outcome=Outcome.INDETERMINATE, reason="it has been silent for 10 s")
FAILED = TransferResult(outcome=Outcome.FAILED_QUIESCED, reason="the deadline has passed")
STALE = TransferResult(outcome=Outcome.FAILED_QUIESCED, reason="the generation is another", is_stale=True)


def linked() -> Peer:
    """One link with the worker: a peer that is owed the states of one layer."""
    planned = SimpleNamespace(dst_rank=0, namespace=Namespace.TARGET, role=Role.SSM, layer=0)
    part: Any = SimpleNamespace(part=planned, state_bytes=8)
    return Peer(parts={(Namespace.TARGET, Role.SSM, 0): (part,)}, templates=(), regions={}, num_blocks=1, num_slots=1)


class World:
    """A pusher whose writes come to what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = SystemClock()
        plane = FakeDataPlane(FakeNetwork(), peer_id="p", incarnation="i", now=clock.monotonic)
        points = parse_failpoints("")
        self.reports: SimpleQueue[PartPushed] = SimpleQueue()
        self.results: list[TransferResult] = []
        self.pusher = Pusher(
            rank=0,
            region=plane.allocate(64, 1),
            clock=clock,
            emit=self.reports.put,
            faults=PushFaults(points, plane),
            shaper=LinkShaper(points),
        )
        monkeypatch.setattr(push_lane, "write_parts", lambda *_: self.results.pop(0))

    def push(self, seq: int, peer: Peer) -> tuple[PushOutcome, str]:
        """Push one part of a sequence, and wait for what is said of it."""
        task = PushTask(
            seq=seq,
            handoff_id=f"h{seq}",
            peer=peer,
            grant=Grant(worker_id="d", incarnation="j", generation=1, block_ids=(0,), slot=0),
            namespace=Namespace.TARGET,
            role=Role.SSM,
            layer=0,
            chunk=None,
            slot=0,
            queued_ns=0,
        )
        self.pusher.submit([task])
        report = self.reports.get(timeout=PATIENCE_S)
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
