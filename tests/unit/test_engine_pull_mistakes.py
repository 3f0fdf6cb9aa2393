"""What goes wrong in the threads of a puller: the pull has failed, that is told, and the next one is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from common.dataplane.fake_network import Fault, FaultKind
from common.engine.transfer import pull_read, puller
from common.engine.transfer.link_shaper import LinkShaper
from common.engine.transfer.merge import copy_within
from common.engine.transfer.pull_read import pulled_parts
from common.engine.transfer.push_faults import PushFaults
from common.layout.joining import pattern_of
from contracts.pull import ShardState
from contracts.rank_pull import PullReport, RoleMerged, ShardPulled
from tests.unit.pulling_rank import CLOCK, PATIENCE_S, World, error_of, states_of


@pytest.fixture
def world() -> Iterator[World]:
    """Nothing has been pulled, and no thread is left in the end."""
    made = World()
    yield made
    made.puller.close()
    for thread in reading():
        thread.join(PATIENCE_S)
    assert not reading()


def reading() -> list[threading.Thread]:
    """The threads of pullers."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("puller-")]


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, in which the first call is a mistake in the program."""
    planted: SimpleQueue[Exception] = SimpleQueue()
    planted.put(RuntimeError("planted"))

    def failing(*arguments: Any, **named: Any) -> Any:
        try:
            mistake = planted.get_nowait()
        except Empty:
            return function(*arguments, **named)
        raise mistake

    return failing


def before_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is looked up how late a shard is."""
    monkeypatch.setattr(PushFaults, "delay_s", once(PushFaults.delay_s))


def in_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is read."""
    monkeypatch.setattr(pull_read, "pattern_of", once(pattern_of))


def behind_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it has been read."""
    monkeypatch.setattr(LinkShaper, "over_at", once(LinkShaper.over_at))


def in_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is to be said what has been read."""
    monkeypatch.setattr(puller, "pulled_parts", once(pulled_parts))


@pytest.mark.parametrize("parallel", [True, False], ids=["side-by-side", "in-turn"])
@pytest.mark.parametrize("plant", [before_a_read, in_a_read, behind_a_read, in_a_report])
def test_a_mistake_fails_its_pull_and_no_other(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    plant: Callable[[pytest.MonkeyPatch], None],
    parallel: bool,
) -> None:
    """Its end is told, and why; nothing is merged, though all bytes may be there. The traceback is in the log; the next pull is good."""
    plant(monkeypatch)
    world.begin(parallel=parallel)
    reports = world.told()
    assert "RuntimeError: planted" in error_of(reports)
    num_failed = [state for _, state in states_of(reports)].count(ShardState.FAILED)
    assert num_failed == 2 or (num_failed == 1 and parallel), "the other shard may have begun already"
    assert not any(isinstance(report, RoleMerged) for report in reports)
    assert world.slot() == {0}
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["planted"]
    world.begin(lock=2, parallel=parallel)
    assert (error_of(world.told()), world.slot()) == ("", {1, 2})


def test_a_mistake_in_the_merge_is_the_end_of_the_pull(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits for it hears of it, and the memory can be given back."""
    monkeypatch.setattr(puller, "copy_within", once(copy_within))
    world.begin()
    assert error_of(world.told()) == "transfer_failed: merge: RuntimeError: planted"
    assert world.puller.wait_idle(1, CLOCK.monotonic() + PATIENCE_S)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["planted"]


@pytest.mark.parametrize("what", ["shard", "merge"])
def test_a_report_that_is_lost_fails_the_pull(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """A parent that stood still does not know what has arrived: it must not take the end for a good one."""
    take = world.reports.put

    def lossy(report: PullReport) -> None:
        done = isinstance(report, ShardPulled) and report.shard.state is ShardState.DONE
        if (done if what == "shard" else isinstance(report, RoleMerged)) and not lost:
            lost.append(report)
            raise BlockingIOError("the parent does not read")
        take(report)

    lost: list[PullReport] = []
    monkeypatch.setattr(world.puller, "_emit", lossy)
    world.begin()
    assert error_of(world.told()) == ("transfer_failed: a report was lost: BlockingIOError: the parent does not read")
    world.begin(lock=2)
    assert error_of(world.told()) == ""
    assert not caplog.records, "no mistake in the program"


def test_a_mistake_does_not_hide_that_a_read_may_go_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory into which somebody may still write is not given back, whatever went wrong behind the read."""
    world.network.plant(Fault(kind=FaultKind.INDETERMINATE))
    monkeypatch.setattr(LinkShaper, "over_at", once(LinkShaper.over_at))
    world.begin(parallel=False)
    assert "planted" in error_of(world.told())
    world.puller.drop([1])
    assert not world.puller.wait_idle(1, CLOCK.monotonic() + PATIENCE_S)


def test_a_pull_for_which_there_is_no_thread_has_not_begun(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, nothing of it is read later, and the same number may be tried again."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", once(threading.Thread.start))
        with pytest.raises(RuntimeError, match="planted"):
            world.begin()
    assert world.puller.num_pulls == 0
    while not world.reports.empty():
        assert states_of([world.reports.get()])[0][1] is ShardState.WAITING
    world.begin()
    assert (error_of(world.told()), world.slot()) == ("", {1, 2})


def test_fewer_threads_than_shards_read_them_in_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is enough, where a second cannot be started."""
    start = threading.Thread.start
    num_started = iter(range(100))

    def only_first(thread: threading.Thread) -> None:
        if next(num_started):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", only_first)
        world.begin()
    assert (error_of(world.told()), world.slot()) == ("", {1, 2})
