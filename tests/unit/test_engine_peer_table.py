"""The links of one rank while they are being made: what waits for them, what becomes of late ones, what is left in the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from common.dataplane.fake import FakeDataPlane, FakeRemoteRegion
from common.dataplane.fake_network import FakeNetwork
from common.engine.transfer.peer_table import MAX_THREADS, PeerTable
from common.layout.region import lay_out
from common.layout.shape import CacheShape, LayerType
from common.runtime.clock import SystemClock
from contracts.dataplane import RegionDescriptor
from contracts.errors import ErrorCode, InvalidValueError, PdmeshError
from contracts.manifest import CacheDtypes, Coordinates, Dtype
from contracts.rank import AddPeerRank, PeerSide
from contracts.requests import WorkerRef

CLOCK = SystemClock()
PATIENCE_S = 30.0
PEER = WorkerRef(worker_id="d", incarnation="j1")
OTHER = WorkerRef(worker_id="e", incarnation="k1")
MAP = lay_out(
    CacheShape(
        layer_types=(LayerType.LINEAR, LayerType.FULL),
        num_kv_heads=2,
        head_dim=4,
        num_key_heads=4,
        num_value_heads=4,
        key_head_dim=4,
        value_head_dim=4,
        conv_kernel=4,
        dtypes=CacheDtypes(key=Dtype.FLOAT32, value=Dtype.FLOAT32, conv=Dtype.FLOAT32),
        block_size=2,
        num_blocks=8,
        num_slots=3,
    ),
    Coordinates(),
)


class SlowPlane(FakeDataPlane):
    """Connects to workers in `slow` only when it is let, and notes it. `obeys`: whether it gives up when it is told to."""

    def __init__(self, network: FakeNetwork) -> None:
        super().__init__(network, peer_id="p", incarnation="i", now=CLOCK.monotonic)
        self.slow: set[str] = set()
        self.begun: SimpleQueue[threading.Thread] = SimpleQueue()
        self.gate = threading.Event()
        self.obeys = True
        self.connected: list[FakeRemoteRegion] = []

    def connect(
        self, descriptor: RegionDescriptor, deadline: float, stop: threading.Event | None = None
    ) -> FakeRemoteRegion:
        """Wait in front of a slow worker."""
        assert stop is not None
        if descriptor.peer_id in self.slow:
            self.begun.put(threading.current_thread())
            if self.obeys:
                assert stop.wait(PATIENCE_S)
            else:
                assert self.gate.wait(PATIENCE_S)
                stop = None
        remote = super().connect(descriptor, deadline, stop)
        self.connected.append(remote)
        return remote


class World:
    """The table of a rank that is alone, and two peers."""

    def __init__(self) -> None:
        network = FakeNetwork()
        self.plane = SlowPlane(network)
        self.descriptors = {
            peer: FakeDataPlane(network, peer_id=peer.worker_id, incarnation=peer.incarnation, now=CLOCK.monotonic)
            .allocate(MAP.nbytes, 11)
            .descriptor
            for peer in (PEER, OTHER)
        }
        self.reports: SimpleQueue[tuple[WorkerRef, int, Exception | None]] = SimpleQueue()
        self.table = PeerTable(0, self.plane, CLOCK, lambda *report: self.reports.put(report))

    def link(
        self,
        peer: WorkerRef,
        attempt: int,
        region: RegionDescriptor | None = None,
        *,
        side: PeerSide = PeerSide.DESTINATION,
    ) -> None:
        """Begin to link; `side` is the peer's."""
        own = MAP.manifest(worker_id="p", incarnation="i", model="m")
        theirs = MAP.manifest(worker_id=peer.worker_id, incarnation=peer.incarnation, model="m")
        (own_side,) = set(PeerSide) - {side}
        self.table.add(AddPeerRank(peer=peer, side=own_side, manifest=own))
        self.table.add(AddPeerRank(peer=peer, side=side, manifest=theirs, region=region or self.descriptors.get(peer)))
        self.table.link(peer, attempt, side)

    def begun(self) -> threading.Thread:
        """The next thread that connects to a slow worker."""
        return self.plane.begun.get(timeout=PATIENCE_S)

    def told(self) -> tuple[WorkerRef, int, Exception | None]:
        """The next report."""
        return self.reports.get(timeout=PATIENCE_S)

    def is_linked(self, peer: WorkerRef) -> bool:
        """Whether pushes may go there."""
        try:
            return bool(self.table.find(peer, 0).regions)
        except PdmeshError:
            return False


