"""The bus of a service: connected for as long as the service lives, and counted in its metrics."""

from __future__ import annotations

from common.bus.measurement import BusMetrics
from common.bus.nats import NatsBus
from common.runtime.clock import Clock
from common.runtime.lifecycle import Lifecycle, Log
from common.runtime.metrics import Metrics


async def connect_for_life(
    url: str, *, name: str, lifecycle: Lifecycle, clock: Clock, log: Log, metrics: Metrics, replicas: int = 1
) -> NatsBus:
    """Connect to NATS as `name`. The life cycle closes the bus, and fails when the bus closes before. Raises `BusError`, `SettingsError`.

    `replicas` is how many servers keep each bucket and stream.
    """
    bus = await NatsBus.connect(
        url,
        name=name,
        tasks=lifecycle.tasks,
        clock=clock,
        log=log,
        on_closed=lifecycle.fail,
        observer=BusMetrics(metrics),
        replicas=replicas,
    )
    lifecycle.on_close("bus", bus.close)
    return bus
