"""Time as a port: the clock that services read, and deadlines on it.

Only this module reads the system's clocks. Cores never do: they get time as a field of an event.
"""

import asyncio
import datetime as dt
import time
from dataclasses import dataclass
from typing import Protocol, Self


class Clock(Protocol):
    """What a service may ask about time. The monotonic readings are those of the event loop that it runs on."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back. For durations, deadlines and leases."""
        ...

    def monotonic_ns(self) -> int:
        """Return the reading of `monotonic` in nanoseconds."""
        ...

    def wall_time(self) -> float:
        """Seconds since 1970 UTC. For timestamps that people read, never for durations: it may jump."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds` of this clock; zero or less only lets other tasks run."""
        ...


class SystemClock:
    """The clock of the machine."""

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.monotonic()  # noqa: TID251 - this module owns the clocks

    def monotonic_ns(self) -> int:
        """See `Clock.monotonic_ns`."""
        return time.monotonic_ns()  # noqa: TID251 - this module owns the clocks

    def wall_time(self) -> float:
        """See `Clock.wall_time`."""
        return time.time()  # noqa: TID251 - this module owns the clocks

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        await asyncio.sleep(seconds)


def wall_text(clock: Clock) -> str:
    """Now, for people: RFC 3339 in UTC, to the microsecond."""
    return dt.datetime.fromtimestamp(clock.wall_time(), dt.UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True, slots=True)
class Deadline:
    """An absolute moment on the local monotonic clock.

    Machines do not share a monotonic clock, so a message carries the milliseconds that remain, and its receiver
    makes a deadline of its own: what the message spent on the way is given to the work, never taken from it.
    """

    clock: Clock
    at: float
    """The moment, in the seconds of `clock.monotonic()`."""

    @classmethod
    def after(cls, clock: Clock, seconds: float) -> Self:
        """Return the moment `seconds` from now."""
        return cls(clock, clock.monotonic() + seconds)

    @classmethod
    def from_remaining_ms(cls, clock: Clock, remaining_ms: float) -> Self:
        """Return the local form of a deadline that came in a message."""
        return cls.after(clock, remaining_ms / 1000)

    @property
    def remaining(self) -> float:
        """Seconds left; 0.0 once it has passed."""
        return max(0.0, self.at - self.clock.monotonic())

    @property
    def remaining_ms(self) -> int:
        """Whole milliseconds left, rounded down, to put into a message; 0 once it has passed."""
        return int(self.remaining * 1000)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.clock.monotonic() >= self.at

    def earlier(self, other: "Deadline") -> "Deadline":
        """Return the one of the two that comes first."""
        return self if self.at <= other.at else other

    def capped(self, seconds: float) -> "Deadline":
        """Return this deadline, or the one `seconds` from now if that comes first."""
        return self.earlier(Deadline.after(self.clock, seconds))

    def timeout(self) -> asyncio.Timeout:
        """Return a context that raises TimeoutError inside the running task once the deadline has passed.

        Usage: `async with deadline.timeout(): ...`. A deadline that has passed already fires at the first await.
        """
        return asyncio.timeout(self.remaining)
