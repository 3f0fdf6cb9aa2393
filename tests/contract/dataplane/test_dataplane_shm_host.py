"""The shared-memory data plane between real processes: deaths, frozen writers, and what a crash leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import pytest

from common.dataplane.fd_server import FdServer, RegionRequest, request_fd
from common.dataplane.port import DataPlaneError, Outcome, Quiescence, WriteGrant
from common.dataplane.shm import ShmDataPlane
from common.dataplane.shm_region import ShmRegion
from common.layout.run import Run
from common.runtime.clock import SystemClock
from contracts.dataplane import RegionDescriptor

NOW = SystemClock().monotonic
PATIENCE_S = 60.0
GRANT = WriteGrant(lock_cell=3, cells=(0, 3), generation=1)
LENGTH = 1 << 16

# Reads commands from its standard input, one a line, and answers each with a line.
PEER = """
import pathlib, sys, msgspec
from common.dataplane import shm_remote
from common.dataplane.port import WriteGrant
from common.dataplane.shm import ShmDataPlane
from common.layout.run import Run
from common.runtime.clock import SystemClock
from contracts.dataplane import RegionDescriptor

now = SystemClock().monotonic
plane = ShmDataPlane(pathlib.Path(sys.argv[1]), peer_id="peer", incarnation="i1", now=now)
region = plane.allocate(1 << 16, 4)
region.data[:] = b"\\x55" * (1 << 16)
grant = WriteGrant(lock_cell=3, cells=(0, 3), generation=1)
run = Run(local_offset=0, remote_offset=0, length=1 << 16)
copy_group = shm_remote.copy_group

def say(text):
    print(text, flush=True)

def stop_in_the_middle(*arguments, **named):
    say("in flight")
    sys.stdin.readline()
    return copy_group(*arguments, **named)

say(msgspec.json.encode(region.descriptor).decode())
for line in sys.stdin:
    command, _, argument = line.strip().partition(" ")
    if command == "connect":
        remote = plane.connect(msgspec.json.decode(argument, type=RegionDescriptor), now() + 60)
        say("connected")
    elif command == "write":
        say(remote.write([run], region, grant, now() + 60).outcome.value)
    elif command == "hold":
        shm_remote.copy_group = stop_in_the_middle
        say(remote.write([run], region, grant, now() + 60).outcome.value)
    elif command == "quit":
        plane.close()
        break
say("bye")
"""


def open_files() -> list[str]:
    """What this process's descriptors stand for."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:  # closed meanwhile, by this listing or by a thread
            continue
    return links


class Peer:
    """A second process with a data plane of its own."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, os.fspath(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.commands: IO[str] = self.process.stdin
        self.answers: IO[str] = self.process.stdout
        self.descriptor = msgspec.json.decode(self.answers.readline(), type=RegionDescriptor)

    def say(self, command: str) -> None:
        """Give a command."""
        self.commands.write(f"{command}\n")
        self.commands.flush()

    def ask(self, command: str) -> str:
        """Give a command and wait for its answer."""
        self.say(command)
        return self.answers.readline().strip()

    def freeze(self) -> None:
        """Stop all of its threads, and return when they have stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End it and its pipes."""
        if self.process.poll() is None:
            self.kill()
        self.commands.close()
        self.answers.close()


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ShmDataPlane]:
    """This process's end."""
    made = ShmDataPlane(tmp_path, peer_id="owner", incarnation="i1", now=NOW)
    yield made
    made.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """The other process."""
    made = Peer(tmp_path)
    yield made
    made.close()


def soon() -> float:
    """A deadline that is only met when something hangs."""
    return NOW() + PATIENCE_S


def granted_region(plane: ShmDataPlane, peer: Peer) -> ShmRegion:
    """A region of ours, granted to the peer."""
    target = plane.allocate(LENGTH, 4)
    target.set_generations(GRANT.cells, 1)
    assert peer.ask(f"connect {msgspec.json.encode(target.descriptor).decode()}") == "connected"
    return target


def test_bytes_written_by_another_process_are_here(plane: ShmDataPlane, peer: Peer) -> None:
    """DONE over there means visible here; after a revocation the same process is refused."""
    target = granted_region(plane, peer)
    assert peer.ask("write") == "done"
    assert bytes(target.data) == b"\x55" * LENGTH
    assert target.revoke(GRANT.cells, GRANT.lock_cell, 2, soon()) is Quiescence.YES
    target.data[:] = bytes(LENGTH)
    assert peer.ask("write") == "failed_quiesced"
    assert bytes(target.data) == bytes(LENGTH)


def test_a_frozen_writer_keeps_its_lock_until_it_dies(plane: ShmDataPlane, peer: Peer) -> None:
    """Frozen in mid-write: NO, so its memory goes to quarantine. Killed: the kernel frees the lock, and the answer becomes YES."""
    target = granted_region(plane, peer)
    assert peer.ask("hold") == "in flight"
    peer.freeze()
    assert target.revoke(GRANT.cells, GRANT.lock_cell, 2, NOW()) is Quiescence.NO
    peer.kill()
    assert target.revoke(GRANT.cells, GRANT.lock_cell, 2, soon()) is Quiescence.YES


