"""When something stood in the way of every stream, and whom that excuses: whoever was left less time than it needs in calm."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

import msgspec
from yarl import URL

from common.runtime.clock import SystemClock
from tests.e2e.chaos.faults import Action, Happened
from tests.e2e.chaos.streams import REQUEST_S, Ending, Outcome

OUT_OF_TIME: Final = "deadline_exceeded"
"""How a stream ends whose time is up."""
_LOOK_S: Final = 0.1
_SILENT_S: Final = 0.5
"""A NATS server that greets nobody for so long stands still."""
_FREEZES: Final = frozenset({Action.FREEZE_SHORT, Action.FREEZE_LONG})


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """From when to when, in monotonic seconds."""

    began_at: float
    ended_at: float


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream may blame for not being whole: nothing, by default.

    `needed_s`: how long each case takes by its name, under as many streams, while nothing is done to the mesh.
    """

    request_s: float = REQUEST_S
    needed_s: Mapping[str, float] = {}
    outages: tuple[Outage, ...] = ()

    def excuses(self, outcome: Outcome) -> bool:
        """Whether a stream's time was up, and outages had left it less of that than it needs in calm."""
        if outcome.ending is not Ending.ERROR or outcome.code != OUT_OF_TIME:
            return False
        lost = time_lost(self.outages, outcome.started_at, min(outcome.started_at + self.request_s, outcome.ended_at))
        return self.request_s - lost < self.needed_s.get(outcome.case.name, 0.0)


def time_lost(outages: Iterable[Outage], start: float, end: float) -> float:
    """Seconds between two moments in which there was at least one outage."""
    lost, at = 0.0, start
    for each in sorted(outages, key=lambda outage: outage.began_at):
        begin, stop = max(each.began_at, at), min(each.ended_at, end)
        if begin < stop:
            lost += stop - begin
            at = stop
    return lost


def freezes(faults: Iterable[Happened]) -> tuple[Outage, ...]:
    """When processes stood still, by whatever name: any of them may have had what a stream waited for."""
    return tuple(
        Outage(began_at=each.began_at, ended_at=each.ended_at) for each in faults if each.fault.action in _FREEZES
    )


class NatsWatch:
    """Looks whether the NATS server at `url` greets those who come, again and again, and keeps when it did not."""

    def __init__(self, url: str) -> None:
        self._url = URL(url)
        self._clock = SystemClock()
        self._silent_since: float | None = None
        self._outages: list[Outage] = []

    @property
    def is_silent(self) -> bool:
        """Whether an outage goes on."""
        return self._silent_since is not None

    @property
    def outages(self) -> tuple[Outage, ...]:
        """Those so far; the last one may go on."""
        if self._silent_since is None:
            return tuple(self._outages)
        return (*self._outages, Outage(began_at=self._silent_since, ended_at=self._clock.monotonic()))

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            looked_at = self._clock.monotonic()
            if await self._greets():
                if self._silent_since is not None:
                    self._outages.append(Outage(began_at=self._silent_since, ended_at=self._clock.monotonic()))
                self._silent_since = None
            elif self._silent_since is None:
                self._silent_since = looked_at
            await self._clock.sleep(_LOOK_S)

    async def _greets(self) -> bool:
        try:
            async with asyncio.timeout(_SILENT_S):
                reader, writer = await asyncio.open_connection(self._url.host, self._url.port)
                try:
                    return (await reader.readline()).startswith(b"INFO ")
                finally:
                    writer.close()
                    with suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError):
            return False
