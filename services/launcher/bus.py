"""The launcher's own connection to the bus: opened for one piece of work, and closed after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from common.bus.nats import NatsBus
from common.bus.port import Bus
from common.runtime.clock import SystemClock
from contracts.errors import PdmeshError

T = TypeVar("T")

_CONNECT_S: Final = 3.0


async def with_bus(url: str, use: Callable[[Bus], Awaitable[T]], *, say: Callable[[str], None]) -> T:
    """Connect, and return what `use` returns. `say` hears when the connection breaks or comes back.

    Raises BusUnavailable if no server answers, SettingsError for what is no URL, and what `use` raises of pdmesh's errors, as it is.
    """
    results: list[T] = []
    failure: PdmeshError | None = None
    async with asyncio.TaskGroup() as tasks:
        try:
            bus = await NatsBus.connect(
                url,
                name="pdmesh-launcher",
                tasks=tasks,
                clock=SystemClock(),
                log=_Said(say),
                timeout_s=_CONNECT_S,
                replicas=None,
            )
            try:
                results.append(await use(bus))
            finally:
                await bus.close()
        except PdmeshError as error:  # kept out of the group, which would wrap it
            failure = error
    if failure is not None:
        raise failure
    return results[0]


class _Said:
    """The bus's log lines, for people."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def info(self, event: str, **fields: Any) -> None:
        self._say(_line(event, fields))

    def error(self, event: str, **fields: Any) -> None:
        self._say(_line(event, fields))


def _line(event: str, fields: dict[str, Any]) -> str:
    words = (f"{name}={value}" for name, value in fields.items() if name != "exc_info")
    return " ".join([event.replace("_", " "), *words])
