"""The same requests through several modes: their times side by side, whether their answers are equal, and their handoffs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from loadtest.client import Sample
from loadtest.figures import (
    ByteFigures,
    GapFigures,
    ModeRatio,
    ModeTimes,
    byte_figures,
    gap_figures,
    mode_ratio,
    mode_times,
)
from loadtest.ideal import Destination
from loadtest.phases import Handoff, phase_order
from loadtest.report import Report, Table, number, p50_p99, percent, times
from loadtest.statistics import Spread, spread

GAP_AIM: Final = 0.02
GAP_AIM_TOKENS: Final = 1024
_SHOWN_ERRORS: Final = 5


class Comparison:
    """Samples and handoffs of one run by kind of request (a name such as "64 tokens"), and what a report says of them."""

    def __init__(self, modes: Sequence[str], *, key: str = "") -> None:
        """`modes`: the one under test first. `key` stands before the names of the figures."""
        self._modes = tuple(modes)
        self._key = key
        self._samples: dict[str, list[Sample]] = {}
        self._handoffs: dict[tuple[str, str], Sequence[Handoff]] = {}

    def add_samples(self, kind: str, samples: Sequence[Sample]) -> None:
        """Take requests of all modes in."""
        self._samples.setdefault(kind, []).extend(samples)

    def samples_of(self, kind: str, mode: str) -> list[Sample]:
        """The requests of one kind and mode."""
        return [sample for sample in self._samples[kind] if sample.mode == mode]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of request, in the order in which they came."""
        return tuple(self._samples)

    def add_handoffs(self, kind: str, mode: str, handoffs: Sequence[Handoff]) -> None:
        """Take what the event stream of one mesh tells of one kind."""
        self._handoffs[kind, mode] = handoffs

    def report_times(self, report: Report) -> None:
        """The table of times, the table of ratios; errors and unequal answers fail the report."""
        every = {kind: [mode_times(mode, self.samples_of(kind, mode)) for mode in self._modes] for kind in self.kinds}
        ratios = {
            kind: [mode_ratio(self._modes[0], over, self._samples[kind]) for over in self._modes[1:]]
            for kind in self.kinds
        }
        report.add(_times_table(every))
        report.put(f"{self._key}times", every)
        if len(self._modes) > 1:
            report.add(_ratios_table(ratios))
            report.put(f"{self._key}ratios", ratios)
        for kind in self.kinds:
            for sample in [sample for sample in self._samples[kind] if sample.error][:_SHOWN_ERRORS]:
                report.fail(f"{kind}, {sample.mode}, round {sample.round}, request {sample.place}: {sample.error}")
            for each in ratios[kind]:
                if each.num_equal < each.num_compared:
                    unequal = each.num_compared - each.num_equal
                    report.fail(
                        f"{kind}: {unequal} of {each.num_compared} answers of {each.mode} and {each.over} differ"
                    )

    def report_phases(self, report: Report) -> None:
        """One table of phases for each kind. Handoffs that the stream does not tell of fail the report."""
        figures: dict[str, Any] = {}
        for kind in self.kinds:
            modes = [mode for mode in self._modes if (kind, mode) in self._handoffs]
            by_mode = {mode: _phases(self._handoffs[kind, mode]) for mode in modes}
            figures[kind] = by_mode
            names = phase_order(phase for phases in by_mode.values() for phase in phases)
            header = ("phase", *(f"{mode} {name}" for mode in modes for name in ("p50", "p99")))
            rows = tuple(
                (name, *(cell for mode in modes for cell in p50_p99(by_mode[mode].get(name)))) for name in names
            )
            report.add(Table(title=f"phases, {kind} (ms; from the event stream)", header=header, rows=rows))
            for mode in modes:
                good = sum(not sample.error for sample in self.samples_of(kind, mode))
                told = len(self._handoffs[kind, mode])
                if told != good:
                    report.fail(f"{kind}, {mode}: the event stream tells of {told} requests; {good} were answered")
        report.put(f"{self._key}phases", figures)

    def report_gap(self, report: Report) -> None:
        """The handoff gaps of the mode under test; the share at long prompts is an aim."""
        mode = self._modes[0]
        rows: list[tuple[str, ...]] = []
        figures: dict[str, GapFigures] = {}
        for kind in self.kinds:
            samples = self.samples_of(kind, mode)
            found = gap_figures(self._handoffs[kind, mode], samples)
            if found is None:
                report.fail(f"{kind}, {mode}: the event stream tells of no handoff gap")
                continue
            figures[kind] = found
            rows.append(
                (
                    kind,
                    str(found.num_handoffs),
                    *p50_p99(found.gap_ms),
                    number(found.ttft_p50_ms),
                    percent(found.share_p50),
                    percent(found.share_p99),
                    *p50_p99(found.after_compute_ms),
                    percent(found.after_compute_share_p50),
                    "-" if found.overlap is None else percent(found.overlap.p50, 1),
                )
            )
            if samples[0].num_prompt_tokens == GAP_AIM_TOKENS:
                self._aim_gap(report, f"{kind}, from the last cache byte", found.share_p50)
                self._aim_gap(report, f"{kind}, from the end of compute", found.after_compute_share_p50)
        header = (
            "prompt",
            "n",
            "gap p50",
            "p99",
            "TTFT p50",
            "share p50",
            "share p99",
            "after compute p50",
            "p99",
            "share p50",
            "push overlapped",
        )
        title = f"handoff gap of {mode} (ms, last cache byte to the first decode step; share of the median TTFT)"
        report.add(Table(title=title, header=header, rows=tuple(rows)))
        report.put(f"{self._key}handoff_gap", figures)

    def _aim_gap(self, report: Report, what: str, share: float | None) -> None:
        shown = f"{percent(share)} of the median time to first token (aim: at most {GAP_AIM:.0%})"
        report.aim(f"{self._key}handoff gap, {what}", shown, met=share is not None and share <= GAP_AIM)

    def report_bytes(self, report: Report, destination: Destination) -> None:
        """Bytes moved beside the least possible, which is an aim."""
        mode = self._modes[0]
        rows: list[tuple[str, ...]] = []
        figures: dict[str, ByteFigures] = {}
        for kind in self.kinds:
            length = self.samples_of(kind, mode)[0].num_prompt_tokens
            found = byte_figures(self._handoffs[kind, mode], destination.ideal_bytes(length))
            if found is None:
                continue
            figures[kind] = found
            cells = (found.moved.p50, found.moved.low, found.moved.high, float(found.ideal))
            rows.append((kind, *(number(cell, 0) for cell in cells), number(found.ratio, 4), str(found.num_parts)))
            exact = found.moved.low == found.moved.high == found.ideal
            report.aim(f"{self._key}bytes over ideal, {kind}", f"{number(found.ratio, 4)} (aim: 1.0000)", met=exact)
        header = ("prompt", "bytes p50", "min", "max", "ideal", "ratio", "parts")
        report.add(Table(title=f"bytes a handoff of {mode}", header=header, rows=tuple(rows)))
        report.put(f"{self._key}bytes", figures)


