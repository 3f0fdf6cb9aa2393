"""What only the shared-memory data plane has: a server of descriptors, its socket files, and files that are no regions."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import msgspec
import pytest

from common.dataplane import fd_server
from common.dataplane.fd_server import FdServer, RegionRequest, request_fd
from common.dataplane.port import DataPlaneError
from common.dataplane.shm import ShmDataPlane
from contracts.dataplane import RegionDescriptor
from tests.contract.dataplane.bench import NOW, PATIENCE_S, soon
from tests.contract.dataplane.peer import Peer


def open_files() -> list[str]:
    """What this process's descriptors stand for."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:  # closed meanwhile, by this listing or by a thread
            continue
    return links


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ShmDataPlane]:
    """This process's end."""
    made = ShmDataPlane(tmp_path, peer_id="owner", incarnation="i1", now=NOW)
    yield made
    made.close()


def test_a_crash_leaves_nothing_that_the_next_start_does_not_remove(tmp_path: Path) -> None:
    """A killed process's socket file goes when another process starts in the directory; a living one's stays; close removes its own."""
    peer = Peer("shm", tmp_path)
    living = ShmDataPlane(tmp_path, peer_id="living", incarnation="i1", now=NOW)
    peer.kill()
    peer.close()
    assert Path(peer.descriptor.opaque).exists()
    after = ShmDataPlane(tmp_path, peer_id="after", incarnation="i1", now=NOW)
    assert set(tmp_path.iterdir()) == {living.server.path, after.server.path}
    living.close()
    after.close()
    after.close()
    assert list(tmp_path.iterdir()) == []


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
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nested:
        nested.settimeout(PATIENCE_S)
        nested.connect(os.fspath(server.path))
        nested.send(b"\x81\xa1x" + b"\x91" * 3000 + b"\xc0")
        assert b"not a request" in nested.recv(4096)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(os.fspath(server.path))
    connection, received = request_fd(os.fspath(server.path), request, NOW, soon())
    assert os.fstat(received).st_ino == os.fstat(fd).st_ino
    os.close(received)
    server.remove(request)
    connection.setblocking(True)
    connection.settimeout(PATIENCE_S)
    assert connection.recv(1) == b""
    connection.close()
    with pytest.raises(DataPlaneError, match="no region 'r'"):
        request_fd(os.fspath(server.path), request, NOW, soon())
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


def test_a_process_without_descriptors_left_answers_so_and_serves_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region that cannot be opened for a client is an error of that client; who comes next is served by the same thread."""
    server = FdServer(tmp_path)
    fd = os.memfd_create("anything")
    request = RegionRequest(peer_id="p", incarnation="i", region_id="r")
    server.add(request, fd)

    def no_descriptors(_fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(fd_server, "reopen", no_descriptors)
        with pytest.raises(DataPlaneError, match="cannot be opened: Too many open files"):
            request_fd(os.fspath(server.path), request, NOW, soon())
    connection, received = request_fd(os.fspath(server.path), request, NOW, soon())
    os.close(received)
    connection.close()
    server.close()
    os.close(fd)


def test_a_process_that_cannot_accept_naps_and_accepts_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors, the server does not spin; whoever waits is served when there are some."""
    naps: SimpleQueue[float] = SimpleQueue()
    monkeypatch.setattr(fd_server, "time", SimpleNamespace(sleep=naps.put))
    server = FdServer(tmp_path)
    fd = os.memfd_create("anything")
    request = RegionRequest(peer_id="p", incarnation="i", region_id="r")
    server.add(request, fd)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(PATIENCE_S)
        free = os.dup(fd)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            client.connect(os.fspath(server.path))
            assert 0 < naps.get(timeout=PATIENCE_S) < 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.send(msgspec.msgpack.encode(request))
        _, received, _, _ = socket.recv_fds(client, 4096, 1)
        assert len(received) == 1
        os.close(received[0])
    server.close()
    os.close(fd)


def test_what_a_process_left_that_was_killed_as_it_started_goes_when_it_is_old(tmp_path: Path) -> None:
    """Under its first name a socket has no listener yet: a young one may be a process that starts right now."""
    for name, age_s in (("old", 3600.0), ("young", 0.0)):
        path = tmp_path / f".dp-{name}.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as unfinished:
            unfinished.bind(os.fspath(path))
        at = path.lstat().st_mtime - age_s
        os.utime(path, (at, at))
    (tmp_path / ".dp-file.sock").touch()
    os.utime(tmp_path / ".dp-file.sock", (0, 0))
    server = FdServer(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {server.path.name, ".dp-young.sock", ".dp-file.sock"}
    server.close()


@pytest.mark.parametrize("num_bytes", [105, 106, 107, 108])
def test_a_path_is_refused_by_name_from_the_first_byte_too_many_on(tmp_path: Path, num_bytes: int) -> None:
    """What is too long for the name under which the socket is made is refused like what is too long for its last one."""
    num_name_bytes = num_bytes - len(os.fsencode(tmp_path)) - len("//dp-0123456789ab.sock")
    if num_bytes < 107:
        server = FdServer(tmp_path / ("d" * num_name_bytes))
        assert len(os.fsencode(server.path)) == num_bytes
        server.close()
        return
    with pytest.raises(DataPlaneError, match="is too long"):
        FdServer(tmp_path / ("d" * num_name_bytes))


def test_a_folder_in_which_no_socket_can_be_made_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting is named, not the call that failed."""

    def read_only(*_args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "rename", read_only)
    with pytest.raises(DataPlaneError, match=r"\(transport_dir\): no socket can be made in .*: Read-only file system"):
        FdServer(tmp_path)


def test_a_directory_with_too_long_a_path_is_refused_by_name(tmp_path: Path) -> None:
    """The system's limit on a socket's path is said before bind fails obscurely."""
    with pytest.raises(DataPlaneError, match="socket directory"):
        FdServer(tmp_path / ("d" * 120))


def test_importing_the_adapter_does_not_import_torch_or_numpy() -> None:
    """Processes that only carry descriptors stay small."""
    code = "import sys, common.dataplane.shm, common.dataplane.fake; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
