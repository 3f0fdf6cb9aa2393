"""The threads that pull, over the fake data plane: who waits for whom, what is merged, and how a pull ends early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import pytest

from common.dataplane.failpoints import parse_failpoints
from common.dataplane.fake import FakeDataPlane, FakeRemoteRegion
from common.dataplane.fake_network import FakeRegion, Fault, FaultKind
from common.dataplane.port import TransferResult, WriteGrant
from common.engine.transfer.link_shaper import LinkShaper
from common.engine.transfer.peers import PeerDraft
from common.engine.transfer.puller import MAX_THREADS, Puller
from common.engine.transfer.push_faults import PushFaults
from common.engine.transfer.sources import connect_sources
from common.layout.region import lay_out
from contracts.errors import ErrorCode, InvalidValueError
from contracts.handoff import Grant
from contracts.manifest import Coordinates, Role
from contracts.pull import ShardState
from contracts.rank import AddPeerRank, PeerSide
from contracts.rank_pull import PullReport, PullStopped, RoleMerged, ShardPulled
from contracts.requests import WorkerRef
from tests.unit.pulling_rank import (
    CLOCK,
    GENERATION,
    NUM_BLOCKS,
    NUM_SLOTS,
    PATIENCE_S,
    SHAPE,
    STATES,
    World,
    error_of,
    states_of,
)


class Leisurely(threading.Condition):
    """Whoever made it goes on only `after` something, when it has let go of the lock for the first time."""

    def __init__(self, after: Callable[[], object]) -> None:
        super().__init__()
        self._after = after
        self._owner = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go, and wait."""
        super().__exit__(kind, error, trace)
        if threading.get_ident() == self._owner:
            self._owner = 0
            self._after()


@pytest.fixture
def world() -> Iterator[World]:
    """A world without threads in the end."""
    made = World()
    yield made
    made.puller.close()
    left = [thread for thread in threading.enumerate() if thread.name.startswith("puller-")]
    for thread in left:  # one that found nothing left to do is on its way out
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in left)


def test_a_pull_that_is_over_before_its_beginning_returns_ends_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the last shard concludes, however late the rank's thread looks again: one merge of each role, one end."""
    found: list[PullReport] = []
    with monkeypatch.context() as patch:
        patch.setattr(world.puller, "_changed", Leisurely(lambda: found.extend(world.told())))
        world.begin()
    while not world.reports.empty():
        found.append(world.reports.get())
    assert sum(isinstance(report, PullStopped) for report in found) == 1
    assert sorted(report.role for report in found if isinstance(report, RoleMerged)) == [Role.CONV, Role.SSM]


def test_shards_are_read_side_by_side(world: World) -> None:
    """Both reads have begun before either copies; only when both are there the states are merged, by role."""
    first, second = world.hold()
    world.begin()
    assert first.entered.wait(PATIENCE_S)
    assert second.entered.wait(PATIENCE_S)
    assert world.slot() == {0}
    first.gate.set()
    world.until((None, ShardState.DONE))
    assert world.slot() == {0}, "the other shard is still on its way"
    second.gate.set()
    rest = world.told()
    assert [type(report) for report in rest] == [ShardPulled, RoleMerged, RoleMerged, PullStopped]
    assert (error_of(rest), world.slot()) == ("", {1, 2})
    assert world.slot(2) == {0}


def test_or_one_after_the_other(world: World) -> None:
    """The second read begins when the first is over, in the same thread; until then it is said to wait."""
    first, second = world.hold()
    world.begin(parallel=False)
    assert first.entered.wait(PATIENCE_S)
    reports = world.until((0, ShardState.PULLING))
    assert states_of(reports) == [(0, ShardState.WAITING), (1, ShardState.WAITING), (0, ShardState.PULLING)]
    first.gate.set()
    assert second.entered.wait(PATIENCE_S)
    second.gate.set()
    assert states_of(world.told()) == [
        (0, ShardState.DONE),
        (1, ShardState.PULLING),
        (1, ShardState.DONE),
    ]
    assert world.slot() == {1, 2}


def test_a_pull_goes_on_beside_one_that_stands_still(world: World) -> None:
    """Two sequences: the second is merged while the first one's shards are held."""
    faults = world.hold()
    world.begin(1)
    for fault in faults:
        assert fault.entered.wait(PATIENCE_S)
    world.until((0, ShardState.PULLING), (1, ShardState.PULLING))
    world.begin(2)
    assert {report.seq for report in world.told()} == {2}
    assert (world.slot(1), world.slot(2)) == ({0}, {1, 2})
    for fault in faults:
        fault.gate.set()
    world.told()
    assert world.slot(1) == {1, 2}