def _phases(handoffs: Sequence[Handoff]) -> dict[str, Spread]:
    values: dict[str, list[float]] = {}
    for handoff in handoffs:
        for phase, took_ms in handoff.phases.items():
            values.setdefault(phase, []).append(took_ms)
    spreads = {phase: spread(values[phase]) for phase in phase_order(values)}
    return {phase: found for phase, found in spreads.items() if found is not None}


def _times_table(every: dict[str, list[ModeTimes]]) -> Table:
    rows = tuple(
        (
            kind,
            each.mode,
            str(each.num_requests),
            str(each.num_errors),
            *p50_p99(each.ttft_ms),
            *p50_p99(each.inter_token_ms),
            *p50_p99(each.total_ms),
            number(each.output_tokens_per_s, 1),
        )
        for kind, modes in every.items()
        for each in modes
    )
    header = (
        "prompt",
        "mode",
        "n",
        "errors",
        "TTFT p50",
        "p99",
        "per token p50",
        "p99",
        "total p50",
        "p99",
        "tokens/s",
    )
    return Table(title="times as the client sees them (ms)", header=header, rows=rows, num_names=2)


def _ratios_table(ratios: dict[str, list[ModeRatio]]) -> Table:
    rows = tuple(
        (
            kind,
            f"{each.mode} / {each.over}",
            times(each.ttft),
            times(each.inter_token),
            times(each.total),
            times(each.throughput),
            f"{each.num_equal} of {each.num_compared}",
        )
        for kind, modes in ratios.items()
        for each in modes
    )
    header = ("prompt", "ratio", "TTFT", "per token", "total", "throughput", "equal answers")
    return Table(title="ratios of medians [lowest, highest round]", header=header, rows=rows, num_names=2)
