"""The port by which a service without HTTP of its own is looked after: /health, /ready, /metrics."""

from collections.abc import Callable, Mapping
from typing import Final

import orjson
from aiohttp import web

from common.runtime.lifecycle import State
from common.runtime.metrics import Metrics
from contracts.errors import InvalidValueError

Check = Callable[[], bool]

NOT_READY: Final = "not_ready"
"""What /ready calls the state of a service that is up, but lacks something."""
_SHUTDOWN_TIMEOUT_S: Final = 1.0


class AdminRoutes:
    """The three handlers. A service with an HTTP port of its own adds `routes()` to it instead of an AdminServer.

    /health answers 200 as long as every check of `alive` holds: a process that fails it should be restarted.
    /ready answers 200 while the state is READY and every check of `ready` holds: send work only then; else its `state` is never
    "ready". Both name the checks that fail, with status 503.
    """

    def __init__(
        self,
        *,
        state: Callable[[], State],
        metrics: Metrics,
        alive: Mapping[str, Check] | None = None,
        ready: Mapping[str, Check] | None = None,
    ) -> None:
        self._state = state
        self._metrics = metrics
        self._alive = dict(alive or {})
        self._ready = dict(ready or {})

    def routes(self) -> list[web.RouteDef]:
        """Return what to add to an application's router."""
        return [
            web.get("/health", self._health),
            web.get("/ready", self._readiness),
            web.get("/metrics", self._exposition),
        ]

    async def _health(self, _request: web.Request) -> web.Response:
        return self._verdict(self._state() is not State.STOPPED, self._alive)

    async def _readiness(self, _request: web.Request) -> web.Response:
        return self._verdict(self._state() is State.READY, self._ready, unless_good=NOT_READY)

    async def _exposition(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": self._metrics.content_type})

    def _verdict(
        self, state_allows: bool, checks: Mapping[str, Check], *, unless_good: str | None = None
    ) -> web.Response:
        failing = sorted(name for name, check in checks.items() if not check())
        good = state_allows and not failing
        state: str = self._state()
        if unless_good is not None and state_allows and not good:
            state = unless_good
        body = orjson.dumps({"state": state, "failing": failing})
        return web.Response(status=200 if good else 503, body=body, content_type="application/json")


class AdminServer:
    """Serves AdminRoutes on one address, the loopback interface unless told otherwise."""

    def __init__(self, routes: AdminRoutes, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._routes = routes
        self._host = host
        self._wanted_port = port
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The port that is bound; 0 while there is none."""
        return self._port

    async def start(self) -> int:
        """Bind and serve; return the port (a free one if 0 was asked for). Raises InvalidValueError if it cannot be had."""
        application = web.Application()
        application.add_routes(self._routes.routes())
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._wanted_port)
        try:
            await site.start()
        except OSError as error:
            await self.close()
            rule = f"an address of this machine and a port that is free there, or port 0 for any ({error.strerror})"
            value = f"{self._host}:{self._wanted_port}"
            raise InvalidValueError(field="admin_host:admin_port", value=value, rule=rule) from error
        self._port = int(self._runner.addresses[0][1])
        return self._port

    async def close(self) -> None:
        """Stop serving. Twice is fine, and so is closing what never started."""
        runner, self._runner, self._port = self._runner, None, 0
        if runner is not None:
            await runner.cleanup()
