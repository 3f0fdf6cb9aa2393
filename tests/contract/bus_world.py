"""The servers that the bus suites run on, each behind the same handles, and what the suites share."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar
from unittest.mock import Mock

from common.bus.errors import BusUnavailable
from common.bus.memory import MemoryServer
from common.bus.nats import NatsBus
from common.bus.observer import BusObserver
from common.bus.port import Bus, Entry, Snapshot, Watch
from common.bus.server import NatsServer
from common.runtime.clock import SystemClock

PATIENCE_S = 30.0
_counter = itertools.count()

T = TypeVar("T")


class World(Protocol):
    """A server that buses connect to, and that can be stopped and started."""

    def open(self, observer: BusObserver | None = None) -> AbstractAsyncContextManager[Bus]:
        """Open a connection for the length of a block."""
        ...

    async def go_down(self) -> None:
        """Stop the server as a crash would."""
        ...

    async def come_back(self, *, wiped: bool = False) -> None:
        """Start it at the same address, with what it had stored, or with nothing."""
        ...

    async def freeze(self) -> None:
        """Stop the server as it is: connections stand, nothing is answered."""
        ...

    async def thaw(self) -> None:
        """Let it go on, with what was sent meanwhile."""
        ...


class MemoryWorld:
    """The in-memory server."""

    def __init__(self) -> None:
        self.server = MemoryServer(SystemClock())

    @asynccontextmanager
    async def open(self, observer: BusObserver | None = None) -> AsyncIterator[Bus]:
        """See World."""
        bus = self.server.connect(observer)
        try:
            yield bus
        finally:
            await bus.close()
            await bus.close()

    async def go_down(self) -> None:
        """See World."""
        self.server.go_down()

    async def come_back(self, *, wiped: bool = False) -> None:
        """See World."""
        self.server.come_back(wiped=wiped)

    async def freeze(self) -> None:
        """See World."""
        self.server.freeze()

    async def thaw(self) -> None:
        """See World."""
        self.server.thaw()


class NatsWorld:
    """A NATS server."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server

    @asynccontextmanager
    async def open(self, observer: BusObserver | None = None) -> AsyncIterator[Bus]:
        """See World."""
        async with open_nats(self.server.url, observer=observer) as bus:
            yield bus
            await bus.close()

    async def go_down(self) -> None:
        """See World."""
        await asyncio.to_thread(self.server.kill)

    async def come_back(self, *, wiped: bool = False) -> None:
        """See World."""
        await asyncio.to_thread(self.server.start, wipe=wiped)

    async def freeze(self) -> None:
        """See World."""
        self.server.freeze()

    async def thaw(self) -> None:
        """See World."""
        self.server.thaw()


def unique(stem: str) -> str:
    """Return a name for a bucket, stream or subject that no other test has."""
    return f"{stem}_{next(_counter)}"


@asynccontextmanager
async def open_nats(url: str, **options: Any) -> AsyncIterator[NatsBus]:
    """Open the NATS adapter itself, for a test that looks inside."""
    options = {"name": "test", "clock": SystemClock(), "log": Mock(), **options}
    async with asyncio.TaskGroup() as tasks:
        bus = await NatsBus.connect(url, tasks=tasks, **options)
        try:
            yield bus
        finally:
            await bus.close()


async def soon(awaitable: Awaitable[T]) -> T:
    """Wait for what must happen."""
    async with asyncio.timeout(PATIENCE_S):
        return await awaitable


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again for what must become true."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await SystemClock().sleep(0.02)


async def told_of(watch: Watch, entry: Entry) -> None:
    """Take from a watch until it tells the entry, past whatever it repeats."""
    async with asyncio.timeout(PATIENCE_S):
        while await anext(watch) != entry:
            pass


async def told(watch: Watch) -> tuple[dict[str, tuple[bytes, int]], Snapshot]:
    """Take entries up to the next snapshot: key -> value and revision."""
    entries: dict[str, tuple[bytes, int]] = {}
    async with asyncio.timeout(PATIENCE_S):
        while True:
            event = await anext(watch)
            if isinstance(event, Snapshot):
                return entries, event
            entries[event.key] = (event.value, event.revision)


async def answer(bus: Bus, subject: str, reply: bytes, group: str = "") -> asyncio.Task[None]:
    """Answer every request in a task that ends with the bus."""
    subscription = await bus.subscribe(subject, queue_group=group)

    async def serve() -> None:
        async for message in subscription:
            await message.respond(reply + message.data, {"pd-type": "answer"})

    return asyncio.get_running_loop().create_task(serve())


async def drain(iterator: AsyncIterator[object]) -> int:
    """Take everything to the end, and count it."""
    count = 0
    async for _ in iterator:
        count += 1
    return count


async def value_of(value: bool) -> bool:
    """Make a condition for `until` of what is known without waiting."""
    return value


async def holds(call: Awaitable[object]) -> bool:
    """Say whether a call works; just after a start the store may still be on its way up."""
    try:
        await call
    except BusUnavailable:
        return False
    return True