def test_a_shard_that_fails_fails_the_pull_once_all_are_over(world: World) -> None:
    """The other shard is read to its end; nothing is merged, and the first error is the pull's."""
    slow = Fault(kind=FaultKind.HOLD)
    world.network.plant(slow, Fault(kind=FaultKind.FAIL_AFTER))
    world.begin()
    world.until((None, ShardState.FAILED))
    assert world.puller.num_pulls == 1
    assert not world.puller.wait_idle(1, CLOCK.monotonic())
    slow.gate.set()
    rest = world.told()
    assert [state for _, state in states_of(rest)] == [ShardState.DONE]
    assert "planted: after the copy" in error_of(rest)
    assert world.slot() == {0}
    assert world.puller.num_pulls == 0


def test_one_after_the_other_nothing_more_begins_after_a_failure(world: World) -> None:
    """The second shard fails without having been tried, and says why."""
    world.network.plant(Fault(kind=FaultKind.FAIL_BEFORE))
    world.begin(parallel=False)
    reports = world.told()
    told = [(source, state) for source, state in states_of(reports) if state is not ShardState.WAITING]
    assert told == [(0, ShardState.PULLING), (0, ShardState.FAILED), (1, ShardState.FAILED)]
    last = reports[-2]
    assert isinstance(last, ShardPulled)
    assert last.shard.reason.startswith("not begun: shard of source rank 0")
    assert not world.network.faults
    world.begin(lock=2, parallel=False)
    assert error_of(world.told()) == ""
    assert world.slot() == {1, 2}


def test_a_release_drops_what_has_not_begun_and_waits_for_the_rest(world: World) -> None:
    """Within its time; then nothing is merged, and the row is free."""
    (held, unused) = world.hold()
    world.begin(parallel=False)
    assert held.entered.wait(PATIENCE_S)
    world.puller.drop([1, 99])
    assert not world.puller.wait_idle(1, CLOCK.monotonic())
    held.gate.set()
    assert world.puller.wait_idle(1, CLOCK.monotonic() + PATIENCE_S)
    reports = world.told()
    assert (1, ShardState.FAILED) in states_of(reports)
    assert error_of(reports) == f"{ErrorCode.CANCELLED}: sequence 1 was released"
    assert (world.slot(), unused.entered.is_set(), world.puller.num_pulls) == ({0}, False, 0)
    assert world.puller.wait_idle(1, CLOCK.monotonic())


def test_a_delayed_shard_does_not_hold_up_a_release() -> None:
    """What a failpoint delays for minutes ends with its sequence."""
    world = World("delay:source=1,ms=600000")
    world.begin()
    world.until((0, ShardState.DONE), (1, ShardState.PULLING))
    world.puller.drop([1])
    assert world.puller.wait_idle(1, CLOCK.monotonic() + PATIENCE_S)
    assert world.slot() == {0}
    world.puller.close()


def test_a_read_of_which_nobody_can_tell_keeps_the_memory(world: World) -> None:
    """As long as its source lives: its bytes may still come. Whoever asks again later hears that it is gone."""
    world.network.plant(Fault(kind=FaultKind.INDETERMINATE))
    world.begin(parallel=False)
    assert "does not say" in error_of(world.told())
    world.puller.drop([1])
    assert not world.puller.wait_idle(1, CLOCK.monotonic())
    world.network.settle()
    assert not world.puller.wait_idle(1, CLOCK.monotonic())
    world.there[0].close()
    assert world.puller.wait_idle(1, CLOCK.monotonic())


def test_lock_numbers_rise(world: World) -> None:
    """A number again, a lower one, and a higher one while the last is under way are refused; afterwards a higher one is not."""
    faults = world.hold()
    world.begin(lock=3)
    for lock, text in ((3, "above 3"), (2, "above 3"), (4, "one pull at a time")):
        with pytest.raises(InvalidValueError, match=text):
            world.begin(lock=lock)
    for fault in faults:
        fault.gate.set()
    assert error_of(world.told()) == ""
    with pytest.raises(InvalidValueError, match="above 3"):
        world.begin(lock=3)
    world.begin(lock=4)
    assert error_of(world.told()) == ""


