"""What `control` has seen with so many handoffs in flight, and what its report says of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from loadtest.report import Report, Table, number, percent
from loadtest.statistics import Spread

RATE_AIM: Final = 2000.0
GROWTH_AIM: Final = 0.01
_COLUMNS: Final = (
    ("in flight", "handoffs under way at once"),
    ("handoffs/s", "how many ended in a second"),
    ("p50 ms", "from the submit to the final frame"),
    ("p99 ms", "the same for one in a hundred"),
    ("bus alone p50", "the messages of a handoff without a broker"),
    ("p99", "the same for one in a hundred"),
    ("added p50", "what the broker adds to them"),
    ("p99", "the same for one in a hundred"),
    ("broker CPU ms", "processor time of the broker for a handoff"),
    ("server CPU ms", "processor time of the NATS server for a handoff"),
    ("held", "handoffs that the broker held when its memory was largest: in flight, or ended and still remembered"),
    (
        "KiB a held",
        "what it had then beyond `own MiB before`, over their number; room that earlier ones left is not in it",
    ),
    ("own MiB before", "memory of the broker when it had been at this for a while and held no handoff"),
    ("after", "the same at the end"),
)


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen with so many handoffs in flight. Times in ms; CPU in ms of a process a handoff; memory of the broker in bytes.

    `bytes_before` is what it held when it had been at this for a while, all of its handoffs over, `bytes_after` the same at the end.
    `bytes_at_peak` is the most of what was seen between, when it held `num_held` handoffs: those in flight, and those that had ended
    and were remembered.
    """

    num_in_flight: int
    num_handoffs: int
    rate: float
    whole: Spread
    bus_alone: Spread
    broker_cpu_ms: float
    server_cpu_ms: float
    bytes_before: int
    bytes_at_peak: int
    num_held: int
    bytes_after: int

    @property
    def added_p50(self) -> float:
        """What the broker adds to the bare messages, in the middle."""
        return self.whole.p50 - self.bus_alone.p50

    @property
    def added_p99(self) -> float:
        """The same for one in a hundred."""
        return self.whole.p99 - self.bus_alone.p99

    @property
    def growth(self) -> float:
        """How much more memory the broker held after all of these handoffs, as a share."""
        return (self.bytes_after - self.bytes_before) / self.bytes_before

    @property
    def bytes_each(self) -> float | None:
        """Memory that one held handoff has added; None if its memory was never larger than before."""
        return (self.bytes_at_peak - self.bytes_before) / self.num_held if self.num_held else None


class Held:
    """Counts the handoffs that a broker holds, which remembers those that ended for `keep_ended_s`, and keeps its memory's peak.

    `own_bytes` is its memory when it holds none.
    """

    def __init__(self, *, keep_ended_s: float, own_bytes: int) -> None:
        self._keep_ended_s = keep_ended_s
        self._ended: deque[float] = deque()
        self._num_in_flight = 0
        self.num_ended = 0
        """Of all, remembered or not."""
        self.peak_bytes = own_bytes
        """The largest memory that was seen."""
        self.num_at_peak = 0
        """How many were held then; 0 if it was never larger than without any."""

    def began(self) -> None:
        """One more is in flight."""
        self._num_in_flight += 1

    def ended(self, now: float) -> None:
        """One of them has ended. Monotonic seconds."""
        self._num_in_flight -= 1
        self.num_ended += 1
        self._ended.append(now)

    def count(self, now: float) -> int:
        """How many are held."""
        while self._ended and now >= self._ended[0] + self._keep_ended_s:
            self._ended.popleft()
        return self._num_in_flight + len(self._ended)

    def note(self, own_bytes: int, num_held: int) -> None:
        """Its memory was seen to be so large with so many held."""
        if own_bytes > self.peak_bytes:
            self.peak_bytes, self.num_at_peak = own_bytes, num_held


def report_control(report: Report, levels: Sequence[Level]) -> None:
    """A row for each number in flight, and the aims."""
    rows = tuple(
        (
            str(each.num_in_flight),
            number(each.rate, 0),
            number(each.whole.p50),
            number(each.whole.p99),
            number(each.bus_alone.p50),
            number(each.bus_alone.p99),
            number(each.added_p50),
            number(each.added_p99),
            number(each.broker_cpu_ms, 3),
            number(each.server_cpu_ms, 3),
            str(each.num_held) if each.num_held else "-",
            number(None if each.bytes_each is None else each.bytes_each / 1024, 1),
            number(each.bytes_before / (1 << 20)),
            number(each.bytes_after / (1 << 20)),
        )
        for each in levels
    )
    header, legend = zip(*_COLUMNS, strict=True)
    title = "handoffs through one broker, workers that answer at once"
    report.add(Table(title=title, header=header, rows=rows, legend=legend))
    best = max(levels, key=lambda each: each.rate)
    report.aim(
        "handoffs/s through one broker",
        f"{best.rate:.0f} with {best.num_in_flight} in flight (aim: {RATE_AIM:.0f})",
        met=best.rate >= RATE_AIM,
    )
    worst = max(levels, key=lambda each: each.growth)
    report.aim(
        "memory of the broker stays flat",
        f"{percent(worst.growth)} in {worst.num_handoffs} handoffs, {worst.num_in_flight} in flight (aim: below {GROWTH_AIM:.0%})",
        met=worst.growth < GROWTH_AIM,
    )
    report.put("control", list(levels))
