"""The life of a service process, the same for all: start, ready, drain, stop.

STARTING  `main` runs. It opens what the service needs, registers how to drain and to close it, and returns when ready.
READY     Tasks of the root group work until the first SIGTERM or SIGINT, `request_drain`, or a failure.
DRAINING  The drain callbacks run in the order of registration, all together within the drain timeout. Where that cuts one short, those
          after it have a last second together.
STOPPED   Remaining tasks are cancelled, then the close callbacks run in reverse order, each within its own bound.

A failed start, a failed task and a second signal go to STOPPED without draining. Close callbacks always run, once each.
"""

import asyncio
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, Final, Protocol

from common.runtime.settings import SettingsError

EXIT_CLEAN: Final = 0
EXIT_FAILED: Final = 1
EXIT_SETTINGS: Final = 2
EXIT_LEASE_LAPSED: Final = 3
"""A worker stood still for so long that others took it for dead, or another start of its id has the place of its record (a router's,
too): it is to be started again, as a new incarnation."""
EXIT_QUARANTINED: Final = 4
"""Too much of a worker's memory waits for writers that do not stop: it has drained, and is to be started again."""

CLOSE_TIMEOUT_S: Final = 5.0
"""How long one close callback may take."""
_HURRIED_CLOSE_TIMEOUT_S: Final = 0.5
_LAST_STEPS_S: Final = 1.0

Callback = Callable[[], Awaitable[object]]


class State(StrEnum):
    """Where a process is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class Log(Protocol):
    """What the life cycle needs of a logger. structlog's loggers have it."""

    def info(self, event: str, **fields: Any) -> Any:
        """Record what happened."""
        ...

    def error(self, event: str, **fields: Any) -> Any:
        """Record what went wrong."""
        ...


class ServiceEnded(Exception):  # noqa: N818 - an event that ends the process
    """A task of the root group that raises it ends the process, without draining, with `status`."""

    def __init__(self, reason: str, *, status: int) -> None:
        super().__init__(reason)
        self.status = status


class _Finished(Exception):  # noqa: N818 - ends the root group from inside; never leaves this module
    """The process has drained."""


class Lifecycle:
    """What `main` gets: the root task group, and where to register its ends."""

    def __init__(self, *, log: Log, drain_timeout_s: float) -> None:
        self._log = log
        self._drain_timeout_s = drain_timeout_s
        self._state = State.STARTING
        self._group: asyncio.TaskGroup | None = None
        self._drains: list[tuple[str, Callback]] = []
        self._closes: list[tuple[str, Callback]] = []
        self._drain_wanted = asyncio.Event()
        self._drain_scope: asyncio.Timeout | None = None
        self._hurried = False
        self._failed = False

    @property
    def state(self) -> State:
        """Where the process is now."""
        return self._state

    @property
    def tasks(self) -> asyncio.TaskGroup:
        """The root group. A task of it that fails ends the process with status 1. Name every task."""
        if self._group is None:
            raise RuntimeError("the root group exists while the service runs")
        return self._group

    def on_drain(self, name: str, callback: Callback) -> None:
        """Register what ends work in order: first who takes requests in, then who works on them."""
        self._drains.append((name, callback))

    def on_close(self, name: str, callback: Callback) -> None:
        """Register how to give something back, right after it was opened."""
        self._closes.append((name, callback))

    def request_drain(self, reason: str) -> None:
        """Begin to drain. Asked again, this does nothing."""
        if not self._drain_wanted.is_set():
            self._log.info("drain_requested", reason=reason)
            self._drain_wanted.set()

    def fail(self, reason: str) -> None:
        """Stop with status 1 and without draining: the process cannot go on."""
        self._log.error("service_failed", reason=reason)
        self._failed = True
        self._hurry()

    async def wait_draining(self) -> None:
        """Return once draining begins."""
        await self._drain_wanted.wait()

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._drain_wanted.is_set():
            self._log.info("stop_forced", reason=name)
            self._failed = True
            self._hurry()
        else:
            self.request_drain(name)

    def _hurry(self) -> None:
        self._hurried = True
        self._drain_wanted.set()
        if self._drain_scope is not None and not self._drain_scope.expired():
            self._drain_scope.reschedule(asyncio.get_running_loop().time())

    async def _live(self, main: Callable[["Lifecycle"], Awaitable[object]]) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            start = group.create_task(self._start(main), name="start")
            await self._drain_wanted.wait()
            start.cancel()  # a drain that comes before the service was ready ends the start
            self._state = State.DRAINING
            if not self._hurried:
                await self._drain()
            raise _Finished

    async def _start(self, main: Callable[["Lifecycle"], Awaitable[object]]) -> None:
        await main(self)
        if self._state is State.STARTING:
            self._state = State.READY
            self._log.info("service_ready")

    async def _drain(self) -> None:
        steps = deque(self._drains)
        await self._take(steps, self._drain_timeout_s)
        if steps and not self._hurried:
            await self._take(steps, _LAST_STEPS_S)

    async def _take(self, steps: deque[tuple[str, Callback]], timeout_s: float) -> None:
        """Take one step after the other out, and run it. Those that the time does not suffice for are left in."""
        name = ""
        try:
            async with asyncio.timeout(timeout_s) as self._drain_scope:
                while steps:
                    name, callback = steps.popleft()
                    try:
                        await callback()
                    except Exception as error:  # noqa: BLE001 - logged; the others are still owed their turn
                        self._failed = True
                        self._log.error("drain_step_failed", step=name, error=repr(error))
        except TimeoutError:
            self._failed = True
            self._log.error("drain_cut_short", step=name, timeout_s=timeout_s)
        finally:
            self._drain_scope = None

    async def _close(self) -> None:
        self._state = State.STOPPED
        while self._closes:
            name, callback = self._closes.pop()
            try:
                async with asyncio.timeout(_HURRIED_CLOSE_TIMEOUT_S if self._hurried else CLOSE_TIMEOUT_S):
                    await callback()
            except Exception as error:  # noqa: BLE001 - logged; one broken end must not keep the others from theirs
                self._failed = True
                self._log.error("close_step_failed", step=name, error=repr(error))


