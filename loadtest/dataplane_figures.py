"""Blocks of transfers summed up: rates, latencies, ratios, processor time; and what a report says of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from loadtest.dataplane_case import MIB, Case, shown_bytes
from loadtest.dataplane_ends import Method
from loadtest.report import Report, Table, number
from loadtest.statistics import median, percentile, ratio

AIM_BYTES: Final = 16 * MIB
AIMS: Final = ((Method.SHM, Method.MEMCPY, 0.95), (Method.TCP, Method.SOCKET, 0.9))
"""At this size the first is to have this share of the second's rate."""
LATENCY_BYTES: Final = 4096
"""Up to here a transfer's time counts, not its rate."""
BASELINES: Final[tuple[Method, ...]] = (Method.MEMCPY, Method.SOCKET)


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Some transfers of one source in a row. Times are the host's monotonic clock in ns, `cpu_s` the whole process's."""

    began_ns: int
    ended_ns: int
    took_ns: tuple[int, ...]
    cpu_s: float


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One method's part of a round: the blocks of all sources, which ran at the same time, and the destination's processor time."""

    blocks: tuple[Block, ...]
    destination_cpu_s: float


class CaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One way, one kind of transfer. Rates in GB/s (1e9 bytes), of all sources together; times of one transfer in us.

    Rates are those of single transfers with one source, and those of whole turns with several, because these share the machine.
    `over` are medians over the rounds of the rate beside a baseline's in the same round, with their 10th and 90th percentile.
    """

    method: Method
    shape: str
    nbytes: int
    num_sources: int
    num_transfers: int
    rate: tuple[float, float, float]
    latency_us: float
    cpu_s_per_gb: float
    over: dict[Method, tuple[float, float, float]]


def figures_of(case: Case, turns: Mapping[Method, Sequence[Turn]]) -> list[CaseFigures]:
    """Sum up the turns of one kind of transfer; those of all methods at one place were in the same round."""
    rates = {method: [median(_rates(case, turn)) for turn in own] for method, own in turns.items()}
    found: list[CaseFigures] = []
    for method, own in turns.items():
        took_ns = [each for turn in own for block in turn.blocks for each in block.took_ns]
        cpu_s = sum(turn.destination_cpu_s + sum(block.cpu_s for block in turn.blocks) for turn in own)
        over = {
            base: _spread([mine / theirs for mine, theirs in zip(rates[method], rates[base], strict=True)])
            for base in BASELINES
            if base in rates
        }
        found.append(
            CaseFigures(
                method=method,
                shape=case.shape,
                nbytes=case.nbytes,
                num_sources=len(own[0].blocks),
                num_transfers=len(took_ns),
                rate=_spread([rate for turn in own for rate in _rates(case, turn)]),
                latency_us=median(took_ns) / 1e3,
                cpu_s_per_gb=ratio(cpu_s, len(took_ns) * case.nbytes / 1e9) or 0.0,
                over=over,
            )
        )
    return found


def report_dataplane(report: Report, figures: Sequence[CaseFigures], absent: Mapping[Method, str]) -> None:
    """The tables, and the aims at their size."""
    bulk = [each for each in figures if each.nbytes > LATENCY_BYTES]
    small = [each for each in figures if each.nbytes <= LATENCY_BYTES]
    if bulk:
        report.add(_rate_table(bulk))
    if small:
        report.add(_latency_table(small))
    if absent:
        rows = tuple((str(method), why) for method, why in absent.items())
        report.add(Table(title="not measured", header=("way", "why"), rows=rows, num_names=2))
    report.put("transfers", list(figures))
    report.put("absent", {str(method): why for method, why in absent.items()})
    for each in bulk:
        for method, base, aim in AIMS:
            if (each.method, each.nbytes, each.shape) == (method, AIM_BYTES, Case(nbytes=AIM_BYTES).shape):
                share = each.over.get(base, (0.0, 0.0, 0.0))[0]
                what = f"{method} over {base}, {shown_bytes(each.nbytes)}, sources: {each.num_sources}"
                report.aim(what, f"{number(share)} (aim: at least {aim})", met=share >= aim)


def _rates(case: Case, turn: Turn) -> list[float]:
    """GB/s of a turn's single transfers, or with several sources of the turn as a whole."""
    if len(turn.blocks) == 1:
        return [case.nbytes / took for took in turn.blocks[0].took_ns]
    num_bytes = sum(case.nbytes * len(block.took_ns) for block in turn.blocks)
    busy_ns = max(block.ended_ns for block in turn.blocks) - min(block.began_ns for block in turn.blocks)
    return [num_bytes / busy_ns]


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile."""
    return median(values), percentile(values, 10), percentile(values, 90)


def _over(figures: CaseFigures, base: Method) -> str:
    if base not in figures.over or figures.method is base:
        return "-"
    middle, low, high = figures.over[base]
    return f"{number(middle)} [{number(low)}, {number(high)}]"


def _rate_table(figures: Sequence[CaseFigures]) -> Table:
    rows = tuple(
        (
            str(each.num_sources),
            shown_bytes(each.nbytes),
            each.shape,
            str(each.method),
            *(_over(each, base) for base in BASELINES),
            *(number(rate) for rate in each.rate),
            number(each.latency_us, 0),
            number(each.cpu_s_per_gb, 3),
        )
        for each in figures
    )
    header = (
        "sources",
        "bytes",
        "shape",
        "way",
        *(f"over {base}" for base in BASELINES),
        "GB/s p50",
        "p10",
        "p90",
        "us p50",
        "CPU s/GB",
    )
    title = "rates (ratios: median over rounds [p10, p90]; memcpy and socket move as many bytes in one piece)"
    return Table(title=title, header=header, rows=rows, num_names=4)


def _latency_table(figures: Sequence[CaseFigures]) -> Table:
    rows = tuple(
        (str(each.num_sources), shown_bytes(each.nbytes), str(each.method), number(each.latency_us, 1))
        for each in figures
    )
    header = ("sources", "bytes", "way", "us p50")
    return Table(
        title="latency of small transfers, until the sender knows that they are there",
        header=header,
        rows=rows,
        num_names=3,
    )
