"""A worker process tells whether work should be sent to it, and whether it should be started anew: two questions."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import aiohttp

from common.bus.server import NatsServer

PATIENCE_S = 60


async def test_a_worker_that_lost_its_bus_is_alive_but_not_ready(tmp_path: Path) -> None:
    """Without NATS, /ready names the bus and /health stays well; when NATS is back, both are well again."""
    with NatsServer(tmp_path / "nats") as server:
        settings = {"worker_id": "decode-0", "model": str(tmp_path), "engine": "fake", "nats_url": server.url}
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.decode", ",".join(f"{key}={value}" for key, value in settings.items())),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
                assert worker.stderr is not None
                async for line in worker.stderr:
                    opened = json.loads(line)
                    if opened["event"] == "admin_port_opened":
                        break
                url = f"http://127.0.0.1:{opened['port']}"

                async def until(status: int) -> dict[str, object]:
                    while True:
                        async with session.get(f"{url}/ready") as answer:
                            if answer.status == status:
                                return dict(await answer.json())

                assert await until(200) == {"state": "ready", "failing": []}
                await asyncio.to_thread(server.kill)
                assert await until(503) == {"state": "not_ready", "failing": ["bus_connected"]}
                async with session.get(f"{url}/health") as answer:
                    assert answer.status == 200
                await asyncio.to_thread(server.start)
                assert await until(200) == {"state": "ready", "failing": []}
                worker.send_signal(signal.SIGTERM)
                await worker.communicate()
                assert worker.returncode == 0
        finally:
            if worker.returncode is None:
                worker.kill()
                await worker.communicate()