async def serve(
    main: Callable[[Lifecycle], Awaitable[object]],
    *,
    log: Log,
    drain_timeout_s: float = 30.0,
    handle_signals: bool = True,
) -> int:
    """Live the life of a service inside a running loop, and return the exit status.

    Tests and all-in-one processes call this; a service's `__main__` calls `run_service`.
    """
    lifecycle = Lifecycle(log=log, drain_timeout_s=drain_timeout_s)
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT) if handle_signals else ()
    for number in signals:
        loop.add_signal_handler(number, lifecycle._signalled, number)  # noqa: SLF001 - the other half of Lifecycle
    status = EXIT_CLEAN
    try:
        await lifecycle._live(main)  # noqa: SLF001 - the other half of Lifecycle
    except BaseExceptionGroup as group:
        status = _status_of(group, log)
    finally:
        await lifecycle._close()  # noqa: SLF001 - the other half of Lifecycle
        for number in signals:
            loop.remove_signal_handler(number)
    if status == EXIT_CLEAN and lifecycle._failed:  # noqa: SLF001 - the other half of Lifecycle
        status = EXIT_FAILED
    log.info("service_stopped", exit_status=status)
    return status


def run_service(main: Callable[[Lifecycle], Awaitable[object]], *, log: Log, drain_timeout_s: float = 30.0) -> int:
    """Run a service to its end and return its exit status: 0 clean, 1 failed or cut short, 2 wrong settings, else `ServiceEnded.status`."""
    with asyncio.Runner() as runner:
        return runner.run(serve(main, log=log, drain_timeout_s=drain_timeout_s))


def _status_of(group: BaseExceptionGroup[BaseException], log: Log) -> int:
    """Log what ended the root group and say what the process exits with. Cancellation and exits are passed on."""
    status = EXIT_CLEAN
    told: set[tuple[str, int]] = set()
    for error in _leaves(group):
        match error:
            case _Finished():
                pass
            case ServiceEnded():
                cause = str(error), error.status
                if cause not in told:  # several tasks may notice the same thing before the first one ends them all
                    log.error("service_ended", reason=str(error), exit_status=error.status)
                told.add(cause)
                status = status or error.status
            case SettingsError():
                log.error("settings_refused", problems=[f"{p.key} = {p.value}: {p.rule}" for p in error.problems])
                status = status or EXIT_SETTINGS
            case Exception():
                log.error("task_failed", error=repr(error), exc_info=error)
                status = EXIT_FAILED
            case _:
                raise error
    return status


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
