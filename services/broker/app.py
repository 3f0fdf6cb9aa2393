"""The composition root of a broker: settings, bus, what an earlier broker left, then the edges."""

from __future__ import annotations

import asyncio
import gc
import secrets
import sys
from collections.abc import Callable
from typing import Final

from common.bus.lease import Lease
from common.bus.port import Bus
from common.bus.refusals import Refusals
from common.bus.service_bus import connect_for_life
from common.bus.storage import EVENTS_CONFIG, LEASE_TTL_S, LEASES_CONFIG, ttl_on
from common.runtime.admin import AdminRoutes, AdminServer
from common.runtime.clock import Clock, SystemClock
from common.runtime.lifecycle import EXIT_SETTINGS, Lifecycle, Log, run_service
from common.runtime.logging import configure_logging
from common.runtime.metrics import Metrics
from common.runtime.offload import Offload
from common.runtime.settings import SettingsError, load_from_arguments
from contracts import subjects
from contracts.leases import LeaseValue
from services.broker.calls import Calls
from services.broker.edges import BrokerEdges
from services.broker.leadership import Leadership
from services.broker.plans import Plans
from services.broker.records import Records
from services.broker.service import Broker
from services.broker.settings import BrokerSettings

_START_BYTES: Final = 8
_COLLECT_EVERY: Final = 10_000
"""So many more objects than before begin a garbage collection: a handoff makes thousands, and hardly one that is part of a cycle."""


async def open_broker(
    settings: BrokerSettings,
    *,
    bus: Bus,
    clock: Clock,
    log: Log,
    metrics: Metrics,
    group: asyncio.TaskGroup,
    fence: int = 1,
    is_mute: Callable[[], bool] = lambda: False,
    offload: Offload = asyncio.to_thread,
) -> tuple[Broker, BrokerEdges]:
    """A broker at work on `bus`, ready to be asked. Tests call this with fakes. Raises `BusError`.

    `fence` numbers its term of leadership: workers obey none that is lower than the highest they have seen. While `is_mute` says
    that nothing tells whether the server still answers, nobody is taken for gone who is not heard of.
    """
    await bus.ensure_stream(EVENTS_CONFIG)
    records = Records(bus, clock, ttl_s=settings.record_ttl_s, timeout_s=settings.store_timeout_s)
    await records.open()
    calls = Calls(bus, clock, call_timeout_s=settings.call_timeout_s, lost_after_s=settings.lost_after_s)
    plans = Plans(calls, clock, timeout_s=settings.describe_timeout_s, offload=offload)
    broker = Broker(
        settings,
        bus=bus,
        clock=clock,
        log=log,
        metrics=metrics,
        group=group,
        records=records,
        plans=plans,
        calls=calls,
        fence=fence,
        is_mute=is_mute,
    )
    await broker.recover()
    refusals = Refusals(log, clock, metrics)
    edges = BrokerEdges(broker, bus, group, log, refusals, partition=settings.partition)
    await edges.open()
    return broker, edges


def make_leadership(
    settings: BrokerSettings,
    *,
    bus: Bus,
    clock: Clock,
    log: Log,
    metrics: Metrics,
    offload: Offload = asyncio.to_thread,
) -> Leadership:
    """Who lets a broker work on `bus` while it holds the lease of its partition. Tests call this with fakes."""

    async def open_lease() -> Lease:
        return Lease(
            await bus.ensure_bucket(LEASES_CONFIG),
            clock,
            log,
            key=subjects.broker_lease(settings.partition),
            value=LeaseValue(holder=settings.broker_id, start=secrets.token_hex(_START_BYTES)),
            ttl_s=ttl_on(bus, LEASE_TTL_S),
        )

    async def open_term(group: asyncio.TaskGroup, fence: int, lease: Lease) -> Broker:
        broker, _ = await open_broker(
            settings,
            bus=bus,
            clock=clock,
            log=log,
            metrics=metrics,
            group=group,
            fence=fence,
            is_mute=lambda: lease.is_overdue,
            offload=offload,
        )
        return broker

    return Leadership(open_lease, open_term, clock, log, metrics)


def run_broker(argv: list[str]) -> int:
    """Run a broker to its end; returns the process's exit status."""
    try:
        settings = load_from_arguments(BrokerSettings, role="broker", argv=argv).value
    except SettingsError as error:
        print(error.message, file=sys.stderr)
        return EXIT_SETTINGS
    log = configure_logging("broker", level=settings.log_level, broker_id=settings.broker_id)

    gc.freeze()  # what has been imported stays: no collection needs to look at it
    gc.set_threshold(_COLLECT_EVERY)

    async def main(lifecycle: Lifecycle) -> None:
        await _start(settings, lifecycle, log)

    return run_service(main, log=log, drain_timeout_s=settings.drain_timeout_s)


async def _start(settings: BrokerSettings, lifecycle: Lifecycle, log: Log) -> None:
    clock: Clock = SystemClock()
    metrics = Metrics()
    bus = await connect_for_life(
        settings.nats_url,
        name=settings.broker_id,
        lifecycle=lifecycle,
        clock=clock,
        log=log,
        metrics=metrics,
        replicas=settings.nats_replicas,
    )
    leadership = make_leadership(settings, bus=bus, clock=clock, log=log, metrics=metrics)
    routes = AdminRoutes(
        state=lambda: lifecycle.state,
        metrics=metrics,
        ready={"bus_connected": lambda: bus.is_connected, "leads": lambda: leadership.broker is not None},
    )
    admin = AdminServer(routes, host=settings.admin_host, port=settings.admin_port)
    lifecycle.on_close("admin", admin.close)
    log.info("admin_port_opened", port=await admin.start())
    lifecycle.on_close("lease", leadership.release)
    lifecycle.tasks.create_task(leadership.run(), name="leadership")
    await leadership.wait_settled()
    lifecycle.on_drain("handoffs", leadership.drain)
    lifecycle.on_drain("events", bus.flush_events)
