"""An event loop whose time moves only when nothing else can happen: a year of waiting runs in milliseconds.

For simulations and tests. Works with TaskGroup, `asyncio.timeout` and `asyncio.Runner`. There is no I/O and there are no
threads in it, so a run is repeatable bit by bit; whatever would block for ever raises Deadlock instead.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Never, TypeVar

T = TypeVar("T")

_CLOCK_RESOLUTION = 1e-6  # finer ones stop the loop from reaching timers once the time has grown to years


class Deadlock(Exception):  # noqa: N818 - the state that it names is no mistake of the caller's syntax
    """Every task waits for another one, and no timer is set."""


class _VirtualSelector(selectors.BaseSelector):
    """Watches nothing. To wait is to move the time on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        # The loop registers the pipe that wakes it from other threads; nobody writes to it here.
        self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("every task waits, and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop. `time()` starts at 0.0."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)
        self._clock_resolution = _CLOCK_RESOLUTION

    def time(self) -> float:
        """Seconds of virtual time since the loop was made."""
        return self._virtual.now

    def run_in_executor(self, *_args: object) -> Never:
        """Refuse: a thread lives in real time."""
        raise RuntimeError("virtual time has no threads; the rule is: nothing that runs here uses an executor")


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
