"""The life of a mesh, with a real NATS server and stand-in programs in place of the services."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from common.bus.port import BucketConfig, Bus, StreamConfig
from common.runtime.clock import SystemClock
from common.runtime.settings import environment
from common.worker.settings import WorkerSettings
from contracts import subjects
from services.launcher.bus import with_bus
from services.launcher.child import tail
from services.launcher.console import Console
from services.launcher.mesh import Body, MeshRun, RunningMesh
from services.launcher.plan import MeshPlan, MeshRequest, make_plan
from services.launcher.ports import free_ports, is_free, url_of
from services.launcher.settings import LauncherSettings, SettingsStructs
from services.launcher.up import announcement, called_as

_WORKER = """
import json, pathlib, signal, sys
settings = json.loads(pathlib.Path(sys.argv[2]).read_text())
def leave(*_):
    with open(ORDER, 'a') as file: file.write(ROLE + ' ')
    sys.exit(0)
signal.signal(15, leave)
print(json.dumps({"event": "weights_loaded", "model": settings["model"]}), flush=True)
while True: signal.pause()
"""
_ROUTER = """
import http.server, json, pathlib, signal, sys, threading
settings = json.loads(pathlib.Path(sys.argv[2]).read_text())
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer((settings["host"], settings["port"]), Ready)
def leave(*_):
    with open(ORDER, 'a') as file: file.write(ROLE + ' ')
    threading.Thread(target=server.shutdown).start()
signal.signal(15, leave)
server.serve_forever()
"""
# It tells the launcher itself that it does not want to wait, in place of an impatient person.
_IMPATIENT = """
import os, signal
signal.signal(15, lambda *_: os.kill(os.getppid(), signal.SIGINT))
print("weights_loaded", flush=True)
while True: signal.pause()
"""
# It has no handler for any signal, and interrupts the launcher, in place of a person.
_EARLY = """
import os, signal
os.kill(os.getppid(), signal.SIGTERM)
while True: signal.pause()
"""
_HANDLERLESS = "import signal; print('weights_loaded', flush=True); signal.pause()"
_BROKEN = "import sys; print('cannot read the weights', flush=True); sys.exit(3)"


class _Router(msgspec.Struct, frozen=True, kw_only=True):
    model: Path
    nats_url: str = ""
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0)] = 8000
    expected_workers: tuple[str, ...] = ()
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0


class _Broker(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""
    nats_url: str = ""
    record_ttl_s: float = 3600.0
    drain_timeout_s: float = 30.0


_STRUCTS = SettingsStructs(
    by_role={
        "router": _Router,
        "broker": _Broker,
        **dict.fromkeys(("prefill", "decode", "mixed"), WorkerSettings),
        "launcher": LauncherSettings,
    }
)


class _Said(io.StringIO):
    """A text that can be waited for: whoever writes it runs on the same loop."""

    def __init__(self) -> None:
        super().__init__()
        self._grown = asyncio.Event()

    def write(self, text: str) -> int:
        self._grown.set()
        return super().write(text)

    async def until(self, words: str) -> None:
        """Returns once it holds these words."""
        while words not in self.getvalue():
            self._grown.clear()
            await self._grown.wait()


class _Stage:
    """A folder with stand-ins for the services, and a mesh that is made of them."""

    def __init__(self, folder: Path) -> None:
        self.order = folder / "order"
        self.package = folder / "standins"
        self.package.mkdir()
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}", encoding="utf-8")
        self.out = io.StringIO()
        self.progress = _Said()
        (self.port,) = free_ports(1)
        for role in ("broker", "prefill", "decode"):
            self.play(role, _WORKER)
        self.play("router", _ROUTER)

    def play(self, role: str, program: str) -> None:
        text = f"ROLE, ORDER = {role!r}, {str(self.order)!r}\n{program}"
        (self.package / f"{role}.py").write_text(text, encoding="utf-8")

    def plan(self) -> MeshPlan:
        workers = (("prefill", ""), ("decode", ""))
        return make_plan(MeshRequest(model=str(self.model), workers=workers, port=self.port), _STRUCTS, {})

    def run(self, body: Body) -> MeshRun:
        return MeshRun(
            self.plan(),
            body,
            clock=SystemClock(),
            console=Console(SystemClock(), out=self.out, progress=self.progress),
            environ=environment() | {"PYTHONPATH": str(self.package.parent), "PD_TP": "9"},
            package="standins",
        )


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Stage]:
    """Stand-ins, and a temporary folder of our own, so that what is left in it is seen."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        stage = _Stage(Path(folder))
        monkeypatch.setattr("tempfile.tempdir", str(stage.temporary))
        yield stage


