"""Hazards of a connection to NATS: outages, freezes, what is in flight, and a loop that is blocked.

Which hazard is tested where: see the table in `test_bus_hazards.py`.
"""

import asyncio
import itertools
import json
import socket
import urllib.request
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlsplit

import msgspec
import pytest

from common.bus import nats_connection
from common.bus.errors import BusTimeout, BusUnavailable
from common.bus.measurement import BusMetrics
from common.bus.nats import NatsBus
from common.bus.rpc import RpcEdge
from common.bus.server import NatsServer
from common.runtime.clock import SystemClock
from common.runtime.metrics import Metrics
from contracts.codec import decode
from contracts.requests import Accepted
from tests.contract.bus_world import PATIENCE_S, NatsWorld, World, answer, soon, unique, until, value_of

PIECE = bytes(64 * 1024)
_partitions = itertools.count(100)


def sample(metrics: Metrics, name: str) -> float:
    """Return the value of a metric without labels."""
    for line in metrics.exposition().decode().splitlines():
        if line.startswith(f"{name} "):
            return float(line.split(" ")[1])
    raise AssertionError(f"there is no {name}")


# --- hazard 1: callbacks ----------------------------------------------------------------------------------------------


async def test_a_reader_that_is_cancelled_does_not_end_its_subscription(world: World) -> None:
    """A CancelledError that leaves the one who takes messages is his end alone: the next one takes on."""
    subject = unique("pd.cancelled")
    async with world.open() as bus:
        subscription = await bus.subscribe(subject)

        async def take_one_and_end() -> None:
            async for _ in subscription:
                raise asyncio.CancelledError

        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(take_one_and_end(), name="reader")
            await bus.publish(subject, b"1")
            await until(lambda: value_of(reader.done()))
        assert reader.cancelled()
        await bus.publish(subject, b"2")
        assert (await soon(anext(subscription))).data == b"2"


async def test_handlers_hold_up_neither_each_other_nor_their_subscription(world: World) -> None:
    """One handler waits for a later request, another one is cancelled: everybody else is answered all the same."""
    partition = next(_partitions)
    root = f"pd.v1.rpc.broker.{partition}"
    later = asyncio.Event()

    async def wait(_data: bytes) -> msgspec.Struct:
        await later.wait()
        return Accepted(handoff_id="waited")

    async def release(_data: bytes) -> msgspec.Struct:
        later.set()
        return Accepted(handoff_id="released")

    async def cancelled(_data: bytes) -> msgspec.Struct:
        raise asyncio.CancelledError

    async with world.open() as bus, asyncio.TaskGroup() as tasks:
        edge = RpcEdge(bus, tasks, Mock())
        handlers = {"wait": wait, "release": release, "cancelled": cancelled}
        reading = tasks.create_task((await edge.serve(f"{root}.*", handlers))(), name="rpc")
        waiting = tasks.create_task(bus.request(f"{root}.wait", b"", timeout=PATIENCE_S), name="wait")
        with pytest.raises(BusTimeout):
            await bus.request(f"{root}.cancelled", b"", timeout=0.05)
        released = await bus.request(f"{root}.release", b"", timeout=PATIENCE_S)
        assert decode(released.data, Accepted).handoff_id == "released"
        assert decode((await waiting).data, Accepted).handoff_id == "waited"
        reading.cancel()


# --- hazards 3, 4, 5: outages -----------------------------------------------------------------------------------------


