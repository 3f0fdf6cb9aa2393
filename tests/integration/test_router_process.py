"""The router as a process on a real NATS server."""

import asyncio
import signal
import sys
from pathlib import Path

import aiohttp
import structlog

from common.bus.nats import NatsBus
from common.bus.server import NatsServer
from common.runtime.clock import SystemClock
from tests.integration.router_world import ANSWER, PATIENCE_S, Mesh, linked_pair, write_model


async def _until_ready(process: asyncio.subprocess.Process, session: aiohttp.ClientSession) -> str:
    """Read the log until the router tells its port, then ask it until it is ready. Return its address."""
    assert process.stderr is not None
    async for line in process.stderr:
        if b"router_listening" in line:
            port = int(line.split(b'"port":')[1].split(b",")[0].strip(b"}\n"))
            break
    url = f"http://127.0.0.1:{port}"
    while True:
        async with session.get(f"{url}/ready") as response:
            if response.status == 200:
                return url


async def test_it_serves_over_nats_and_drains_on_sigterm(tmp_path: Path) -> None:
    """A request is answered over a real bus; SIGTERM ends the process with status 0."""
    clock = SystemClock()
    settings = ["--set", f"model={write_model(tmp_path / 'tiny')}", "--set", "port=0"]
    with NatsServer(tmp_path / "nats") as server:
        async with asyncio.TaskGroup() as group, aiohttp.ClientSession() as session:
            bus = await NatsBus.connect(server.url, name="mesh", tasks=group, clock=clock, log=structlog.get_logger())
            mesh = Mesh(bus, group)
            await mesh.open(linked_pair())
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "services.router", *settings, "--set", f"nats_url={server.url}"),
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                async with asyncio.timeout(PATIENCE_S):
                    url = await _until_ready(process, session)
                    body = {"model": "tiny", "prompt": "hello"}
                    async with session.post(f"{url}/v1/completions", json=body) as response:
                        assert (await response.json())["choices"][0]["text"] == ANSWER
                    process.send_signal(signal.SIGTERM)
                    await process.communicate()
                    assert process.returncode == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.communicate()
            mesh.close()
            await bus.close()


async def test_bad_settings_end_it_with_status_2(tmp_path: Path) -> None:
    """All problems are told at once, before anything is opened."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.router", "--set", f"model={tmp_path}", "--set", "port=x", "--set", "no_such_key=1"),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        _, text = await process.communicate()
    assert process.returncode == 2
    assert b"port = x" in text
    assert b"no_such_key" in text


async def test_a_model_that_cannot_be_read_ends_it_with_status_2(tmp_path: Path) -> None:
    """It is a setting, too."""
    with NatsServer(tmp_path / "nats") as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "services.router", "--set", f"model={tmp_path}", "--set", f"nats_url={server.url}"),
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(PATIENCE_S):
            _, text = await process.communicate()
    assert process.returncode == 2
    assert b"config.json is not there" in text
