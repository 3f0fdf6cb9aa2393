"""The composition root: everything that a router consists of, put together, started and ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from common.bus.kept_record import KeptRecord
from common.bus.port import Bus
from common.bus.refusals import Refusals
from common.bus.service_bus import connect_for_life
from common.bus.storage import ROUTERS_CONFIG
from common.runtime.admin import AdminRoutes
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Lifecycle, Log
from common.runtime.metrics import Metrics
from common.runtime.tasks import BoundedTasks
from contracts.codec import encode
from contracts.routers import RouterRecord
from services.router.account import accounting_middleware
from services.router.admission import Admission
from services.router.body_reader import BodyReader
from services.router.canceller import Canceller
from services.router.completing import Completer
from services.router.core.placement import Loads
from services.router.core.retry import RetryPolicy
from services.router.core.retry_after import Throughput
from services.router.core.retry_budget import RetryBudget
from services.router.dispatch import Dispatcher
from services.router.endpoints import Endpoints
from services.router.fleet import Fleet
from services.router.generation import Generator
from services.router.http_errors import error_middleware
from services.router.listener import Listener
from services.router.metrics import RouterMetrics
from services.router.model_directory import load_model
from services.router.replaying import Replayer
from services.router.retry_hint import RetryHint
from services.router.settings import RouterSettings
from services.router.token_inbox import TokenInbox
from services.router.tokenizing import Tokenizing
from services.router.twin import check_unique

_MAX_CANCELS: Final = 4096
_MAX_ACKNOWLEDGEMENTS: Final = 4096
_STREAMS_SHARE_OF_DRAIN: Final = 0.8
_LAST_WORDS_SHARE_OF_DRAIN: Final = 0.1
_SHUTDOWN_TIMEOUT_S: Final = 1.0
_INCARNATION_BYTES: Final = 8


async def connect_and_start(
    settings: RouterSettings, lifecycle: Lifecycle, *, clock: Clock, log: Log, entropy: Callable[[int], bytes]
) -> int:
    """Start the router on the NATS server of its settings; see `start`."""
    registry = Metrics()
    bus = await connect_for_life(
        settings.nats_url,
        name=settings.router_id,
        lifecycle=lifecycle,
        clock=clock,
        log=log,
        metrics=registry,
        replicas=settings.nats_replicas,
    )
    return await start(settings, lifecycle, bus=bus, clock=clock, log=log, registry=registry, entropy=entropy)


async def start(
    settings: RouterSettings,
    lifecycle: Lifecycle,
    *,
    bus: Bus,
    clock: Clock,
    log: Log,
    registry: Metrics,
    entropy: Callable[[int], bytes],
) -> int:
    """Start the router on an open bus, and return the port on which it serves.

    When this returns, requests are taken. Draining stops that, waits for what is under way, and tells the rest that it
    is over. Raises SettingsError for a model that cannot be read, RouterIdTakenError for the id of a router that is at work,
    `BusError`, and OSError for a port that is taken.
    """
    model = load_model(settings.model, name=settings.model_name, wall_time=clock.wall_time)
    metrics = RouterMetrics(registry)
    tokenizing = Tokenizing(
        model, num_threads=settings.tokenizer_threads, inline_chars=settings.inline_tokenizing_chars
    )
    lifecycle.on_close("tokenizing", _closing(tokenizing.close))

    await check_unique(settings.router_id, bus, log)
    incarnation = entropy(_INCARNATION_BYTES).hex()
    sign = RouterRecord(router_id=settings.router_id, incarnation=incarnation)
    lease = KeptRecord(bus, log, ROUTERS_CONFIG, lambda: (settings.router_id, encode(sign)))
    await lease.open()  # before any request is: what has asked for it can always be judged
    lifecycle.on_close("lease", lease.close)
    lifecycle.tasks.create_task(lease.run(), name="lease")

    refusals = Refusals(log, clock, registry)
    fleet = Fleet(bus, clock, refusals)
    inbox = TokenInbox(bus, refusals, router_id=settings.router_id, max_waiting_frames=settings.max_waiting_frames)
    workers, links = await fleet.open()
    lifecycle.tasks.create_task(fleet.run_workers(workers), name="fleet-workers")
    lifecycle.tasks.create_task(fleet.run_links(links), name="fleet-links")
    metrics.waiting_frames.set_function(lambda: inbox.num_waiting)
    lifecycle.tasks.create_task(inbox.run(await inbox.open()), name="token-inbox")
    lifecycle.tasks.create_task(inbox.run_nudges(), name="token-nudges")
    await bus.flush()

    cancels = BoundedTasks(
        lifecycle.tasks,
        name="cancel",
        limit=_MAX_CANCELS,
        on_error=lambda name, error: log.error("cancel_failed", task=name, error=repr(error), exc_info=error),
    )
    canceller = Canceller(bus, clock, log, cancels, timeout_s=settings.cancel_timeout_s)
    acknowledgements = BoundedTasks(lifecycle.tasks, name="acknowledge", limit=_MAX_ACKNOWLEDGEMENTS)
    replayer = Replayer(bus, metrics, acknowledgements, view=fleet.view)
    hint = RetryHint(settings=settings, fleet=fleet, throughput=Throughput(), clock=clock)
    admission = Admission(metrics, limit=settings.max_concurrent_requests)
    generator = Generator(
        model=model.name,
        vocabulary=model.vocabulary,
        eos_token_ids=model.eos_token_ids,
        fleet=fleet,
        inbox=inbox,
        dispatcher=Dispatcher(
            bus,
            clock,
            router_id=settings.router_id,
            incarnation=incarnation,
            call_timeout_s=settings.call_timeout_s,
            outage_patience_s=settings.outage_patience_s,
        ),
        canceller=canceller,
        replayer=replayer,
        policy=RetryPolicy(
            max_attempts=settings.max_attempts,
            max_failures=settings.max_failures,
            max_preemptions=settings.max_preemptions,
            first_delay_s=settings.retry_delay_s,
            max_delay_s=settings.max_retry_delay_s,
        ),
        budget=RetryBudget(
            share=settings.retry_share,
            floor_per_s=settings.retry_floor_per_s,
            capacity=settings.retry_budget,
            now=clock.monotonic(),
        ),
        reroute_wait_s=settings.reroute_wait_s,
        loads=Loads(),
        metrics=metrics,
        clock=clock,
        log=log,
        rng=random.Random(entropy(8)),  # noqa: S311 - it spreads retries
    )
    endpoints = Endpoints(
        settings=settings,
        model=model,
        tokenizing=tokenizing,
        fleet=fleet,
        admission=admission,
        bodies=BodyReader(settings),
        completer=Completer(
            settings=settings,
            model=model,
            fleet=fleet,
            admission=admission,
            generator=generator,
            clock=clock,
            log=log,
            entropy=entropy,
            on_ended=hint.ended,
        ),
        lifecycle=lifecycle,
        admin=AdminRoutes(state=lambda: lifecycle.state, metrics=registry),
        started_at=int(clock.wall_time()),
    )
    middlewares = (accounting_middleware(metrics, clock, log), error_middleware(log, retry_after=hint.seconds))
    runner = _runner(endpoints.routes(), middlewares, max_body_bytes=settings.max_body_bytes)
    lifecycle.on_close("http", runner.cleanup)
    lifecycle.on_close("cancels", _closing(canceller.close))
    lifecycle.on_close("acknowledgements", _closing(replayer.close))
    await runner.setup()
    if runner.server is None:
        raise AssertionError("a runner that was set up has a server")
    listener = Listener(runner.server, settings, metrics, log)
    lifecycle.on_close("listener", listener.stop)
    port = await listener.open()
    lifecycle.on_drain("requests", lambda: _drain(settings.drain_timeout_s, listener, admission, cancels, clock))
    log.info("router_listening", host=settings.host, port=port, model=model.name)
    return port


def _runner(routes: Sequence[web.RouteDef], middlewares: Sequence[Middleware], *, max_body_bytes: int) -> web.AppRunner:
    application = web.Application(middlewares=middlewares, client_max_size=max_body_bytes)
    application.add_routes(routes)
    # Off by default in production, on in aiohttp's test tools: without it nobody hears that a client has gone.
    return web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_TIMEOUT_S)


async def _drain(
    drain_timeout_s: float, listener: Listener, admission: Admission, cancels: BoundedTasks, clock: Clock
) -> None:
    """Take no more requests, let streams finish, end those that take too long with an error, let cancels be heard."""
    admission.draining = True
    await listener.stop()
    last_words_s = drain_timeout_s * _LAST_WORDS_SHARE_OF_DRAIN
    if not await admission.drain(Deadline.after(clock, drain_timeout_s * _STREAMS_SHARE_OF_DRAIN)):
        admission.interrupt_all()
        await admission.drain(Deadline.after(clock, last_words_s))
    await cancels.wait_idle(Deadline.after(clock, last_words_s))


def _closing(close: Callable[[], None]) -> Callable[[], asyncio.Future[None]]:
    """Return the form of a synchronous close that a life cycle takes."""

    def closed() -> asyncio.Future[None]:
        close()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    return closed
