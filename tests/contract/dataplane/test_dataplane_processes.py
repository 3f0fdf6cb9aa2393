"""Data planes between real processes: frozen and killed writers, killed owners, and what a crash leaves behind."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.dataplane.port import DataPlane, DataPlaneError, Outcome, Quiescence, Region, RemoteRegion, WriteGrant
from common.dataplane.shm import ShmDataPlane
from common.dataplane.tcp import TcpDataPlane
from common.dataplane.tcp_region import Landing, Stoppable, TcpRegion
from common.layout.run import Run
from tests.contract.dataplane.bench import NOW, PATIENCE_S, soon
from tests.contract.dataplane.peer import CONTENT, GRANT, LENGTH, Peer

REUSED = bytes([0x99]) * LENGTH
WHOLE = Run(local_offset=0, remote_offset=0, length=LENGTH)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """Adapters that reach another process."""
    return str(request.param)


@pytest.fixture
def plane(transport: str, tmp_path: Path) -> Iterator[DataPlane]:
    """This process's end."""
    made: DataPlane = (
        ShmDataPlane(tmp_path, peer_id="owner", incarnation="i1", now=NOW)
        if transport == "shm"
        else TcpDataPlane("127.0.0.1", peer_id="owner", incarnation="i1", now=NOW)
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def peer(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """The other process, for tests that leave it as it was."""
    made = Peer(transport, tmp_path_factory.mktemp("peer"))
    yield made
    made.close()


@pytest.fixture
def mortal(transport: str, tmp_path: Path) -> Iterator[Peer]:
    """Another process, for a test that ends it."""
    made = Peer(transport, tmp_path)
    yield made
    made.close()


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for what another thread or the kernel is about to do; a hang is the only way to fail."""
    deadline = soon()
    while not holds():
        assert NOW() < deadline
        os.sched_yield()


def has_seen_the_end(remote: RemoteRegion) -> bool:
    """Whether a death becomes known without a transfer."""
    eventually(lambda: not remote.peer_alive)
    return True


def test_bytes_written_by_another_process_are_here(plane: DataPlane, peer: Peer) -> None:
    """DONE over there means visible here; after a revocation the same process is refused."""
    target = plane.allocate(LENGTH, 4)
    peer.connect(target)
    assert peer.ask("write") == "done"
    assert bytes(target.data) == bytes([CONTENT]) * LENGTH
    assert target.revoke(GRANT.cells, GRANT.lock_cell, 2, soon()) is Quiescence.YES
    target.data[:] = REUSED
    assert peer.ask("write") == "failed_quiesced"
    assert bytes(target.data) == REUSED


def is_corrupted_by_a_frozen_writer(target: Region, peer: Peer) -> bool:
    """Freeze a writer in mid-write, revoke, use the memory again as soon as that is allowed, and wake the writer up."""
    assert peer.ask("hold") == "in flight"
    peer.freeze()
    reused = target.revoke(GRANT.cells, GRANT.lock_cell, 2, NOW()) is Quiescence.YES
    if reused:
        target.data[:] = REUSED
    peer.wake()
    assert peer.ask("go on") != "done"
    assert target.revoke(GRANT.cells, GRANT.lock_cell, 2, soon()) is Quiescence.YES
    if not reused:
        target.data[:] = REUSED
    return bytes(target.data) != REUSED


def test_a_frozen_writer_that_wakes_up_changes_nothing(plane: DataPlane, peer: Peer) -> None:
    """Whatever it still has to say lands before the revocation's YES or never, and it does not claim success."""
    target = plane.allocate(LENGTH, 4)
    peer.connect(target)
    assert not is_corrupted_by_a_frozen_writer(target, peer)


def test_a_frozen_writer_is_seen_when_nobody_waits_for_it(
    plane: DataPlane, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above can fail: without the lock, a writer that wakes up late corrupts the memory's next owner."""

    def enter_unseen(region: TcpRegion, grant: WriteGrant, connection: Stoppable) -> Landing:
        return Landing(grant, region.check(grant), connection)

    monkeypatch.setattr(TcpRegion, "enter", enter_unseen)
    target = plane.allocate(LENGTH, 4)
    peer.connect(target)
    assert peer.ask("unlock") == "unlocked"
    corrupted = is_corrupted_by_a_frozen_writer(target, peer)
    assert peer.ask("lock") == "locked"
    assert corrupted


def test_a_frozen_writer_holds_memory_up_only_where_it_can_write_by_itself(plane: DataPlane, mortal: Peer) -> None:
    """Shared memory: NO until the writer is dead, when the kernel frees its lock. TCP: YES although it is frozen."""
    target = plane.allocate(LENGTH, 4)
    mortal.connect(target)
    assert mortal.ask("hold") == "in flight"
    mortal.freeze()
    deadline = soon() if plane.capabilities.stops_writers else NOW()
    expected = Quiescence.YES if plane.capabilities.stops_writers else Quiescence.NO
    assert target.revoke(GRANT.cells, GRANT.lock_cell, 2, deadline) is expected
    mortal.kill()
    assert target.revoke(GRANT.cells, GRANT.lock_cell, 2, soon()) is Quiescence.YES


def test_a_killed_writer_leaves_nothing(plane: DataPlane, mortal: Peer) -> None:
    """Killed in mid-write: its lock, connections and their threads are gone, and the next revocation says YES at once."""
    before = threading.active_count()
    target = plane.allocate(LENGTH, 4)
    mortal.connect(target)
    assert mortal.ask("hold") == "in flight"
    mortal.kill()
    eventually(lambda: target.revoke(GRANT.cells, GRANT.lock_cell, 2, NOW()) is Quiescence.YES)
    eventually(lambda: threading.active_count() <= before)
    if isinstance(plane, TcpDataPlane):
        assert plane.server.num_callers == 0


def test_a_killed_owner_is_noticed_and_leaves_nothing(plane: DataPlane, mortal: Peer) -> None:
    """The owner is killed: the next transfer fails quiescent, connecting fails, and closing leaves no descriptor behind."""
    source = plane.allocate(LENGTH, 4)
    before = open_sockets()
    remote = plane.connect(mortal.descriptor, soon())
    assert remote.write([WHOLE], source, GRANT, soon()).outcome is Outcome.DONE
    alive_before = remote.peer_alive
    mortal.kill()
    assert (alive_before, has_seen_the_end(remote)) == (True, True)
    assert remote.write([WHOLE], source, GRANT, soon()).outcome is Outcome.FAILED_QUIESCED
    assert remote.read([WHOLE], source, GRANT, soon()).outcome is Outcome.FAILED_QUIESCED
    with pytest.raises(DataPlaneError):
        plane.connect(mortal.descriptor, soon())
    remote.close()
    del remote  # what is mapped goes with it
    eventually(lambda: open_sockets() == before)


@pytest.mark.parametrize("transport", ["tcp"], scope="module")
def test_an_owner_that_is_killed_in_mid_write_does_not_count(plane: DataPlane, mortal: Peer) -> None:
    """A write into a frozen owner ends, by the kernel's word, when the owner is killed, long before its deadline; it is not DONE."""
    source = plane.allocate(LENGTH, 4)
    remote = plane.connect(mortal.descriptor, soon())
    assert remote.write([WHOLE], source, GRANT, soon()).outcome is Outcome.DONE
    mortal.freeze()
    outcomes: list[Outcome] = []

    def write() -> None:
        outcomes.append(remote.write([WHOLE], source, GRANT, NOW() + 10 * PATIENCE_S).outcome)

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    mortal.kill()
    writing.join(PATIENCE_S)
    assert outcomes in ([Outcome.FAILED_QUIESCED], [Outcome.INDETERMINATE])


def test_a_frozen_owner_costs_the_deadline_only(plane: DataPlane, peer: Peer) -> None:
    """Connecting does not hang on an owner that does not run."""
    peer.freeze()
    with pytest.raises(DataPlaneError, match="does not answer"):
        plane.connect(peer.descriptor, NOW() + 0.05)
    peer.wake()


@pytest.mark.parametrize("transport", ["tcp"], scope="module")
def test_a_write_into_an_owner_that_freezes_is_indeterminate(peer: Peer) -> None:
    """Nobody can tell what becomes of bytes under way to an owner that says nothing. When it wakes up, it is of use again."""
    late = threading.Event()
    writer = TcpDataPlane(
        "127.0.0.1", peer_id="writer", incarnation="i1", now=lambda: NOW() + (10 * PATIENCE_S if late.is_set() else 0)
    )
    source = writer.allocate(LENGTH, 4)
    remote = writer.connect(peer.descriptor, soon())
    assert remote.write([WHOLE], source, GRANT, soon()).outcome is Outcome.DONE
    peer.freeze()
    outcomes: list[Outcome] = []
    writing = threading.Thread(target=lambda: outcomes.append(remote.write([WHOLE], source, GRANT, soon()).outcome))
    writing.start()
    eventually(lambda: bool(remote._busy))
    late.set()
    writing.join(PATIENCE_S)
    late.clear()
    assert outcomes == [Outcome.INDETERMINATE]
    assert remote.write([WHOLE], source, GRANT, NOW() + 0.05).outcome is Outcome.FAILED_QUIESCED  # it never got in
    assert remote.peer_alive
    peer.wake()
    assert remote.write([WHOLE], source, GRANT, soon()).outcome is Outcome.DONE
    writer.close()


def test_a_clean_exit_leaves_nothing(plane: DataPlane, mortal: Peer, tmp_path: Path) -> None:
    """After close there is no socket file, and nobody listens."""
    assert mortal.ask("quit") == "bye"
    mortal.process.wait(PATIENCE_S)
    if isinstance(plane, ShmDataPlane):
        assert list(tmp_path.iterdir()) == [plane.server.path]
        return
    host, _, port = mortal.descriptor.opaque.partition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), PATIENCE_S)


def open_sockets() -> int:
    """How many sockets and memory files this process has open."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:  # the one that listed the folder
            continue
    return sum(link.startswith(("socket:", "/memfd:")) for link in links)