@pytest.fixture
def world() -> Iterator[World]:
    """A world without threads in the end."""
    made = World()
    yield made
    made.plane.gate.set()
    made.table.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("connect-")]


def test_another_peer_is_linked_while_one_is_silent(world: World) -> None:
    """Nothing waits for the silent one; its thread bears its name."""
    world.plane.slow = {"d"}
    world.link(PEER, 1)
    assert world.begun().name == "connect-0-d"
    world.link(OTHER, 2)
    assert world.told() == (OTHER, 2, None)
    assert (world.is_linked(PEER), world.is_linked(OTHER)) == (False, True)


def test_who_is_unlinked_while_being_connected_is_given_up(world: World) -> None:
    """The thread ends, and nothing is heard of it."""
    world.plane.slow = {"d"}
    world.link(PEER, 1)
    thread = world.begun()
    world.table.unlink(PEER)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert (world.reports.empty(), world.is_linked(PEER)) == (True, False)


def test_what_comes_late_is_closed(world: World) -> None:
    """A connection that could not be given up in time is closed as soon as it is there."""
    world.plane.slow, world.plane.obeys = {"d"}, False
    world.link(PEER, 1)
    thread = world.begun()
    world.table.unlink(PEER)
    world.plane.gate.set()
    thread.join(PATIENCE_S)
    assert [remote.peer_alive for remote in world.plane.connected] == [False]
    assert (world.reports.empty(), world.is_linked(PEER)) == (True, False)


def test_a_new_attempt_takes_the_place_of_the_one_before(world: World) -> None:
    """Of the first nothing is heard, and what it opens late does not replace what the second one has."""
    world.plane.slow, world.plane.obeys = {"d"}, False
    world.link(PEER, 1)
    thread = world.begun()
    world.plane.slow = set()
    world.link(PEER, 2)
    assert world.told() == (PEER, 2, None)
    world.plane.gate.set()
    thread.join(PATIENCE_S)
    second, first = world.plane.connected
    assert (first.peer_alive, second.peer_alive) == (False, True)
    assert world.table.find(PEER, 0).regions == {0: second}
    assert world.reports.empty()


def test_an_earlier_link_serves_until_the_new_one_is_there(world: World) -> None:
    """Then it is closed; an attempt that fails leaves it as it is."""
    world.link(PEER, 1)
    assert world.told() == (PEER, 1, None)
    world.plane.slow, world.plane.obeys = {"d"}, False
    world.link(PEER, 2)
    world.begun()
    assert world.is_linked(PEER)
    world.plane.gate.set()
    assert world.told() == (PEER, 2, None)
    first, second = world.plane.connected
    assert (first.peer_alive, second.peer_alive) == (False, True)
    wrong = RegionDescriptor(
        transport="fake", peer_id="x", incarnation="x", region_id="x", base=0, length=1, num_cells=1, opaque=""
    )
    world.link(PEER, 3, wrong)
    peer, attempt, problem = world.told()
    assert (peer, attempt) == (PEER, 3)
    assert isinstance(problem, PdmeshError)
    assert second.peer_alive