def test_the_next_pull_may_begin_as_soon_as_the_end_of_the_last_is_told(world: World) -> None:
    """Whoever hears of the end is not refused because the thread that told it is not done yet."""
    told: list[str] = []

    def begin_again(report: PullReport) -> None:
        if isinstance(report, PullStopped) and report.lock == 1:
            world.begin(lock=2)
            told.append("begun")
        world.reports.put(report)

    world.puller = Puller(
        rank=0,
        clock=CLOCK,
        emit=begin_again,
        faults=PushFaults(
            parse_failpoints(""),
            FakeDataPlane(world.network, peer_id="x", incarnation="x", now=CLOCK.monotonic),
        ),
        shaper=LinkShaper(parse_failpoints("")),
    )
    world.begin(lock=1)
    ends = [error_of(world.told()), error_of(world.told())]
    assert (ends, told) == (["", ""], ["begun"])


def test_threads_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards beyond the bound wait for a thread, and are read in their turn; dropping them needs none."""
    gate, entered = threading.Event(), threading.Semaphore(0)
    read = FakeRemoteRegion.read

    def held(*arguments: Any) -> TransferResult:
        entered.release()
        assert gate.wait(PATIENCE_S)
        return read(*arguments)

    monkeypatch.setattr(FakeRemoteRegion, "read", held)
    count = MAX_THREADS // 2 + 2
    for seq in range(1, count):
        world.begin(seq)
    world.begin(count, parallel=False)
    for _ in range(MAX_THREADS):
        assert entered.acquire(timeout=PATIENCE_S)
    assert not entered.acquire(blocking=False)
    world.puller.drop([count])
    assert world.puller.wait_idle(count, CLOCK.monotonic()), "it had not begun"
    gate.set()
    stops: list[PullStopped] = []
    while len(stops) < count:
        report = world.reports.get(timeout=PATIENCE_S)
        if isinstance(report, PullStopped):
            stops.append(report)
    assert {stop.seq for stop in stops if stop.error is None} == set(range(1, count))
    assert all(world.slot(seq) == {1, 2} for seq in range(1, count))


def test_every_cell_that_is_read_needs_the_grant(world: World) -> None:
    """A block whose owner has changed fails KEY and VALUE, and not a pull that reads other blocks alone."""
    world.there[1].set_generations([1], GENERATION + 1)
    world.begin(roles=tuple(Role), num_cached_tokens=2)
    assert "generation" in error_of(world.told())
    world.begin(lock=2)
    assert error_of(world.told()) == ""
    world.there[0].set_generations([NUM_BLOCKS + 2], GENERATION + 1)
    world.begin(lock=3)
    assert "source rank 0: the grant's generation" in error_of(world.told())


def test_an_unchecked_generation_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: a source that takes every grant for current lets old bytes count."""
    monkeypatch.setattr(FakeRegion, "holds", lambda _self, _grant: True)
    world.there[0].set_generations([NUM_BLOCKS + 2], GENERATION + 1)
    world.begin()
    assert error_of(world.told()) == ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slot": NUM_SLOTS}, "src_slot"),
        ({"block_ids": (3, NUM_BLOCKS)}, "src_block_ids"),
        ({"block_ids": (3,)}, "at least 2"),
        ({"secret": "00" * 16}, "generation"),
    ],
)
def test_a_grant_that_names_what_does_not_exist_fails_with_a_reason(
    world: World, changes: dict[str, Any], text: str
) -> None:
    """Nothing is read, and the pull ends."""
    values: dict[str, Any] = {"generation": GENERATION, "block_ids": (3, 1), "slot": 2} | changes
    world.begin(roles=tuple(Role), source=Grant(worker_id="p", incarnation="i", **values))
    assert text in error_of(world.told())
    assert world.slot() == {0}


def test_failpoints_of_a_pull() -> None:
    """A dropped part is neither read nor reported, a zeroed one arrives as zeros, a failing one fails its shard."""
    world = World("drop:role=conv,layer=0,source=1")
    world.begin()
    reports = world.told()
    merged = {
        (part.role, part.layer, part.source_rank) for r in reports if isinstance(r, RoleMerged) for part in r.parts
    }
    assert len(merged) == 7
    assert (Role.CONV, 0, 1) not in merged
    assert world.slot() == {0, 1, 2}
    world.puller.close()
    world = World("zero:source=0")
    world.own.data[:] = b"\xff" * len(world.own.data)
    world.begin(roles=tuple(Role))
    assert error_of(world.told()) == ""
    assert world.slot() == {0, 2}
    world.puller.close()
    world = World("fail:source=1,role=ssm")
    world.begin()
    assert "source rank 1: planted" in error_of(world.told())
    world.puller.close()