async def _all_up(mesh: RunningMesh) -> None:
    """Returns once every stand-in knows what to do with a signal."""
    async with asyncio.timeout(20):
        for name in ("broker", *mesh.workers):
            while not any("weights_loaded" in line for line in tail(mesh.logs / f"{name}.log")):  # noqa: ASYNC110 - a file cannot be waited for
                await asyncio.sleep(0.01)


def _left(stage: _Stage) -> list[Path]:
    return sorted(stage.temporary.rglob("*"))


def _processes_of(folder: Path) -> list[int]:
    """Processes whose command line names something in the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(folder) in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_a_mesh_lives_and_leaves_nothing(stage: _Stage) -> None:
    """The body meets a server and services that run; afterwards they have drained in order and no trace is left."""
    met: list[RunningMesh] = []

    async def use(bus: Bus) -> None:
        await bus.ensure_stream(StreamConfig(name=subjects.EVENTS_STREAM, subjects=(subjects.EVENTS_FILTER,)))

    async def body(mesh: RunningMesh) -> None:
        met.append(mesh)
        await _all_up(mesh)
        assert len(_processes_of(stage.temporary)) == 5
        log = (mesh.logs / "decode-0.log").read_text(encoding="utf-8")
        assert str(stage.model) in log
        await with_bus(mesh.nats_url, use, say=lambda _text: None)

    assert await stage.run(body).run() == 0, stage.progress.getvalue()
    assert met[0].workers == ("prefill-0", "decode-0")
    assert stage.order.read_text(encoding="utf-8").split() == ["router", "prefill", "decode", "broker"]
    assert _left(stage) == []
    assert _processes_of(stage.temporary) == []


async def test_a_child_that_dies_ends_the_mesh(stage: _Stage) -> None:
    """The reason is shown with the end of its log, the others are stopped, and the logs are kept."""
    stage.play("decode", _BROKEN)
    stage.play("router", _WORKER)

    async def body(_mesh: RunningMesh) -> None:
        pytest.fail("the router never became ready")

    assert await stage.run(body).run() == 1
    assert "decode-0 ended with status 3" in stage.progress.getvalue()
    assert "| cannot read the weights" in stage.progress.getvalue()
    kept = [path.name for path in _left(stage) if path.is_file()]
    assert kept == ["broker.log", "decode-0.log", "nats.log", "prefill-0.log", "router.log"]
    assert _processes_of(stage.temporary) == []


async def test_the_server_comes_back_at_its_address_with_what_it_kept(stage: _Stage) -> None:
    """NATS that is killed is started again: same port, same store."""

    async def create(bus: Bus) -> None:
        await (await bus.ensure_bucket(BucketConfig(name="KEPT"))).put("key", b"value")

    async def read(bus: Bus) -> None:
        entry = await (await bus.ensure_bucket(BucketConfig(name="KEPT"))).get("key")
        assert entry is not None
        assert entry.value == b"value"

    async def body(mesh: RunningMesh) -> None:
        await _all_up(mesh)
        await with_bus(mesh.nats_url, create, say=lambda _text: None)
        (server,) = [pid for pid in _processes_of(stage.temporary) if b"nats-server" in _command(pid)]
        os.kill(server, signal.SIGKILL)
        async with asyncio.timeout(20):
            await stage.progress.until("nats runs again")
        await with_bus(mesh.nats_url, read, say=lambda _text: None)

    assert await stage.run(body).run() == 0, stage.progress.getvalue()
    assert "nats was killed by signal 9; starting it again in 0.2 s" in stage.progress.getvalue()
    assert _left(stage) == []


async def test_a_signal_drains(stage: _Stage) -> None:
    """SIGTERM is how a mesh that serves ends: in order, with status 0."""

    async def body(mesh: RunningMesh) -> None:
        await _all_up(mesh)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    run = stage.run(body)
    assert await run.run() == 0, stage.progress.getvalue()
    assert run.interrupted
    assert stage.order.read_text(encoding="utf-8").split() == ["router", "prefill", "decode", "broker"]
    assert _left(stage) == []


async def test_the_end_of_a_terminal_drains_unless_that_is_ignored(stage: _Stage) -> None:
    """Whoever starts us may have had SIGHUP ignored, as `nohup` does: then the mesh serves on."""
    ignored = False

    async def body(mesh: RunningMesh) -> None:
        await _all_up(mesh)
        os.kill(os.getpid(), signal.SIGHUP)
        if ignored:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        else:
            await asyncio.Event().wait()

    before = signal.getsignal(signal.SIGHUP)
    try:
        for ignored in (False, True):
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
            run = stage.run(body)
            assert await run.run() == 0, stage.progress.getvalue()
            assert run.interrupted is not ignored
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_signal_before_the_mesh_is_ready_leaves_nothing(stage: _Stage) -> None:
    """Children that SIGTERM ends before they have a handler for it had nothing to drain: no failure, and no logs kept."""
    stage.play("router", _EARLY)

    async def body(_mesh: RunningMesh) -> None:
        pytest.fail("the router never became ready")

    run = stage.run(body)
    assert await run.run() == 0, stage.progress.getvalue()
    assert run.interrupted
    assert "did not drain" not in stage.progress.getvalue()
    assert _left(stage) == []


async def test_a_child_that_a_signal_ends_in_a_ready_mesh_did_not_drain(stage: _Stage) -> None:
    """Once the mesh serves, the end by SIGTERM is named, and the logs are kept."""
    stage.play("prefill", _HANDLERLESS)

    async def body(mesh: RunningMesh) -> None:
        await _all_up(mesh)

    assert await stage.run(body).run() == 1
    assert "prefill-0 did not drain: was killed by signal 15" in stage.progress.getvalue()
    assert "prefill-0.log" in [path.name for path in _left(stage)]


async def test_a_second_signal_kills(stage: _Stage) -> None:
    """Whoever presses Ctrl-C twice does not wait for a service that does not drain."""
    stage.play("prefill", _IMPATIENT)

    async def body(mesh: RunningMesh) -> None:
        await _all_up(mesh)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    assert await stage.run(body).run() == 1
    assert "killing what still runs" in stage.progress.getvalue()
    assert _processes_of(stage.temporary) == []


async def test_a_port_in_use_is_told_before_anything_starts(stage: _Stage) -> None:
    """The rule is named, and no service has been started."""

    async def handle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def body(_mesh: RunningMesh) -> None:
        pytest.fail("nothing can start")

    async with await asyncio.start_server(handle, "127.0.0.1", stage.port):
        assert not is_free("127.0.0.1", stage.port)
        assert await stage.run(body).run() == 1
    rule = f"port: {stage.port} is taken on 127.0.0.1: give another one with --port"
    assert stage.progress.getvalue() == f"pdmesh: {rule}\n"
    assert not stage.order.exists()
    assert _left(stage) == []


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_a_router_is_reached_where_it_listens(host: str, url: str) -> None:
    """On every address: at the loopback one of the same kind; an IPv6 address stands in brackets."""
    assert url_of(host, 80) == url


async def test_a_port_is_free_where_a_server_could_listen() -> None:
    """On every address of IPv6, too, beside a server of IPv4: asyncio's servers there leave that to others."""

    async def handle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def can_listen(host: str) -> bool:
        try:
            async with await asyncio.start_server(handle, host, port):
                return True
        except OSError:
            return False

    async with await asyncio.start_server(handle, "0.0.0.0", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert not await can_listen("127.0.0.1")
        for host in ("127.0.0.1", "::"):
            assert is_free(host, port) is await can_listen(host)


def test_the_announcement_can_be_pasted() -> None:
    """It names the URL, a request, and where the events are, but no password."""
    mesh = RunningMesh(url="http://127.0.0.1:8000", nats_url="nats://me:word@host:4222", workers=(), logs=Path("/logs"))
    text = announcement(mesh, "tiny", called_as(["/a place/bin/pdmesh"]))
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in text
    assert "nats --server nats://host:4222 sub 'pd.v1.ev.>'" in text
    assert "nats --server nats://host:4222 kv get PD_LEASES broker.0" in text
    assert "nats --server nats://host:4222 kv watch PD_LINKS" in text
    assert "  '/a place/bin/pdmesh' timeline ID --nats nats://host:4222" in text
    assert "  '/a place/bin/pdmesh' handoff ID --nats nats://host:4222" in text
    assert "word" not in text


def test_a_module_is_called_again_as_a_module() -> None:
    """`python -m services.launcher` has the path of its file as its name, which cannot be run."""
    assert called_as(["/x/services/launcher/__main__.py"]).endswith(" -m services.launcher")
