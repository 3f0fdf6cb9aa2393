"""What goes wrong in a pusher's own thread: the sequence has failed, that is told, and the thread serves the next one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from common.dataplane.port import Outcome, TransferResult
from common.engine.transfer import push_lane, push_write
from common.engine.transfer.link_shaper import LinkShaper
from common.engine.transfer.peers import Peer
from common.engine.transfer.push_lane import PushLane
from common.engine.transfer.push_write import PushPart
from contracts.manifest import Namespace, Role
from contracts.rank import PartPushed, PushOutcome
from tests.unit.push_world import CLOCK, Reports, linked, make_pusher, task_of

PATIENCE_S = 60.0
DONE = TransferResult(outcome=Outcome.DONE)
LOST = TransferResult(outcome=Outcome.INDETERMINATE, reason="it has been silent for 10 s")
FIRST = (Namespace.TARGET, Role.SSM, 0)


class World:
    """A pusher whose writes are done, unless a mistake is planted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports = Reports(PATIENCE_S)
        self.unheard: list[Exception] = []
        self.pusher = make_pusher(self.emit)
        self.peer = linked()
        monkeypatch.setattr(push_lane, "write_parts", lambda *_: DONE)

    def emit(self, report: PartPushed) -> None:
        """Take a report, unless it is to be lost."""
        if self.unheard:
            raise self.unheard.pop(0)
        self.reports.put(report)

    def push(self, seq: int, *, layer: int = 1, peer: Peer | None = None) -> PartPushed:
        """Push a part of a sequence, and wait for what is said of it."""
        self.pusher.submit([task_of(seq, peer or self.peer, layer=layer)])
        report = self.reports.next()
        assert report.seq == seq
        return report


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Nothing has been pushed."""
    made = World(monkeypatch)
    yield made
    made.pusher.close()


def fail(*_: object, **__: object) -> Any:
    """A mistake in the program."""
    raise RuntimeError("planted")


class Unfindable(dict[Any, Any]):
    """Parts that cannot be looked up for layer 0."""

    def get(self, key: Any, default: Any = None) -> Any:
        """Look up."""
        return fail() if key == FIRST else super().get(key, default)


class Unmeasurable:
    """A part without a size."""

    part = SimpleNamespace(dst_rank=0, src_rank=0, namespace=Namespace.TARGET, role=Role.SSM, layer=0)

    @property
    def state_bytes(self) -> int:
        """Nobody knows."""
        return int(fail())


def in_lookup(world: World, _: pytest.MonkeyPatch) -> None:
    """When its parts are looked up."""
    parts = Unfindable(world.peer.parts)
    world.peer = Peer(parts=parts, templates=(), regions={}, num_blocks=1, num_slots=1)


def in_write(_: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is written, outside of what is caught there."""
    monkeypatch.setattr(
        push_lane, "write_parts", lambda _peer, _rank, _grant, parts, *_: fail() if is_first(parts) else DONE
    )


