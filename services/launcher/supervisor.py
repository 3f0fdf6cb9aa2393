"""The children of one mesh: started in order, watched, started again when they die, stopped in stages."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable
from typing import Final

from common.runtime.clock import Clock
from common.runtime.lifecycle import EXIT_SETTINGS
from contracts.errors import ErrorCode, PdmeshError
from services.launcher.child import Child, ChildSpec
from services.launcher.core.log_line import cause, readable
from services.launcher.core.restarts import RestartBudget

_INDISPENSABLE: Final = frozenset({"nats", "broker"})
_HOPELESS_DRAIN_S: Final = 3.0
"""How long the others may drain once nothing that they wait for can come any more."""


class ChildDied(PdmeshError):  # noqa: N818 - an event that ends the mesh
    """A child ended although nobody asked it to. The text names it, its status and the end of what its log got from it."""

    code = ErrorCode.WORKER_LOST

    def __init__(self, name: str, status: int, log_tail: list[str]) -> None:
        shown = "\n".join(f"  | {readable(line)}" for line in log_tail) or "  | (its log is empty)"
        super().__init__(f"{name} {_how(status)}; the end of its log:\n{shown}")
        self.name = name
        self.status = status
        self.cause = cause(log_tail) if status > 0 else ""


class Supervisor:
    """Owns the children. Its watch tasks live in the caller's task group and end when the children have been stopped.

    Once the mesh is ready, a child that ends unasked is started again as it was, `restarts_per_minute` times a minute at most.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        on_death: Callable[[ChildDied], None],
        *,
        clock: Clock,
        say: Callable[[str], None],
        restarts_per_minute: int = 0,
    ) -> None:
        self._group = group
        self._on_death = on_death
        self._clock = clock
        self._say = say
        self._restarts_per_minute = restarts_per_minute
        self._children: list[Child] = []
        self._down: dict[str, str] = {}
        self._stop_wanted = asyncio.Event()
        self._hurried = False
        self._ready = False

    @property
    def children(self) -> tuple[Child, ...]:
        """The children that were started and, but for one that has ended for good, run; in order."""
        return tuple(self._children)

    async def start(self, spec: ChildSpec) -> Child:
        """Start a child and watch it: `on_death` is told if it ends for good before `stop`, whatever its status."""
        child = await Child.start(spec)
        self._children.append(child)
        self._group.create_task(self._watch(child), name=f"watch {spec.name}")
        return child

    def mark_ready(self) -> None:
        """The children serve: from now on one that SIGTERM ends, instead of draining, has failed."""
        self._ready = True

    async def stop(self, say: Callable[[str], None]) -> bool:
        """Stop all children, stage by stage; return whether each ended by itself with status 0. Twice is fine.

        Before `mark_ready` the end by SIGTERM is as good: a child that has no handler for it yet has nothing to drain.
        """
        self._stop_wanted.set()
        clean = True
        for stage in sorted({child.spec.stage for child in self._children}):
            members = [child for child in self._children if child.spec.stage == stage]
            async with asyncio.TaskGroup() as group:
                stops = [group.create_task(self._stop(child, say), name=f"stop {child.spec.name}") for child in members]
            clean = clean and all(task.result() for task in stops)
        self._children.clear()
        return clean

    def hurry(self) -> None:
        """Do not wait for children to drain any more: kill all of them, now."""
        self._hurried = True
        self._stop_wanted.set()
        for child in self._children:
            child.kill()

    async def _watch(self, child: Child) -> None:
        budget = RestartBudget(self._restarts_per_minute)
        running: Child | None = child
        while running is not None:
            status = await running.wait()
            if self._stop_wanted.is_set():
                return
            self._down[running.spec.name] = running.spec.role
            death = ChildDied(running.spec.name, status, list(running.last_lines()))
            running = await self._restart(running, death, budget)

    async def _restart(self, child: Child, death: ChildDied, budget: RestartBudget) -> Child | None:
        """Start a child again that has ended; None when it ended for good, or the mesh is being stopped."""
        hopeless = not self._ready or death.status == EXIT_SETTINGS
        pause_s = None if hopeless else budget.pause_s(self._clock.monotonic())
        if pause_s is None:
            self._on_death(death)
            return None
        self._children.remove(child)
        child.kill()  # ranks and other grandchildren
        because = f" ({death.cause})" if death.cause else ""
        self._say(f"{child.spec.name} {_how(death.status)}{because}; starting it again in {pause_s:.1f} s")
        try:
            async with asyncio.timeout(pause_s):
                await self._stop_wanted.wait()
        except TimeoutError:
            pass
        else:
            return None
        try:
            child.spec.before_restart()
            again = await Child.start(child.spec)
        except OSError as error:
            self._say(f"{child.spec.name} cannot be started again: {error}")
            self._on_death(death)
            return None
        if self._stop_wanted.is_set():
            await again.stop(drain=False)
            return None
        self._children.append(again)
        del self._down[child.spec.name]
        self._say(f"{child.spec.name} runs again")
        return again

    def _is_cut_off(self) -> bool:
        """Whether nothing can come any more that those who drain wait for."""
        running = {child.spec.role for child in self._children if child.status is None}
        return bool(_INDISPENSABLE & (set(self._down.values()) - running))

    async def _stop(self, child: Child, say: Callable[[str], None]) -> bool:
        ran = child.status is None
        limit_s = _HOPELESS_DRAIN_S if self._is_cut_off() else math.inf
        clean = await child.stop(drain=not self._hurried, limit_s=limit_s)
        clean = clean or (ran and not self._ready and child.status == -signal.SIGTERM)
        if ran and not clean and not self._hurried:
            say(f"{child.spec.name} did not drain: {_how(child.status)}")
        return clean


def _how(status: int | None) -> str:
    if status is None:
        return "still runs"
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
