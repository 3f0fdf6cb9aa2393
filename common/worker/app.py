"""The composition root of a worker process: settings, engine, bus, service, and the order in which they come and go."""

from __future__ import annotations

import secrets
import sys

import structlog

from common.bus.nats import NatsBus
from common.bus.service_bus import connect_for_life
from common.bus.storage import EVENTS_CONFIG
from common.engine.port import Engine, EngineDeadError
from common.runtime.admin import AdminRoutes, AdminServer
from common.runtime.clock import Clock, SystemClock
from common.runtime.host_memory import available_memory
from common.runtime.lifecycle import EXIT_SETTINGS, Lifecycle, Log, run_service
from common.runtime.logging import configure_logging
from common.runtime.metrics import Metrics
from common.runtime.settings import SettingsError
from common.worker.cache_need import check_cache_fits
from common.worker.configuration import judge_worker, load_worker_settings
from common.worker.core.compatibility import Verdict
from common.worker.engines import make_engines, start_engines
from common.worker.host import WorkerHost
from common.worker.service import WorkerParts, WorkerService
from common.worker.settings import WorkerSettings
from contracts import ids


def run_worker(kind: type[WorkerService], argv: list[str]) -> int:
    """Run a worker of one role to its end; returns the process's exit status."""
    try:
        settings = load_worker_settings(kind.role, argv).value
        check_cache_fits(settings, kind.role, available_memory())
    except SettingsError as error:
        print(error.message, file=sys.stderr)
        return EXIT_SETTINGS
    incarnation = ids.incarnation(secrets.token_bytes(ids.ENTROPY_BYTES))
    log = configure_logging(kind.role, level=settings.log_level, worker_id=settings.worker_id, incarnation=incarnation)
    warn_of_failpoints(settings, log)
    tell(judge_worker(settings, kind.role), log)

    async def main(lifecycle: Lifecycle) -> None:
        await _start(kind, settings, incarnation, lifecycle, log)

    return run_service(main, log=log, drain_timeout_s=settings.drain_timeout_s)


def warn_of_failpoints(settings: WorkerSettings, log: structlog.typing.FilteringBoundLogger) -> None:
    """Say which faults this worker plants, if any: whatever goes wrong from here on may be of our own making."""
    if settings.failpoints.strip():
        log.warning("failpoints_planted", failpoints=settings.failpoints)


def tell(verdict: Verdict, log: structlog.typing.FilteringBoundLogger) -> None:
    """Say, once for a start, what an operator should know of the settings, and which of them come to something else."""
    for caution in verdict.cautions:
        log.warning(caution.name, reason=caution.text, remedy=caution.remedy)
    for each in verdict.resolved:
        log.info("setting_resolved", key=each.key, value=each.value, effective=each.effective, reason=each.reason)


async def _start(
    kind: type[WorkerService], settings: WorkerSettings, incarnation: str, lifecycle: Lifecycle, log: Log
) -> None:
    clock: Clock = SystemClock()
    metrics = Metrics()
    buses: list[
        NatsBus
    ] = []  # one, once the engine is there: what looks after the process is served from the beginning
    checks = {"bus_connected": lambda: all(bus.is_connected for bus in buses)}
    routes = AdminRoutes(state=lambda: lifecycle.state, metrics=metrics, ready=checks)
    admin = AdminServer(routes, host=settings.admin_host, port=settings.admin_port)
    lifecycle.on_close("admin", admin.close)
    log.info("admin_port_opened", port=await admin.start())
    engines = make_engines(settings, kind.role, incarnation, clock)
    progress = []
    for dp_rank, engine in enumerate(engines):
        lifecycle.on_close(f"engine-{dp_rank}", engine.stop)
        work = _log_progress(engine, dp_rank, log)
        progress.append(lifecycle.tasks.create_task(work, name=f"progress-{dp_rank}"))
    started = await start_engines(engines)
    for task in progress:
        task.cancel()
    for dp_rank, each in enumerate(started):
        log.info(
            "engine_started",
            dp_rank=dp_rank,
            tp=len(each.info.ranks),
            rank_pids=[rank.pid for rank in each.info.ranks],
            model_fingerprint=each.info.model_fingerprint,
            num_blocks=each.info.num_blocks,
            num_slots=each.info.num_slots,
            weight_bytes=sum(rank.num_weight_bytes for rank in each.info.ranks),
            cache_bytes=sum(rank.num_region_bytes for rank in each.info.ranks),
        )
    bus = await connect_for_life(
        settings.nats_url,
        name=settings.worker_id,
        lifecycle=lifecycle,
        clock=clock,
        log=log,
        metrics=metrics,
        replicas=settings.nats_replicas,
    )
    buses.append(bus)
    await bus.ensure_stream(EVENTS_CONFIG)
    service = kind(
        WorkerParts(
            settings=settings,
            incarnation=incarnation,
            engines=started,
            bus=bus,
            clock=clock,
            log=log,
            metrics=metrics,
            group=lifecycle.tasks,
        )
    )
    host = WorkerHost(service, bus, lifecycle.tasks, log)
    lifecycle.on_close("host", host.close)
    lifecycle.on_drain("handoffs", host.drain)
    lifecycle.on_drain("events", bus.flush_events)
    await host.open()


async def _log_progress(engine: Engine, dp_rank: int, log: Log) -> None:
    while True:
        try:
            progress = await engine.next_progress()
        except EngineDeadError:  # whoever started the engine knows why, and says so
            return
        log.info(
            "engine_loading",
            dp_rank=dp_rank,
            rank=progress.rank,
            phase=progress.phase,
            done=progress.done,
            total=progress.total,
        )