def test_a_frozen_writer_that_wakes_is_waited_for(plane: ShmDataPlane, peer: Peer) -> None:
    """It wakes after the revocation began: its bytes land before YES, never after, and it does not claim success."""
    target = granted_region(plane, peer)
    assert peer.ask("hold") == "in flight"
    assert target.revoke(GRANT.cells, GRANT.lock_cell, 2, NOW()) is Quiescence.NO
    assert peer.ask("go on") == "failed_quiesced"
    assert target.revoke(GRANT.cells, GRANT.lock_cell, 2, NOW()) is Quiescence.YES


def test_a_killed_owner_is_noticed_and_its_memory_stays_harmless(plane: ShmDataPlane, peer: Peer) -> None:
    """The owner is killed: a writer's next transfer is FAILED_QUIESCED, without a fault on memory that has gone."""
    source = plane.allocate(LENGTH, 4)
    remote = plane.connect(peer.descriptor, soon())
    alive_before = remote.peer_alive
    peer.kill()
    assert (alive_before, remote.peer_alive) == (True, False)
    grant = WriteGrant(lock_cell=0, cells=(0,), generation=0)
    result = remote.write([Run(local_offset=0, remote_offset=0, length=LENGTH)], source, grant, soon())
    assert (result.outcome, "died" in result.reason) == (Outcome.FAILED_QUIESCED, True)


def test_a_crash_leaves_nothing_that_the_next_start_does_not_remove(tmp_path: Path, peer: Peer) -> None:
    """A killed process's socket file goes when another process starts in the directory; a living one's stays; close removes its own."""
    living = ShmDataPlane(tmp_path, peer_id="living", incarnation="i1", now=NOW)
    peer.kill()
    assert Path(peer.descriptor.opaque).exists()
    after = ShmDataPlane(tmp_path, peer_id="after", incarnation="i1", now=NOW)
    assert set(tmp_path.iterdir()) == {living.server.path, after.server.path}
    living.close()
    after.close()
    after.close()
    assert list(tmp_path.iterdir()) == []


def test_a_clean_exit_leaves_nothing(tmp_path: Path, peer: Peer) -> None:
    """After close the directory is empty."""
    assert peer.ask("quit") == "bye"
    peer.process.wait(PATIENCE_S)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_never_answers_costs_the_deadline_only(tmp_path: Path, plane: ShmDataPlane, peer: Peer) -> None:
    """A frozen owner does not hang a connecting peer."""
    peer.freeze()
    with pytest.raises(DataPlaneError, match="does not answer"):
        plane.connect(peer.descriptor, NOW() + 0.05)


def test_garbage_and_strangers_do_not_disturb_the_server(tmp_path: Path) -> None:
    """A client that sends garbage, or nothing and leaves, is dropped; the next one is served."""
    server = FdServer(tmp_path)
    fd = os.memfd_create("anything")
    request = RegionRequest(peer_id="p", incarnation="i", region_id="r")
    server.add(request, fd)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(os.fspath(server.path))
        stranger.send(b"\xc1 not msgpack")
        assert b"not a request" in stranger.recv(4096)
        assert stranger.recv(1) == b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(os.fspath(server.path))
    connection, received = request_fd(os.fspath(server.path), request, PATIENCE_S)
    assert os.fstat(received).st_ino == os.fstat(fd).st_ino
    os.close(received)
    server.remove(request)
    connection.setblocking(True)
    connection.settimeout(PATIENCE_S)
    assert connection.recv(1) == b""
    connection.close()
    with pytest.raises(DataPlaneError, match="no region 'r'"):
        request_fd(os.fspath(server.path), request, PATIENCE_S)
    server.close()
    os.close(fd)


def test_a_file_that_is_no_region_is_refused(plane: ShmDataPlane, tmp_path: Path) -> None:
    """A peer that serves an unsealed or short file cannot make this process map it: the error says so, and nothing leaks."""
    server = FdServer(tmp_path)
    fd = os.memfd_create("impostor")
    os.ftruncate(fd, 8192)
    server.add(RegionRequest(peer_id="p", incarnation="i", region_id="r"), fd)
    descriptor = RegionDescriptor(
        transport="shm",
        peer_id="p",
        incarnation="i",
        region_id="r",
        base=8192,
        length=1,
        num_cells=1,
        opaque=os.fspath(server.path),
    )
    with pytest.raises(DataPlaneError, match="not a sealed region"):
        plane.connect(descriptor, soon())
    server.close()
    os.close(fd)
    deadline = soon()
    while any("impostor" in link for link in open_files()):  # the server's thread may be about to close its own
        assert NOW() < deadline
        os.sched_yield()


def test_a_directory_with_too_long_a_path_is_refused_by_name(tmp_path: Path) -> None:
    """The system's limit on a socket's path is said before bind fails obscurely."""
    with pytest.raises(DataPlaneError, match="socket directory"):
        FdServer(tmp_path / ("d" * 120))


def test_importing_the_adapter_does_not_import_torch_or_numpy() -> None:
    """Processes that only carry descriptors stay small."""
    code = "import sys, common.dataplane.shm, common.dataplane.fake; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
