"""A bounded number of tasks for work that arrives from outside, with a rule for when there is no room."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from common.runtime.clock import Deadline

Work = Callable[[], Coroutine[Any, Any, None]]


def obey_cancel() -> None:
    """End the task that calls this if it was asked to end, by raising CancelledError.

    Whoever takes the errors of a task group and goes on calls this in between: a group that fails while its own task is
    cancelled raises its errors and says nothing of the cancel. The body of the group has to wait until the group fails: before
    Python 3.13 one that fails after its body's end cancels its own task, and does not take that back.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class BoundedTasks:
    """Runs at most `limit` tasks in the group of the process.

    The caller chooses what "full" means: `try_start` refuses, so that the sender hears of it at once; `start` waits,
    which holds back whoever feeds it. An exception that leaves a task goes to `on_error`; without one it fails the
    group, and with it the process. Cancellation is never caught.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        *,
        name: str,
        limit: int,
        on_error: Callable[[str, Exception], None] | None = None,
    ) -> None:
        if limit < 1:
            raise ValueError(f"limit: {limit} is not allowed; the rule is: 1 or more")
        self._group = group
        self._name = name
        self._limit = limit
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()
        self._started = 0
        self._ended = asyncio.Event()
        self.refused = 0
        """How many times `try_start` had no room."""

    @property
    def running(self) -> int:
        """How many tasks run now."""
        return len(self._running)

    def try_start(self, work: Work) -> bool:
        """Start `work` in a task of its own if there is room, and say whether there was."""
        if len(self._running) >= self._limit:
            self.refused += 1
            return False
        self._start(work)
        return True

    async def start(self, work: Work) -> None:
        """Start `work` once there is room."""
        while len(self._running) >= self._limit:
            self._ended.clear()
            await self._ended.wait()
        self._start(work)

    async def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until nothing runs, to the deadline at most; say whether that is so."""
        try:
            async with deadline.timeout():
                while self._running:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def cancel(self) -> None:
        """Cancel everything that runs. Returns before it has ended."""
        for task in self._running:
            task.cancel()

    def _start(self, work: Work) -> None:
        self._started += 1
        task = self._group.create_task(self._run(work), name=f"{self._name}-{self._started}")
        self._running.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._ended.set()

    async def _run(self, work: Work) -> None:
        try:
            await work()
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(self._name, error)
