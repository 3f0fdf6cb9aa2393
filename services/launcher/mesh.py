"""A running mesh: the NATS server and the services of a plan, from the first start to the last trace removed."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from common.bus.server import check_version, find_server, forget_indexes
from common.runtime.clock import Clock
from contracts.errors import ErrorCode, PdmeshError
from services.launcher.child import Child, ChildSpec
from services.launcher.console import Console
from services.launcher.core.log_line import last_word
from services.launcher.plan import MeshPlan, ServicePlan, makes_transport_dir, settings_json
from services.launcher.ports import free_ports, is_free, url_of
from services.launcher.readiness import wait_ready
from services.launcher.rundir import RunDirectory
from services.launcher.supervisor import Supervisor

EXIT_CLEAN: Final = 0
EXIT_FAILED: Final = 1

_STAGES: Final = {"router": 0, "mixed": 1, "prefill": 1, "decode": 2, "broker": 3, "nats": 4}
_DRAIN_GRACE_S: Final = 5.0
_NATS_START_S: Final = 10.0


class RunningMesh(msgspec.Struct, frozen=True, kw_only=True):
    """Where a mesh that is ready can be reached."""

    url: str
    nats_url: str
    workers: tuple[str, ...]
    logs: Path


Body = Callable[[RunningMesh], Awaitable[None]]


class MeshRun:
    """One life of a mesh. `body` runs once it is ready; the mesh is stopped when `body` returns, fails or is interrupted.

    A service is started as `python -m PACKAGE.ROLE --config FILE`.
    """

    def __init__(
        self,
        plan: MeshPlan,
        body: Body,
        *,
        clock: Clock,
        console: Console,
        environ: Mapping[str, str],
        package: str = "services",
    ) -> None:
        self._plan = plan
        self._body = body
        self._clock = clock
        self._console = console
        self._environ = environ
        self._package = package
        self._work: asyncio.Task[None] | None = None
        self._supervisor: Supervisor | None = None
        self._failure: PdmeshError | None = None
        self.interrupted = False

    async def run(self) -> int:
        """Live it; return 0 if nothing failed and every child drained by itself, or had not come so far yet, else 1.

        The first SIGINT, SIGTERM or SIGHUP drains, the second kills. SIGHUP that is ignored, as under `nohup`, stays so.
        """
        directory = RunDirectory()
        signals = _signals()
        loop = asyncio.get_running_loop()
        drained = False
        try:
            async with asyncio.TaskGroup() as group:
                supervisor = self._supervisor = Supervisor(
                    group,
                    self._fail,
                    clock=self._clock,
                    say=self._console.say,
                    restarts_per_minute=self._plan.launcher.restarts_per_minute,
                )
                self._work = group.create_task(self._live(supervisor, directory), name="mesh")
                for number in signals:
                    loop.add_signal_handler(number, self._signalled)
                try:
                    await asyncio.wait({self._work})
                finally:
                    if supervisor.children:
                        self._console.say("stopping")
                    drained = await supervisor.stop(self._console.say)
                    for number in signals:
                        loop.remove_signal_handler(number)
        finally:
            good = drained and self._failure is None
            kept = not good and (bool(self._plan.launcher.log_dir) or any(directory.logs.iterdir()))
            directory.remove(keep_logs=kept and not self._plan.launcher.log_dir)
        if kept:
            self._console.say(f"logs: {self._logs(directory)}")
        return EXIT_CLEAN if good else EXIT_FAILED

    def _fail(self, error: PdmeshError) -> None:
        """Keep the first failure, and end the work."""
        if self._failure is None and not self.interrupted:
            self._failure = error
            if self._supervisor is not None and self._supervisor.children:
                self._console.say(f"failed: {error}")
            else:
                self._console.refuse(str(error))
        if self._work is not None:
            self._work.cancel()

    def _signalled(self) -> None:
        if self.interrupted and self._supervisor is not None:
            self._console.say("killing what still runs")
            self._supervisor.hurry()
        self.interrupted = True
        if self._work is not None:
            self._work.cancel()

    async def _live(self, supervisor: Supervisor, directory: RunDirectory) -> None:
        try:
            await self._body(await self._start(supervisor, directory))
        except PdmeshError as error:
            self._fail(error)
        except OSError as error:
            self._fail(PdmeshError(f"{type(error).__name__}: {error}"))

    async def _start(self, supervisor: Supervisor, directory: RunDirectory) -> RunningMesh:
        router = self._plan.router.settings.value
        if not is_free(router.host, router.port):
            raise PdmeshError(f"port: {router.port} is taken on {router.host}: give another one with --port")
        logs = self._logs(directory)
        logs.mkdir(parents=True, exist_ok=True)
        nats_url = self._plan.launcher.nats_url or await self._start_nats(supervisor, directory)
        for service in self._plan.services:
            await supervisor.start(self._child(service, directory, nats_url))
        names = tuple(worker.name for worker in self._plan.workers)
        started = ", ".join(service.name for service in self._plan.services)
        self._console.say(f"started {started}; logs: {logs}")
        url = url_of(router.host, router.port)
        await wait_ready(
            f"{url}/ready",
            who="the router",
            timeout_s=self._plan.launcher.start_timeout_s,
            clock=self._clock,
            say=self._console.say,
            detail=lambda: _last_words([child for child in supervisor.children if child.spec.name in names]),
        )
        supervisor.mark_ready()
        self._console.say("ready")
        return RunningMesh(url=url, nats_url=nats_url, workers=names, logs=logs)

    async def _start_nats(self, supervisor: Supervisor, directory: RunDirectory) -> str:
        """Start a server of our own, on the loopback interface, with its store in the run directory."""
        binary = find_server()
        await _check_server(binary)
        port, monitor = free_ports(2)
        port = self._plan.launcher.nats_port or port
        if not is_free("127.0.0.1", port):
            raise PdmeshError(f"nats_port: {port} is taken on 127.0.0.1: give another one, or 0 for a free one")
        options = ("-a", "127.0.0.1", "-p", str(port), "-m", str(monitor), "-js", "-sd", str(directory.path / "nats"))
        await supervisor.start(
            ChildSpec(
                name="nats",
                command=(str(binary), *options),
                environ=self._child_environ(directory),
                log=self._logs(directory) / "nats.log",
                stage=_STAGES["nats"],
                drain_s=_DRAIN_GRACE_S,
                role="nats",
                before_restart=partial(forget_indexes, directory.path / "nats"),
            )
        )
        health = f"http://127.0.0.1:{monitor}/healthz"
        await wait_ready(
            health, who="the NATS server", timeout_s=_NATS_START_S, clock=self._clock, say=lambda _text: None
        )
        return f"nats://127.0.0.1:{port}"

    def _child(self, service: ServicePlan, directory: RunDirectory, nats_url: str) -> ChildSpec:
        loaded = service.settings
        replaced: dict[str, Any] = {"nats_url": nats_url}
        if makes_transport_dir(service):
            replaced["transport_dir"] = directory.path / "tmp"
        file = directory.path / "settings" / f"{service.name}.json"
        file.touch(mode=0o600)
        file.write_bytes(settings_json(loaded.value, **replaced))
        return ChildSpec(
            name=service.name,
            command=(sys.executable, "-P", "-m", f"{self._package}.{service.role}", "--config", str(file)),
            environ=self._child_environ(directory),
            log=self._logs(directory) / f"{service.name}.log",
            stage=_STAGES[service.role],
            drain_s=float(loaded.value.drain_timeout_s) + _DRAIN_GRACE_S,
            role=service.role,
        )

    def _child_environ(self, directory: RunDirectory) -> dict[str, str]:
        """Our environment without the settings in it, which have been read: a child gets all of them in its file."""
        kept = {name: value for name, value in self._environ.items() if not name.startswith("PD_")}
        # Idle OpenMP threads that spin take the cores from the other processes of the mesh.
        quiet = {"OMP_WAIT_POLICY": "PASSIVE"}
        return quiet | kept | {"TMPDIR": str(directory.path / "tmp")}

    def _logs(self, directory: RunDirectory) -> Path:
        return Path(self._plan.launcher.log_dir) if self._plan.launcher.log_dir else directory.logs


def _signals() -> tuple[signal.Signals, ...]:
    """Those that end the mesh: whoever had SIGHUP ignored wants it to outlive its terminal."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


async def _check_server(binary: Path) -> None:
    """Refuse a NATS server that is too old for the bus adapter. Raises PdmeshError."""
    process = await asyncio.create_subprocess_exec(
        str(binary), "-v", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_NATS_START_S):
            version, _ = await process.communicate()
    except TimeoutError as error:
        with suppress(ProcessLookupError):
            process.kill()
        raise PdmeshError(f"{binary} -v does not end", code=ErrorCode.BUS_UNAVAILABLE) from error
    check_version(version.decode(errors="replace"))


def _last_words(workers: Sequence[Child]) -> str:
    """The last thing that each worker tells in its log, so that one sees it load."""
    words = ((worker.spec.name, last_word(worker.last_lines(1))) for worker in workers)
    return ", ".join(f"{name}: {word}" for name, word in words if word)
