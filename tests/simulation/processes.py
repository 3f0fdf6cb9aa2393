"""Simulated processes on one virtual event loop: they can stand still, wake up, and die at any moment, as by a signal.

Every task and timer knows its process by its context, which asyncio hands on by itself. The loop asks before it runs a
callback whether the process may run now; if not, the callback waits for the process to go on, or for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any

from common.runtime.virtual_time import VirtualTimeLoop


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


_PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class _Handle(asyncio.Handle):
    """A callback that waits while its process stands still."""

    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(_PROCESS)  # type: ignore[attr-defined]  # asyncio's own attribute
        if process is None or process.runs:
            super()._run()
        else:
            process.parked.append(self)


class _TimerHandle(asyncio.TimerHandle):
    """A timer that goes off late when its process stood still at its time."""

    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(_PROCESS)  # type: ignore[attr-defined]  # asyncio's own attribute
        if process is None or process.runs:
            super()._run()
        else:
            process.parked.append(self)


class SimulationLoop(VirtualTimeLoop):
    """Virtual time, and processes."""

    def __init__(self) -> None:
        super().__init__()
        self._network = Context()
        self.set_exception_handler(lambda _loop, _context: None)

    def _call_soon(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _make_timer(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        return _TimerHandle(when, callback, args, self, context)

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
