"""What was measured of pushes beside memcpy, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from loadtest.report import Report, Table, number
from loadtest.statistics import median

THROUGHPUT_AIM: Final = 0.9


class PushFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One shape and one placement of blocks. Rates in GB/s (1e9 bytes), from the sum of each write's median time.

    `queue` is "one layer" or "full". A push is binding and writing, a write is that alone. The ratios are memcpy's time over theirs. `overhead_us_per_write` is what
    a push takes beyond the memcpy; `bind_ms` is what pushes of one request take beyond writes: the binding.
    """

    shape: str
    blocks: str
    queue: str
    num_bytes: int
    num_writes: int
    num_runs: int
    push_gb_per_s: float
    write_gb_per_s: float
    memcpy_gb_per_s: float
    ratio: float
    write_ratio: float
    overhead_us_per_write: float
    bind_ms: float


def sum_of_medians(repetitions: Sequence[Sequence[int]]) -> float:
    """The median of each place over all repetitions, summed over the places. Raises ValueError without repetitions."""
    return sum(median(each) for each in zip(*repetitions, strict=True))


def report_push(report: Report, figures: Sequence[PushFigures]) -> None:
    """The table, and the aim that pushes run at nearly the speed of memcpy."""
    rows = tuple(
        (
            each.shape,
            each.blocks,
            each.queue,
            number(each.num_bytes / 1e6),
            str(each.num_writes),
            str(each.num_runs),
            number(each.push_gb_per_s),
            number(each.memcpy_gb_per_s),
            number(each.ratio),
            number(each.write_ratio),
            number(each.overhead_us_per_write, 1),
            number(each.bind_ms),
        )
        for each in figures
    )
    header = (
        "caches",
        "blocks",
        "queue",
        "MB",
        "writes",
        "runs",
        "push GB/s",
        "memcpy GB/s",
        "bind + write",
        "write only",
        "more us a write",
        "bind ms",
    )
    report.add(
        Table(
            title="push over memcpy (one process, one thread; ratios to memcpy)", header=header, rows=rows, num_names=3
        )
    )
    report.put("push_throughput", list(figures))
    for each in figures:
        shown = f"{number(each.ratio)} of memcpy (aim: at least {THROUGHPUT_AIM})"
        report.aim(
            f"push of {each.shape}, blocks {each.blocks}, queue: {each.queue}", shown, met=each.ratio >= THROUGHPUT_AIM
        )
