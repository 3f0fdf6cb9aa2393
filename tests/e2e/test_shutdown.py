"""SIGTERM to each service in turn, with a request under way: the answer is whole, the exit clean, nothing is left, it can come back."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from common.bus.server import NatsServer
from common.runtime.clock import Deadline, SystemClock
from services.launcher.ports import free_ports
from tests.e2e.conftest import MODEL
from tests.e2e.mesh_probe import DEADLINE_S, descendants

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 400


class Services:
    """A mesh without a launcher: each service is a process that this test starts and stops alone."""

    def __init__(self, nats_url: str, directory: Path) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        common = {"model": str(MODEL), "nats_url": nats_url}
        worker = common | {"transport_dir": str(directory / "s"), "served_model_name": "tiny"}
        self._settings: dict[str, dict[str, str]] = {
            "broker": {"nats_url": nats_url},
            "router": common | {"port": str(self.port), "served_model_name": "tiny"},
            "prefill": worker | {"worker_id": "prefill-0", "tp": "2"},
            "decode": worker | {"worker_id": "decode-0", "tp": "1"},
        }

    async def start(self, name: str) -> None:
        """Start one service."""
        spec = ",".join(f"{key}={value}" for key, value in self._settings[name].items())
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", f"services.{name}", spec, stdout=log, stderr=log
            )

    async def terminate(self, name: str) -> tuple[int, list[int]]:
        """Send SIGTERM; return the exit status and which of its processes still live."""
        process = self._processes.pop(name)
        below = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            status = await process.wait()
        return status, [pid for pid in below if await _still_alive(pid)]

    async def stop(self) -> None:
        """End what still runs."""
        for name in tuple(self._processes):
            await self.terminate(name)

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Wait until a request can pass."""
        clock = SystemClock()
        deadline = Deadline.after(clock, DEADLINE_S)
        while True:
            try:
                async with session.get(f"{self.url}/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            assert not deadline.passed
            await clock.sleep(0.2)


async def _still_alive(pid: int) -> bool:
    """Whether a process lives on after its parent's end; ranks see the end of their socket, then leave by themselves."""
    clock = SystemClock()
    deadline = Deadline.after(clock, DEADLINE_S)
    while _state(pid) not in {"", "Z"}:
        if deadline.passed:
            return True
        await clock.sleep(0.05)
    return False


def _state(pid: int) -> str:
    """The kernel's letter for a process: Z has ended and waits for init to notice; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """NATS, broker, router, a prefill and a decode worker."""
    directory = tmp_path_factory.mktemp("services")
    server = NatsServer(directory / "nats")
    await asyncio.to_thread(server.start)
    services = Services(server.url, directory)
    try:
        for name in ("broker", "decode", "prefill", "router"):
            await services.start(name)
        yield services
        await services.stop()
    finally:
        await asyncio.to_thread(server.stop)


async def _stream(session: aiohttp.ClientSession, url: str, began: asyncio.Event) -> int:
    """Read one long stream to its end; the number of its tokens."""
    prompt = [60 + number % 900 for number in range(500)]
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    body |= {"return_token_ids": True}
    tokens, last = 0, b""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                tokens += len(json.loads(line[6:])["choices"][0]["token_ids"])
                began.set()
            last = line.strip() or last
    assert last == b"data: [DONE]"
    return tokens


@pytest.mark.parametrize("name", ["decode", "prefill", "router", "broker"])
async def test_a_terminated_service_finishes_its_work_and_leaves_nothing(services: Services, name: str) -> None:
    """The stream under way comes to its end; status 0; none of its rank processes, sockets or memory is left; it comes back."""
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await services.ready(session)
        sockets = services._directory / "s"
        before = _entries(sockets)
        began = asyncio.Event()
        stream = asyncio.get_running_loop().create_task(_stream(session, services.url, began))
        async with asyncio.timeout(DEADLINE_S):
            await began.wait()
        status, left = await services.terminate(name)
        assert await stream == NUM_TOKENS
        assert (status, left) == (0, [])
        assert not {entry for entry in before & _entries(sockets) if name in entry}
        await services.start(name)
        await services.ready(session)
        began.clear()
        assert await _stream(session, services.url, began) == NUM_TOKENS