async def test_no_message_of_an_outage_arrives_late_or_is_lost_unnoticed(breakable: World) -> None:
    """A server killed while one publishes: what failed never arrives, what vanished lies before a counted reconnect."""
    async with breakable.open() as bus, breakable.open() as other, asyncio.TaskGroup() as tasks:
        subscription = await other.subscribe("pd.numbers")
        received: list[int] = []
        sent: list[int] = []
        refused: list[int] = []

        async def receive() -> None:
            async for message in subscription:
                received.append(int(message.data))  # noqa: PERF401 - it is looked at while it grows

        async def publish(number: int) -> None:
            try:
                await bus.publish("pd.numbers", str(number).encode())
            except BusUnavailable:
                refused.append(number)
            else:
                sent.append(number)

        receiving = tasks.create_task(receive(), name="receive")
        numbers = itertools.count()
        for _ in range(100):
            await publish(next(numbers))
        down = tasks.create_task(breakable.go_down(), name="down")
        async with asyncio.timeout(PATIENCE_S):
            while not down.done() or bus.is_connected:
                await publish(next(numbers))
                await asyncio.sleep(0)
        during = list(itertools.islice(numbers, 100))
        for number in during:
            await publish(number)
        await breakable.come_back()
        await soon(bus.reconnected(0))
        await soon(other.reconnected(0))
        after = list(itertools.islice(numbers, 50))
        for number in after:
            await publish(number)
        await until(lambda: value_of(after[-1] in received))
        receiving.cancel()
        assert received == sorted(set(received) & set(sent))
        assert set(received) & set(during) == set()
        assert received[-len(after) :] == after
        assert set(during) <= set(refused)
        assert bus.reconnects == 1


async def test_what_a_lost_connection_had_not_sent_yet_is_dropped_and_counted(own_nats_server: NatsServer) -> None:
    """Messages pile up before a frozen server, and it dies: they do not come after the restart, and are counted."""
    world, metrics = NatsWorld(own_nats_server), Metrics()
    async with world.open(BusMetrics(metrics)) as bus, world.open() as other:
        subscription = await other.subscribe("pd.piled")
        await world.freeze()
        for _ in range(100):
            await bus.publish("pd.piled", PIECE)
            await asyncio.sleep(0)  # what the socket takes is gone; what it does not take waits in the library
        await world.go_down()
        await until(lambda: value_of(not bus.is_connected))
        await world.come_back()
        await soon(bus.reconnected(0))
        await soon(other.reconnected(0))
        await bus.publish("pd.piled", b"new")
        assert (await soon(anext(subscription))).data == b"new"
        assert sample(metrics, "pdmesh_bus_publishes_lost_total") > 0
        assert sample(metrics, "pdmesh_bus_disconnects_total") == 1
        assert sample(metrics, "pdmesh_bus_reconnects_total") == 1