def in_link(_: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it has been written."""
    over_at, num_calls = LinkShaper.over_at, iter(range(9))
    monkeypatch.setattr(LinkShaper, "over_at", lambda *arguments: over_at(*arguments) if next(num_calls) else fail())


def in_report(world: World, _: pytest.MonkeyPatch) -> None:
    """When it is reported."""
    world.peer.parts[FIRST] = (Unmeasurable(),)  # type: ignore[assignment]  # what a lane takes for the copies of a part


def is_first(parts: Any) -> bool:
    """Whether the part of layer 0 is among them."""
    return any(part.copies.part.layer == 0 for part in parts)


@pytest.mark.parametrize("plant", [in_lookup, in_write, in_link, in_report])
def test_a_mistake_fails_its_sequence_and_no_other(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    plant: Callable[[World, pytest.MonkeyPatch], None],
) -> None:
    """It is told, with its reason, and its traceback is in the log; the rest of the sequence is not tried, the next one is pushed."""
    plant(world, monkeypatch)
    report = world.push(1, layer=0)
    assert (report.layer, report.outcome, report.num_bytes) == (0, PushOutcome.FAILED_QUIESCED, 0)
    assert report.reason == "RuntimeError: planted"
    assert world.push(1).outcome is PushOutcome.NOT_TRIED
    assert world.push(2).outcome is PushOutcome.DONE
    world.pusher.drop([1])
    assert world.pusher.wait_idle(1, CLOCK.monotonic() + PATIENCE_S)
    assert world.push(1).outcome is PushOutcome.DONE
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "planted"


def test_a_mistake_does_not_hide_that_bytes_may_be_moving(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a write without a known end, which goes wrong here as well, nobody may take the peer for quiet."""
    monkeypatch.setattr(push_lane, "write_parts", lambda *_: LOST)
    monkeypatch.setattr(LinkShaper, "over_at", fail)
    assert world.push(1).outcome is PushOutcome.INDETERMINATE
    assert world.push(2).reason == f"an earlier write to the same peer has no end: {LOST.reason}"


def test_where_nobody_knows_whose_mistake_it_is_all_that_wait_have_failed(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread ends, which is told of every sequence that waits for it; what comes next has a new one."""
    with monkeypatch.context() as patch:
        patch.setattr(PushLane, "_take_tasks", fail)
        world.pusher.submit([task_of(seq, world.peer, layer=layer) for seq in (1, 2) for layer in (0, 1)])
        found = [world.reports.next(), world.reports.next()]
    assert sorted((report.seq, report.outcome) for report in found) == [
        (1, PushOutcome.FAILED_QUIESCED),
        (2, PushOutcome.FAILED_QUIESCED),
    ]
    assert {report.reason for report in found} == {"RuntimeError: planted"}
    assert world.push(3).outcome is PushOutcome.DONE
    assert len(caplog.records) == 1


def test_what_comes_when_the_thread_has_just_ended_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is queued that nobody would ever take."""
    world = World(monkeypatch)
    world.push(1)
    with monkeypatch.context() as patch:
        patch.setattr(PushLane, "is_closed", False)
        world.pusher.end()
        report = world.push(2)
    assert report.outcome is PushOutcome.FAILED_QUIESCED
    assert report.reason == "the thread that writes to its worker has ended"
    assert world.pusher.num_queued == 0
    world.pusher.close()


def test_a_report_that_is_lost_fails_its_sequence(world: World) -> None:
    """A parent that stood still has not heard of one part: the next report of the sequence says so, and others go on."""
    world.unheard.append(BlockingIOError("the parent does not read"))
    world.pusher.submit([task_of(1, world.peer)])
    assert world.push(2).outcome is PushOutcome.DONE
    report = world.push(1, layer=2)
    assert report.outcome is PushOutcome.NOT_TRIED
    assert "a report was lost: BlockingIOError: the parent does not read" in report.reason


def test_a_thread_that_cannot_be_started_fails_the_push_and_not_the_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever computes hears nothing of it; when there is room for threads again, pushing works."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        report = world.push(1)
    assert (report.outcome, report.reason) == (PushOutcome.FAILED_QUIESCED, "RuntimeError: planted")
    assert world.push(2).outcome is PushOutcome.DONE


def test_a_mistake_in_a_write_is_logged_and_what_peers_do_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are failures of the write. Only one of them has to be mended here."""
    monkeypatch.setattr(push_lane, "write_parts", push_write.write_parts)
    for seq, error in enumerate((ConnectionResetError("gone"), KeyError("planted")), 1):
        monkeypatch.setattr(PushPart, "place", raising(error))
        report = world.push(seq)
        assert report.outcome is PushOutcome.FAILED_QUIESCED
        assert report.reason.startswith(type(error).__name__)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


def raising(error: Exception) -> Callable[..., Any]:
    """A function that fails so."""

    def failing(*_: object) -> Any:
        raise error

    return failing
