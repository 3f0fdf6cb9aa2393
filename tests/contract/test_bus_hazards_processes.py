"""Hazards that end processes, or are told by their end: a client that is closed for good, and a peer that was killed.

Which hazard is tested where: see the table in `test_bus_hazards.py`.
"""

import asyncio
import itertools
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.bus.errors import BusError, NoResponders
from common.bus.port import Bus
from common.bus.server import NatsServer
from contracts import subjects
from contracts.codec import decode, encode
from contracts.requests import Ping, Pong
from contracts.subjects import BrokerVerb
from tests.contract.bus_proxy import proxied
from tests.contract.bus_world import PATIENCE_S, open_nats, soon

ROOT = Path(__file__).resolve().parents[2]
_partitions = itertools.count(700)


@asynccontextmanager
async def broker_process(url: str, partition: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a broker as users do; whatever happens, it is gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.broker", "--set", f"nats_url={url}", "--set", f"partition={partition}"),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until_it_answers(bus: Bus, ping: str) -> Pong:
    """Ask the broker until it is there."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return decode((await bus.request(ping, encode(Ping()), timeout=1.0)).data, Pong)
            except BusError:
                await asyncio.sleep(0.05)


async def test_a_service_whose_connection_is_closed_for_good_ends_with_an_error(nats_server: NatsServer) -> None:
    """Hazard 5: the library gives up on a protocol error and never comes back. The process says why, and exits with 1."""
    partition = next(_partitions)
    async with (
        proxied(nats_server.url) as line,
        open_nats(nats_server.url) as bus,
        broker_process(line.url, partition) as process,
    ):
        await until_it_answers(bus, subjects.broker_rpc(BrokerVerb.PING, partition))
        assert line.tell_clients(b"-ERR 'Invalid Client Protocol'\r\n") == 1
        _, log = await soon(process.communicate())
        assert process.returncode == 1
        assert b"ended for good" in log
        assert b"invalid client protocol" in log.lower()


async def test_a_killed_peer_is_told_by_the_lack_of_responders(nats_server: NatsServer) -> None:
    """Hazard 15: no timeout is waited for once the server has seen the process go."""
    partition = next(_partitions)  # of its own: nobody has to wait for the lease of a broker that was ended by force
    ping = subjects.broker_rpc(BrokerVerb.PING, partition)
    async with open_nats(nats_server.url) as bus, broker_process(nats_server.url, partition) as process:
        await until_it_answers(bus, ping)
        process.kill()
        await soon(process.wait())

        async def until_nobody_responds() -> None:
            while True:
                try:
                    await bus.request(ping, encode(Ping()), timeout=0.5)  # the server may not have seen it yet
                except NoResponders:
                    return
                except BusError:
                    continue

        await soon(until_nobody_responds())
        with pytest.raises(NoResponders):
            await soon(bus.request(ping, encode(Ping()), timeout=3600))


def test_every_service_ends_when_its_connection_is_closed_for_good() -> None:
    """Hazard 5: each root that connects a service hands over what ends the process."""
    roots = [ROOT / "services" / "broker", ROOT / "services" / "router", ROOT / "common" / "worker"]
    for root in roots:
        text = (root / "app.py").read_text()
        assert "await connect_for_life(" in text, root
        assert "NatsBus.connect(" not in text, root
    text = (ROOT / "common" / "bus" / "service_bus.py").read_text()
    (call,) = re.findall(r"NatsBus\.connect\((.*?)\n    \)", text, re.DOTALL)
    assert "on_closed=lifecycle.fail" in call
