"""What a bus tells about itself as metrics."""

import asyncio

import pytest

from common.bus.errors import BusTimeout, BusUnavailable, NoResponders
from common.bus.measurement import BusMetrics
from common.bus.memory import MemoryServer
from common.bus.observer import NoObserver, RequestKind, RequestOutcome
from common.runtime.metrics import Metrics
from common.runtime.virtual_time import VirtualClock, run_virtual


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample of the bus that is not zero."""
    lines = [line.rpartition(" ") for line in metrics.exposition().decode().splitlines()]
    values = {name: float(value) for name, _, value in lines if name.startswith("pdmesh_bus_")}
    return {name: value for name, value in values.items() if value and "_created" not in name and "_bucket" not in name}


def requests(outcome: RequestOutcome) -> str:
    """The count of requests to peers that ended so."""
    return f'pdmesh_bus_request_seconds_count{{kind="peer",outcome="{outcome}"}}'


def seconds(outcome: RequestOutcome) -> str:
    """The time that they took."""
    return f'pdmesh_bus_request_seconds_sum{{kind="peer",outcome="{outcome}"}}'


def test_requests_are_counted_by_their_outcome_and_timed() -> None:
    """Answered, unanswered, to nobody, without a connection, and given up: each ends in its own count."""

    async def main(clock: VirtualClock) -> None:
        metrics = Metrics()
        server = MemoryServer(clock)
        bus = server.connect(BusMetrics(metrics))
        mute = await bus.subscribe("pd.mute")
        answering = await bus.subscribe("pd.rpc")

        async def serve() -> None:
            async for message in answering:
                await clock.sleep(2.0)
                await message.respond(b"")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(), name="serve")
            await bus.request("pd.rpc", b"", timeout=5.0)
            with pytest.raises(BusTimeout):
                await bus.request("pd.mute", b"", timeout=3.0)
            with pytest.raises(NoResponders):
                await bus.request("pd.nobody", b"")
            given_up = tasks.create_task(bus.request("pd.mute", b"", timeout=3.0), name="given-up")
            await clock.sleep(1.0)
            given_up.cancel()
            server.go_down()
            for _ in range(2):
                with pytest.raises(BusUnavailable):
                    await bus.request("pd.rpc", b"")
            server.come_back()
            await answering.unsubscribe()
        assert samples(metrics) == {
            "pdmesh_bus_disconnects_total": 1,
            "pdmesh_bus_reconnects_total": 1,
            requests(RequestOutcome.ANSWERED): 1,
            seconds(RequestOutcome.ANSWERED): pytest.approx(2.0, abs=1e-3),
            requests(RequestOutcome.TIMED_OUT): 1,
            seconds(RequestOutcome.TIMED_OUT): pytest.approx(3.0, abs=1e-3),
            requests(RequestOutcome.NO_RESPONDERS): 1,
            requests(RequestOutcome.UNAVAILABLE): 2,
            requests(RequestOutcome.CANCELLED): 1,
            seconds(RequestOutcome.CANCELLED): pytest.approx(1.0, abs=1e-3),
        }
        await mute.unsubscribe()

    run_virtual(main)


def test_what_is_lost_is_counted_by_kind() -> None:
    """Messages refused while disconnected, messages that a slow reader did not take, events that found no room."""

    async def main(clock: VirtualClock) -> None:
        metrics = Metrics()
        server = MemoryServer(clock)
        bus = server.connect(BusMetrics(metrics))
        subscription = await bus.subscribe("pd.x", max_pending=1)
        for _ in range(4):
            await bus.publish("pd.x", b"")
        server.go_down()
        for _ in range(2):
            with pytest.raises(BusUnavailable):
                await bus.publish("pd.x", b"")
        count = 0
        while bus.publish_event("ev.a", b"", message_id=str(count)):
            count += 1
        assert subscription.dropped == 3
        assert samples(metrics) == {
            "pdmesh_bus_disconnects_total": 1,
            "pdmesh_bus_publishes_lost_total": 2,
            "pdmesh_bus_slow_consumer_drops_total": 3,
            "pdmesh_bus_events_dropped_total": 1,
        }

    run_virtual(main)


def test_every_series_is_there_before_anything_happens() -> None:
    """A rate over the first occurrence needs the zero before it."""
    metrics = Metrics()
    BusMetrics(metrics)
    text = metrics.exposition().decode()
    for kind in RequestKind:
        for outcome in RequestOutcome:
            assert f'pdmesh_bus_request_seconds_count{{kind="{kind}",outcome="{outcome}"}} 0.0' in text


def test_a_bus_without_an_observer_counts_nothing() -> None:
    """All methods are there and do nothing."""
    observer = NoObserver()
    observer.disconnected()
    observer.reconnected()
    observer.request_ended(RequestKind.STORE, RequestOutcome.ANSWERED, 1.0)
    observer.publishes_lost(1)
    observer.messages_dropped(1)
    observer.events_dropped(1)
