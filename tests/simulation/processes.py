"""Simulated processes on one virtual event loop: they can stand still, wake up, and die at any moment, as by a signal.

Every task and timer knows its process by its context, which asyncio hands on by itself. The loop asks before it runs a
callback whether the process may run now; if not, the callback waits for the process to go on, or for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import Context, ContextVar
from typing import Any, Final, TypeVar, TypeVarTuple

from common.runtime.virtual_time import VirtualTimeLoop

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_TOLD_BY_CHANCE: Final = ("was never retrieved", "was destroyed but it is pending!")
"""How asyncio's messages end that come when memory is collected: no seed decides when that is. `Process.failures` are looked at instead."""


class Process:
    """One start of one service. `parked` is what it would have done since it stood still.

    Its tasks are kept to the end: nobody else may know of one that waits for ever, and then it would end whenever that is found out.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_frozen = False
        self.is_dead = False
        self.parked: list[asyncio.Handle] = []
        self._context = Context()
        self._tasks: list[asyncio.Task[None]] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task of this process."""
        context = self._context.copy()
        context.run(_PROCESS.set, self)
        task = simulation_loop().create_task(work, name=self.name, context=context)
        self._tasks.append(task)
        return task

    @property
    def runs(self) -> bool:
        """Whether it takes part in anything now."""
        return not (self.is_frozen or self.is_dead)

    def failures(self) -> Iterator[str]:
        """The errors with which tasks of it have ended: nobody waits for these, and nobody else would hear of it."""
        for task in self._tasks:
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None:
                yield f"a task of {self.name} ended with {error!r}"


_PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class SimulationLoop(VirtualTimeLoop):
    """Virtual time, and processes. A callback that fails, or anything else that asyncio would log, is one of the `mistakes`.

    Campaigns spend much of their time here: what asyncio does to set and run a callback is done in one place each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._network = Context()
        self.mistakes: list[str] = []

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """See `asyncio.loop.call_exception_handler`."""
        message = str(context.get("message", ""))
        if not message.endswith(_TOLD_BY_CHANCE):
            self.mistakes.append(f"{message}: {context.get('exception')!r}")

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.loop.call_soon`."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[_T]:
        """See `asyncio.loop.create_task`."""
        return asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)

    def _run(self, handle: Any) -> None:
        """Run a callback, or put it aside if its process stands still: a timer then goes off late."""
        process = handle._context.get(_PROCESS)
        if process is not None and (process.is_frozen or process.is_dead):
            process.parked.append(handle)
            return
        try:
            handle._context.run(handle._callback, *handle._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as asyncio does
            what = getattr(handle._callback, "__qualname__", repr(handle._callback))
            self.mistakes.append(f"{what} raised {error!r}")

    def call_outside(self, delay_s: float, action: Callable[[], object]) -> None:
        """Do something after a delay, on behalf of no process: what is on a wire arrives, whatever became of its sender."""
        self.call_later(delay_s, action, context=self._network)

    def go_on(self, process: Process) -> None:
        """Let a process run again, with all that it missed, in order."""
        process.is_frozen = False
        process.is_dead = False
        parked, process.parked = process.parked, []
        self._ready.extend(parked)


def simulation_loop() -> SimulationLoop:
    """The loop that runs now."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, SimulationLoop):
        raise TypeError("this runs in a simulation only")
    return loop