async def test_the_connection_outlives_more_tries_than_the_library_would_make(
    own_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the client gives up for good after 60 tries; ours comes back after an outage of more."""
    monkeypatch.setattr(nats_connection, "_RECONNECT_WAIT_S", 0.001)
    monkeypatch.setattr(nats_connection, "_RECONNECT_JITTER_MS", 1)
    told = Mock()
    async with asyncio.TaskGroup() as tasks:
        bus = await NatsBus.connect(
            own_nats_server.url, name="test", tasks=tasks, clock=SystemClock(), log=Mock(), on_closed=told
        )
        await asyncio.to_thread(own_nats_server.kill)
        (tried,) = bus._connection.client._server_pool
        await until(lambda: value_of(tried.reconnects > 70))
        await asyncio.to_thread(own_nats_server.start)
        assert await soon(bus.reconnected(0)) == 1
        await bus.close()
    told.assert_not_called()


async def test_a_server_that_stands_still_counts_as_lost_and_comes_back(
    own_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unanswered pings end the connection: calls fail at once, not by timeout; after the thaw everything works again."""
    monkeypatch.setattr(nats_connection, "PING_EVERY_S", 0.1)
    world = NatsWorld(own_nats_server)
    async with world.open() as bus, world.open() as other:
        serving = await answer(other, "pd.rpc", b"re:")
        await world.freeze()
        await until(lambda: value_of(not bus.is_connected and not other.is_connected))
        with pytest.raises(BusUnavailable) as caught:
            await soon(bus.request("pd.rpc", b"", timeout=3600))
        assert not caught.value.maybe_done
        await world.thaw()
        await soon(bus.reconnected(0))
        await soon(other.reconnected(0))
        assert (await soon(bus.request("pd.rpc", b"1"))).data == b"re:1"
    await soon(serving)


# --- hazard 6: subscriptions ------------------------------------------------------------------------------------------


async def test_whoever_has_subscribed_is_reachable_for_everybody(world: World) -> None:
    """`subscribe` returns when the server knows of it: the first request over another connection never meets nobody."""
    async with world.open() as bus, world.open() as other:
        for number in range(100):
            subject = unique("pd.ready")
            serving = await answer(bus, subject, b"re:")
            assert (await soon(other.request(subject, str(number).encode()))).data == f"re:{number}".encode()
            serving.cancel()


async def test_whoever_waits_for_the_server_can_be_cancelled(world: World) -> None:
    """The library swallows a cancellation at some points: at whichever moment it comes, ours ends the task."""
    async with world.open() as bus, asyncio.TaskGroup() as tasks:
        num_cancelled = 0
        for num_turns in range(12):
            for name, call in (("flush", bus.flush()), ("subscribe", bus.subscribe(unique("pd.cancelled")))):
                task: asyncio.Task[object] = tasks.create_task(call, name=name)
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                was_done = task.done()
                task.cancel()
                await soon(asyncio.wait([task]))
                assert task.cancelled() or was_done
                num_cancelled += task.cancelled()
        assert num_cancelled > 0
        await soon(bus.flush())


# --- hazard 9: a blocked loop -----------------------------------------------------------------------------------------


def flood(url: str, subject: str, count: int) -> None:
    """Publish pieces from outside of any event loop, and return when the server has taken them all."""
    address = urlsplit(url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 0), timeout=PATIENCE_S) as connection:
        connection.sendall(b'CONNECT {"verbose":false}\r\n')
        command = f"PUB {subject} {len(PIECE)}\r\n".encode() + PIECE + b"\r\n"
        for _ in range(count):
            connection.sendall(command)
        connection.sendall(b"PING\r\n")
        heard = b""
        while b"PONG" not in heard:
            heard += connection.recv(65536)


async def test_a_blocked_loop_is_cut_off_by_the_server_seen_and_counted(tmp_path: Path) -> None:
    """The server throws out who reads nothing: that shows as a reconnect and in the metrics, and later messages come."""
    metrics = Metrics()
    with NatsServer(tmp_path / "nats", config="max_pending: 1MB") as server:
        async with NatsWorld(server).open(BusMetrics(metrics)) as bus:
            subscription = await bus.subscribe("pd.flood")
            flood(server.url, "pd.flood", 400)  # blocks the loop
            assert await soon(bus.reconnected(0)) == 1
            assert sample(metrics, "pdmesh_bus_disconnects_total") == 1
            assert sample(metrics, "pdmesh_bus_reconnects_total") == 1
            assert await asyncio.to_thread(num_slow_consumers, server) == 1
            await bus.publish("pd.flood", b"after")
            async with asyncio.timeout(PATIENCE_S):
                num_before = 0
                while (await anext(subscription)).data != b"after":
                    num_before += 1
            assert num_before < 400


def num_slow_consumers(server: NatsServer) -> int:
    """Ask the server how many clients it has thrown out for being slow."""
    with urllib.request.urlopen(f"{server.monitor_url}/varz", timeout=PATIENCE_S) as response:  # noqa: S310 - http, ours
        return int(json.loads(response.read())["slow_consumers"])


async def test_a_slow_reader_costs_only_itself_and_is_counted(world: World) -> None:
    """Messages over `max_pending` are dropped at the reader's own queue: the count says how many."""
    metrics, subject = Metrics(), unique("pd.slow")
    async with world.open(BusMetrics(metrics)) as bus:
        slow = await bus.subscribe(subject, max_pending=3)
        quick = await bus.subscribe(subject)
        for number in range(10):
            await bus.publish(subject, str(number).encode())
        assert [int((await soon(anext(quick))).data) for _ in range(10)] == list(range(10))
        assert slow.dropped == 7
        assert sample(metrics, "pdmesh_bus_slow_consumer_drops_total") == 7
        assert bus.reconnects == 0