def test_a_peer_is_linked_one_way_at_a_time(world: World) -> None:
    """As a source it is found for pulls and not for pushes; linked the other way, it is the other way round.

    What needs the link that is not there fails as a transfer does, so that it is tried elsewhere.
    """
    world.link(PEER, 1, side=PeerSide.SOURCE)
    assert world.told() == (PEER, 1, None)
    assert list(world.table.find_source(PEER, 0).regions) == [0]
    with pytest.raises(PdmeshError, match="linked as a destination") as pushed:
        world.table.find(PEER, 0)
    assert pushed.value.info.rule.retryable
    with pytest.raises(InvalidValueError, match=r"source.dp_rank: 1 .* 0 to 0"):
        world.table.find_source(PEER, 1)
    world.link(PEER, 2)
    assert world.told() == (PEER, 2, None)
    assert world.is_linked(PEER)
    with pytest.raises(PdmeshError, match="linked as a source") as pulled:
        world.table.find_source(PEER, 0)
    assert pulled.value.info.rule.retryable
    assert [remote.peer_alive for remote in world.plane.connected] == [False, True]
    world.table.unlink(PEER)
    for find in (world.table.find, world.table.find_source):
        with pytest.raises(PdmeshError, match="linked as a") as gone:
            find(PEER, 0)
        assert gone.value.code is ErrorCode.TRANSFER_FAILED, "another worker, or a new link, can do what was asked"


def test_what_is_wrong_with_a_pair_is_reported(world: World) -> None:
    """A plan that cannot be made, and a region that there is none of: both are told by the attempt, not by the command."""
    world.table.link(PEER, 1)
    peer, attempt, problem = world.told()
    assert (peer, attempt) == (PEER, 1)
    assert isinstance(problem, PdmeshError)
    assert problem.code is ErrorCode.INCOMPATIBLE_WORKERS
    unreachable = WorkerRef(worker_id="u", incarnation="u1")
    world.link(unreachable, 2)
    peer, attempt, problem = world.told()
    assert (peer, attempt) == (unreachable, 2)
    assert isinstance(problem, InvalidValueError)


def test_threads_are_bounded(world: World) -> None:
    """One attempt too many is refused by name; when one has ended there is room again."""
    world.plane.slow, world.plane.obeys = {"d"}, False
    for attempt in range(MAX_THREADS):
        world.link(PEER, attempt)
    threads = [world.begun() for _ in range(MAX_THREADS)]
    with pytest.raises(PdmeshError, match=f"at most {MAX_THREADS}") as caught:
        world.link(OTHER, 99)
    assert caught.value.code is ErrorCode.OVERLOADED
    world.table.unlink(PEER)
    world.plane.gate.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    world.link(OTHER, 100)
    assert world.told() == (OTHER, 100, None)


def test_closing_ends_what_is_under_way(world: World) -> None:
    """No thread is left, and nothing stays linked."""
    world.link(OTHER, 1)
    assert world.told() == (OTHER, 1, None)
    world.plane.slow = {"d"}
    world.link(PEER, 2)
    thread = world.begun()
    world.table.close()
    assert not thread.is_alive()
    assert (world.is_linked(PEER), world.is_linked(OTHER)) == (False, False)
    assert [remote.peer_alive for remote in world.plane.connected] == [False]


def test_a_rank_whose_parent_is_gone_ends_its_attempts_quietly() -> None:
    """There is nobody to report to any more; the error is not raised into the thread."""
    world = World()

    def gone(*_: object) -> None:
        raise BrokenPipeError

    world.table = PeerTable(0, world.plane, CLOCK, gone)
    world.plane.slow, world.plane.obeys = {"d"}, False
    world.link(PEER, 1)
    thread = world.begun()
    world.plane.gate.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    world.table.close()


def test_an_earlier_link_that_cannot_be_closed_keeps_nobody_waiting_for_the_new_one(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new link is there and told of; the mistake is in the log, with its traceback."""
    world.link(PEER, 1)
    assert world.told() == (PEER, 1, None)

    def fail() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(world.plane.connected[0], "close", fail)
    world.link(PEER, 2)
    assert world.told() == (PEER, 2, None)
    assert world.is_linked(PEER)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["planted"]
