"""Three real NATS servers that keep everything together, each of which can be killed and started again."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from common.bus.server import NatsServer
from common.runtime.clock import Deadline, SystemClock
from services.launcher.ports import free_ports

_START_S = 60.0
_LEADER_S = 30.0
_POLL_S = 0.1

_CONFIG = """
server_name: {name}
cluster {{
  name: pdmesh
  listen: "127.0.0.1:{port}"
  routes: [{routes}]
}}
"""


class NatsCluster:
    """Servers by name."""

    def __init__(self, servers: dict[str, NatsServer]) -> None:
        self.servers = servers

    @property
    def url(self) -> str:
        """What clients are given: all of them."""
        return ",".join(server.url for server in self.servers.values())

    async def stream_leader(self, stream: str) -> str:
        """Who leads one stream now."""
        return await self._leader("jsz?streams=true", lambda found: _stream_leader(found, stream))

    async def meta_leader(self) -> str:
        """Who decides where streams are kept."""
        return await self._leader("jsz", lambda found: str(found.get("meta_cluster", {}).get("leader", "")))

    async def kept(self, stream: str) -> tuple[int, float]:
        """How many servers keep a stream, and for how many seconds each message."""
        for server in self.servers.values():
            found = await asyncio.to_thread(_ask, f"{server.monitor_url}/jsz?streams=true&config=true")
            for each in _streams(found):
                if each["name"] == stream:
                    config = each["config"]
                    return int(config["num_replicas"]), float(config["max_age"]) / 1e9
        raise AssertionError(f"no server keeps {stream}")

    async def kill(self, name: str) -> None:
        """End a server as a crash would."""
        await asyncio.to_thread(self.servers[name].kill)

    async def start(self, name: str) -> None:
        """Start it again with what it had kept; returns once it has caught up with the others."""
        await asyncio.to_thread(self.servers[name].start, _START_S)

    async def _leader(self, path: str, pick: Any) -> str:
        clock = SystemClock()
        deadline = Deadline.after(clock, _LEADER_S)
        while True:
            for server in self.servers.values():
                if server.is_running and (name := pick(await asyncio.to_thread(_ask, f"{server.monitor_url}/{path}"))):
                    leader = str(name)
                    if self.servers[leader].is_running:
                        return leader
            assert not deadline.passed, "nobody leads"
            await clock.sleep(_POLL_S)


@asynccontextmanager
async def nats_cluster(folder: Path, num_servers: int = 3) -> AsyncIterator[NatsCluster]:
    """Start them together: none is healthy before most of them have met."""
    ports = free_ports(num_servers)
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    servers = {}
    for number, port in enumerate(ports):
        name = f"n{number}"
        (folder / name).mkdir()
        config = _CONFIG.format(name=name, port=port, routes=routes)
        servers[name] = NatsServer(folder / name, config=config)
    try:
        async with asyncio.TaskGroup() as group:
            for name, server in servers.items():
                group.create_task(asyncio.to_thread(server.start, _START_S), name=name)
        yield NatsCluster(servers)
    finally:
        for server in servers.values():
            await asyncio.to_thread(server.kill)


def _stream_leader(found: dict[str, Any], stream: str) -> str:
    leaders = (each.get("cluster", {}).get("leader", "") for each in _streams(found) if each["name"] == stream)
    return str(next(leaders, ""))


def _streams(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for account in found.get("account_details", ()) for each in account.get("stream_detail", ())]


def _ask(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 - the URL is our own
            return dict(json.load(response))
    except OSError:
        return {}
