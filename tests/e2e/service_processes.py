"""A mesh without a launcher: NATS and each service are processes that a test starts, stops and kills alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp

from common.bus.server import NatsServer
from common.runtime.clock import Deadline, SystemClock
from common.runtime.settings import environment
from services.launcher.ports import free_ports
from tests.e2e.proc import DEADLINE_S, descendants, state_of

MODEL: Final = Path(__file__).resolve().parents[2] / "models" / "tiny"
_POLL_S: Final = 0.1
_START_S: Final = 300.0


class Services:
    """Broker, router, prefill and decode worker on one NATS server; `settings` go by role, `environ` to the workers."""

    def __init__(
        self,
        server: NatsServer,
        directory: Path,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.server = server
        self.directory = directory
        self.logs = directory
        self.nats_url = server.url
        self.port, *admin_ports = free_ports(4)
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin_ports = dict(zip(("broker", "prefill", "decode"), admin_ports, strict=True))
        self._environ = dict(environ or {})
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        common = {"model": str(MODEL), "nats_url": server.url, "served_model_name": "tiny"}
        worker = common | {"transport_dir": str(directory / "s")}
        defaults: dict[str, dict[str, Any]] = {
            "broker": {"nats_url": server.url, "admin_port": self.admin_ports["broker"]},
            "router": common | {"port": self.port, "expected_workers": ["prefill-0", "decode-0"]},
            "prefill": worker | {"worker_id": "prefill-0", "tp": 2, "admin_port": self.admin_ports["prefill"]},
            "decode": worker | {"worker_id": "decode-0", "tp": 1, "admin_port": self.admin_ports["decode"]},
        }
        self._settings = {name: values | dict((settings or {}).get(name, {})) for name, values in defaults.items()}

    async def start(self, *names: str) -> None:
        """Start some of the services; all of them if none is named."""
        for name in names or ("broker", "decode", "prefill", "router"):
            file = self.directory / f"{name}.json"
            file.write_text(json.dumps(self._settings[name]), encoding="utf-8")
            planted = self._environ if name in {"prefill", "decode"} else {}
            with (self.directory / f"{name}.log").open("ab") as log:
                self._processes[name] = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", f"services.{name}", "--config", str(file)),
                    stdout=log,
                    stderr=log,
                    env={**environment(), **planted},
                )

    def pids(self) -> list[int]:
        """All processes of all services; those of NATS apart."""
        own = [process.pid for process in self._processes.values()]
        return own + [pid for parent in own for pid in descendants(parent)]

    def pids_of(self, name: str) -> list[int]:
        """The processes of one service, its own first."""
        process = self._processes[name]
        return [process.pid, *descendants(process.pid)]

    async def terminate(self, name: str) -> tuple[int, list[int]]:
        """Send SIGTERM; return the exit status and which of its processes still live."""
        process = self._processes[name]
        below = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        return await self.ended(name), [pid for pid in below if await _still_alive(pid)]

    async def ended(self, name: str) -> int:
        """Wait for the end of a service; its exit status."""
        async with asyncio.timeout(DEADLINE_S):
            status = await self._processes[name].wait()
        del self._processes[name]
        return status

    async def stop(self) -> None:
        """End what still runs, the workers before the broker that they report to."""
        for name in ("router", "prefill", "decode", "broker"):
            if name in self._processes:
                await self.terminate(name)

    def kill(self) -> None:
        """End what still runs, at once, ranks that stand still among them."""
        running = {name: process for name, process in self._processes.items() if process.returncode is None}
        below = [pid for process in running.values() for pid in descendants(process.pid)]
        for process in running.values():
            process.kill()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Wait until a request can pass."""
        clock = SystemClock()
        deadline = Deadline.after(clock, _START_S)
        lacking = "it does not answer"
        while True:
            try:
                async with session.get(f"{self.url}/ready") as response:
                    if response.status == 200:
                        return
                    lacking = await response.text()
            except aiohttp.ClientError:
                pass
            assert not deadline.passed, lacking
            await clock.sleep(_POLL_S)


@asynccontextmanager
async def running_services(
    directory: Path,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[Services]:
    """Start NATS and all services; end them in the end."""
    server = NatsServer(directory / "nats")
    await asyncio.to_thread(server.start)
    services = Services(server, directory, settings, environ)
    try:
        await services.start()
        yield services
        await services.stop()
    finally:
        services.kill()
        await asyncio.to_thread(server.stop)


async def _still_alive(pid: int) -> bool:
    """Whether a process lives on after its parent's end; ranks see the end of their socket, then leave by themselves."""
    clock = SystemClock()
    deadline = Deadline.after(clock, DEADLINE_S)
    while state_of(pid) not in {"", "Z"}:
        if deadline.passed:
            return True
        await clock.sleep(0.05)
    return False
