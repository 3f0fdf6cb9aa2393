"""An event loop whose time moves only when nothing else can happen: a year of waiting runs in milliseconds.

For simulations and tests. Works with TaskGroup, `asyncio.timeout` and `asyncio.Runner`. There is no I/O and there are no
threads in it, so a run is repeatable bit by bit; whatever would block for ever raises Deadlock instead.
"""

import asyncio
import heapq
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from itertools import count
from typing import Any, Never, TypeVar, TypeVarTuple

T = TypeVar("T")
_Ts = TypeVarTuple("_Ts")


class Deadlock(Exception):  # noqa: N818 - the state that it names is no mistake of the caller's syntax
    """Every task waits for another one, and no timer is set."""


class _NoSelector(selectors.BaseSelector):
    """Watches nothing: the loop registers the pipe that wakes it from other threads, and nobody writes to it here."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> Never:
        raise RuntimeError(f"virtual time waits for no file (timeout {timeout})")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop. `time()` starts at 0.0. Timers of the same moment go off in the order in which they were set.

    A timer is always set for later than now, if only by the smallest difference that a float can hold: whoever sleeps for
    next to nothing in a circle comes on.
    """

    _ready: Any  # asyncio's own: the callbacks that are due, in order
    _stopping: bool  # asyncio's own

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_numbers = count()
        super().__init__(_NoSelector())

    def time(self) -> float:
        """Seconds of virtual time since the loop was made."""
        return self._now

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.loop.call_at`."""
        when = max(when, math.nextafter(self._now, math.inf))
        timer = self._make_timer(when, callback, args, context)
        heapq.heappush(self._timers, (when, next(self._timer_numbers), timer))
        return timer

    def run_in_executor(self, *_args: object) -> Never:
        """Refuse: a thread lives in real time."""
        raise RuntimeError("virtual time has no threads; the rule is: nothing that runs here uses an executor")

    def _make_timer(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        return asyncio.TimerHandle(when, callback, args, self, context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asyncio's own hook. It is passed over when its moment comes."""

    def _run_once(self) -> None:
        """Asyncio's own: everything that is due, once; if nothing is, the time of the next timer comes first."""
        ready, timers = self._ready, self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise Deadlock("every task waits, and no timer is set")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:  # noqa: SLF001 - asyncio's own
                self._run(handle)

    def _run(self, handle: asyncio.Handle) -> None:
        """Run one callback."""
        handle._run()  # noqa: SLF001 - asyncio's own


class VirtualClock:
    """A `common.runtime.clock.Clock` on the time of a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, wall_start: float = 1_700_000_000.0) -> None:
        self._loop = loop
        self._wall_start = wall_start

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._loop.time()

    def monotonic_ns(self) -> int:
        """See `Clock.monotonic_ns`."""
        return round(self._loop.time() * 1e9)

    def wall_time(self) -> float:
        """See `Clock.wall_time`."""
        return self._wall_start + self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        await asyncio.sleep(seconds)


def run_virtual(main: Callable[[VirtualClock], Coroutine[Any, Any, T]]) -> T:
    """Run `main` to its end in virtual time and return its result. Raises Deadlock if it can never end."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main(VirtualClock(runner.get_loop())))
