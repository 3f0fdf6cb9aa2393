"""What reading from a source is like in a simulation: it takes time, hangs on a source that stands still, and fails in bad weather.

A reader takes no lock: when it has read, it looks whether the source's cells still hold what it was granted. The bytes have landed
then, whatever they are worth, and also those of a shard that fails: the memory that they landed in must still be the reader's.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any, Final, Self

from common.engine.fake.pull import FakeReads
from common.runtime.virtual_time import VirtualClock
from contracts.rank_pull import PullShards
from contracts.requests import WorkerRef
from tests.simulation.memory_model import ModelMemory
from tests.simulation.plane import GIVES_UP_S, LATE_S, LATENCY_S, SLOW, Plane
from tests.simulation.weather import Weather

_SILENCE_S: Final = 10.0
"""How long a reader waits for a source that says nothing."""


class Reading:
    """One pull: what it reads from, and whose memory it writes into."""

    def __init__(self, plane: Plane, command: PullShards, reader: WorkerRef, memory: ModelMemory) -> None:
        self._plane = plane
        self._command = command
        self._reader = reader
        self._memory = memory
        self._owner = memory.owner(command.seq)
        self._ends_at = asyncio.get_running_loop().time() + command.timeout_ms / 1000

    async def read(self, source_rank: int) -> str:
        """Read the shard of one source rank. Returns why what was read does not count; "" when it does."""
        plane, source = self._plane, self._command.source
        weather = plane.links.between(source.worker_id, self._reader.worker_id)
        seconds, why = self._what_comes(weather, plane.rng.uniform(*LATENCY_S))
        plane.num_reads[source.worker_id] += 1
        try:
            if not await self._passes(seconds, source_rank):
                why = "no answer in time"
        finally:
            plane.num_reads[source.worker_id] -= 1
        if weather is not Weather.BLACK_HOLE:
            self._land()
        memory = plane.memory_of(source)
        if not why and (memory.is_gone or memory.granted(source) is None):
            why = "the source has taken its memory back"
        plane.verdicts.saw("shard_failed" if why else "shard_pulled")
        return why

    def _what_comes(self, weather: Weather, seconds: float) -> tuple[float, str]:
        """How long a read takes, and why it fails in this weather."""
        match weather:
            case Weather.FAIR:
                return seconds, ""
            case Weather.SLOW:
                return SLOW * seconds, ""
            case Weather.BLACK_HOLE:
                return GIVES_UP_S, "the connection broke"
            case Weather.RAGGED:
                chance = self._plane.rng.random()
                if chance < 0.3:
                    self._plane.verdicts.saw("shard_half")
                    return seconds, "the connection broke"
                if chance < 0.5:
                    self._plane.verdicts.saw("shard_late")
                    return self._plane.rng.uniform(*LATE_S), ""
                return seconds, ""

    async def _passes(self, seconds: float, source_rank: int) -> bool:
        """Let the time of a read pass; say whether it came to its end before the pull must."""
        left_s = self._ends_at - asyncio.get_running_loop().time()
        await asyncio.sleep(min(seconds, left_s))
        if seconds > left_s:
            return False
        plane, source_id = self._plane, self._command.source.worker_id
        if not (plane.needs_peer and plane.still.holds(source_id, source_rank)):
            return True
        plane.verdicts.saw("shard_hung")
        try:
            async with asyncio.timeout(min(_SILENCE_S, left_s - seconds)):
                await plane.still.over(source_id, source_rank)
        except TimeoutError:
            return False
        return True

    def _land(self) -> None:
        """Bytes come into the reader's memory."""
        owner = self._memory.owner(self._command.seq)
        if self._memory.is_gone or self._owner is None:
            return
        handoff_id = self._owner.binding.handoff_id
        if owner is not self._owner:
            self._plane.verdicts.broken(
                "I2", f"{handoff_id} read into memory of {self._memory.name} that was given back"
            )
        elif owner.started:
            self._plane.verdicts.broken("I2", f"{handoff_id} read into memory of {self._memory.name} that is in use")


READING: Final[ContextVar[Reading | None]] = ContextVar("reading", default=None)
"""The pull whose shards are being read in this context."""
_WHY: Final[ContextVar[str]] = ContextVar("why", default="")
"""Why the shard that was read last in this context does not count."""


class _Read(float):
    """The time of one read: it is over when the read is."""

    def __new__(cls, _reading: Reading, _source_rank: int) -> Self:
        return super().__new__(cls, 1.0)

    def __init__(self, reading: Reading, source_rank: int) -> None:
        self._reading = reading
        self._source_rank = source_rank

    async def read(self) -> None:
        """Read."""
        _WHY.set(await self._reading.read(self._source_rank))


class ReadingClock(VirtualClock):
    """A clock that takes the time of a read for what it is."""

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        if isinstance(seconds, _Read):
            await seconds.read()
        else:
            await super().sleep(seconds)


class _Times(dict[int, float]):
    """Seconds that the next shard takes."""

    def get(self, source: int, _default: Any = None) -> Any:
        """See `FakeReads.read_s`."""
        reading = READING.get()
        return 0.0 if reading is None else _Read(reading, source)


class _Failures(dict[int, str]):
    """Why the shard that has taken its time was not read."""

    def get(self, _source: int, _default: Any = None) -> Any:
        """See `FakeReads.failures`."""
        return _WHY.get()


class SimulatedReads(FakeReads):
    """See `FakeReads`; what it says comes from the data plane."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["read_s"] = _Times()
        self.__dict__["failures"] = _Failures()
        self.merge_s = 0.0005