def test_a_slow_link_takes_its_time() -> None:
    """At least its latency; and a link that is too slow for the deadline makes the pull fail at it."""
    world = World("link:source=0,ms=20")
    world.begin()
    reports = world.told()
    (slow,) = [
        report.shard
        for report in reports
        if isinstance(report, ShardPulled) and (report.shard.source_rank, report.shard.state) == (0, ShardState.DONE)
    ]
    assert slow.duration_ms >= 20
    world.puller.close()
    world = World("link:source=0,ms=600000")
    world.begin(timeout_ms=50)
    assert "source rank 0: the deadline has passed" in error_of(world.told())
    assert world.slot() == {0}
    world.puller.close()


def test_a_pull_of_nothing_ends_at_once(world: World) -> None:
    """No role, or tokens that are all there: no shard, no error."""
    world.begin(roles=())
    assert [type(report) for report in world.told()] == [PullStopped]
    world.begin(lock=2, roles=(Role.KEY, Role.VALUE), num_cached_tokens=3)
    assert [type(report) for report in world.told()] == [PullStopped]


def test_a_rank_whose_parent_is_gone_ends_its_threads_quietly(world: World) -> None:
    """There is nobody to report to any more; the error is not raised into the thread, and nothing stays open."""

    def gone(_: PullReport) -> None:
        raise BrokenPipeError

    world.puller = Puller(
        rank=0,
        clock=CLOCK,
        emit=gone,
        faults=PushFaults(
            parse_failpoints(""), FakeDataPlane(world.network, peer_id="x", incarnation="x", now=CLOCK.monotonic)
        ),
        shaper=LinkShaper(parse_failpoints("")),
    )
    world.begin()
    world.puller.close()
    assert world.slot() == {0}


def test_a_link_without_a_region_is_refused_and_leaves_nothing_open() -> None:
    """A source whose second rank cannot be reached is not linked: the first one's region is closed again."""
    world = World()
    draft = PeerDraft()
    worker = WorkerRef(worker_id="p", incarnation="i")
    own = world.map.manifest(worker_id="d", incarnation="j", model="m")
    draft.add(AddPeerRank(peer=worker, side=PeerSide.DESTINATION, manifest=own))
    for rank, region in enumerate([world.there[0].descriptor, None]):
        manifest = lay_out(SHAPE, Coordinates(tp_rank=rank, tp_size=2)).manifest(
            worker_id="p", incarnation="i", model="m"
        )
        draft.add(AddPeerRank(peer=worker, side=PeerSide.SOURCE, manifest=manifest, region=region))
    opened: list[FakeRemoteRegion] = []

    class Plane(FakeDataPlane):
        def connect(self, *arguments: Any) -> FakeRemoteRegion:
            opened.append(super().connect(*arguments))
            return opened[-1]

    plane = Plane(world.network, peer_id="d2", incarnation="j2", now=CLOCK.monotonic)
    with pytest.raises(InvalidValueError, match="region of rank 1"):
        connect_sources(draft, 0, plane, CLOCK, threading.Event())
    assert [remote.peer_alive for remote in opened] == [False]
    world.puller.close()


def test_grants_of_reads_name_the_slot_as_their_lock(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """States touch the slot's cell alone; tokens the cells of their blocks, too, at the source."""
    seen: SimpleQueue[WriteGrant] = SimpleQueue()
    read = FakeRemoteRegion.read

    def noted(self: FakeRemoteRegion, runs: Any, local: Any, grant: WriteGrant, deadline: float) -> TransferResult:
        seen.put(grant)
        return read(self, runs, local, grant, deadline)

    monkeypatch.setattr(FakeRemoteRegion, "read", noted)
    slot = NUM_BLOCKS + 2
    for lock, roles, cells in ((1, STATES, (slot,)), (2, tuple(Role), (slot, 3, 1))):
        world.begin(lock=lock, roles=roles)
        world.told()
        for _ in range(2):
            grant = seen.get_nowait()
            assert (grant.lock_cell, grant.cells, grant.generation) == (slot, cells, GENERATION)
