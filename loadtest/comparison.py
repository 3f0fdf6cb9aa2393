"""The same requests through several modes: their times side by side, whether their answers are equal, and their handoffs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from contracts.manifest import RankManifest
from loadtest.client import Sample
from loadtest.ideal import ideal_bytes
from loadtest.phases import Handoff, phase_order
from loadtest.report import Report, Table, number, p50_p99, percent, times
from loadtest.statistics import Spread, median, ratio, spread

TAKEOVER_AIM: Final = 0.02
TAKEOVER_AIM_TOKENS: Final = 1024
_SHOWN_ERRORS: Final = 5


class ModeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One mode's requests of one kind, all rounds together. Times in ms, throughput in output tokens a second."""

    mode: str
    num_requests: int
    num_errors: int
    ttft_ms: Spread | None
    inter_token_ms: Spread | None
    total_ms: Spread | None
    output_tokens_per_s: float | None


class ModeRatio(msgspec.Struct, frozen=True, kw_only=True):
    """One mode over another: ratios of medians (first over all rounds, then each round), and how many answers are equal."""

    mode: str
    over: str
    ttft: tuple[float | None, ...]
    inter_token: tuple[float | None, ...]
    total: tuple[float | None, ...]
    throughput: tuple[float | None, ...]
    num_compared: int
    num_equal: int


class TakeoverFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Takeovers of one kind of request: from the last push's end to the first decode step, and as a share of the median TTFT.

    `after_compute_ms` counts from the end of the prompt's compute where that is later.
    """

    num_handoffs: int
    takeover_ms: Spread
    ttft_p50_ms: float
    share_p50: float | None
    share_p99: float | None
    after_compute_ms: Spread | None
    after_compute_share_p50: float | None
    overlap: Spread | None


class ByteFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one handoff moved, beside the least that it could."""

    moved: Spread
    ideal: int
    ratio: float | None
    num_parts: int


def mode_times(mode: str, samples: Sequence[Sample]) -> ModeTimes:
    """Sum up `samples`, which are of one mode and one kind."""
    good = [sample for sample in samples if not sample.error]
    return ModeTimes(
        mode=mode,
        num_requests=len(samples),
        num_errors=len(samples) - len(good),
        ttft_ms=spread([sample.ttft_ms for sample in good]),
        inter_token_ms=spread([gap for sample in good if (gap := sample.inter_token_ms) is not None]),
        total_ms=spread([sample.total_ms for sample in good]),
        output_tokens_per_s=throughput(good),
    )


def throughput(samples: Sequence[Sample]) -> float | None:
    """Output tokens a second, while requests were under way: pauses between rounds do not count. None without samples."""
    busy_ns = 0
    end_ns = 0
    for sample in sorted(samples, key=lambda each: each.sent_ns):
        busy_ns += max(0, sample.done_ns - max(sample.sent_ns, end_ns))
        end_ns = max(end_ns, sample.done_ns)
    return ratio(sum(len(sample.token_ids) for sample in samples), busy_ns / 1e9)


def mode_ratio(mode: str, over: str, samples: Sequence[Sample]) -> ModeRatio:
    """Compare two modes by their samples of one kind. Answers are compared prompt by prompt, round by round."""
    left = [sample for sample in samples if sample.mode == mode and not sample.error]
    right = [sample for sample in samples if sample.mode == over and not sample.error]
    rounds = sorted({sample.round for sample in samples})
    cuts = [
        (left, right),
        *(([s for s in left if s.round == r], [s for s in right if s.round == r]) for r in rounds),
    ]
    theirs = {(sample.round, sample.place): sample.token_ids for sample in right}
    pairs = [(s.token_ids, theirs[s.round, s.place]) for s in left if (s.round, s.place) in theirs]
    return ModeRatio(
        mode=mode,
        over=over,
        ttft=tuple(_over_medians(a, b, "ttft_ms") for a, b in cuts),
        inter_token=tuple(_over_medians(a, b, "inter_token_ms") for a, b in cuts),
        total=tuple(_over_medians(a, b, "total_ms") for a, b in cuts),
        throughput=tuple(ratio(throughput(a) or 0.0, throughput(b) or 0.0) for a, b in cuts),
        num_compared=len(pairs),
        num_equal=sum(a == b for a, b in pairs),
    )


def takeover_figures(handoffs: Sequence[Handoff], samples: Sequence[Sample]) -> TakeoverFigures | None:
    """Sum up the takeovers of one kind of request; None when there are none."""
    takeovers = spread([each.takeover_ms for each in handoffs if each.takeover_ms is not None])
    ttfts = [sample.ttft_ms for sample in samples if not sample.error]
    if takeovers is None or not ttfts:
        return None
    ttft = median(ttfts)
    after = spread([each.after_compute_ms for each in handoffs if each.after_compute_ms is not None])
    return TakeoverFigures(
        num_handoffs=takeovers.count,
        takeover_ms=takeovers,
        ttft_p50_ms=ttft,
        share_p50=ratio(takeovers.p50, ttft),
        share_p99=ratio(takeovers.p99, ttft),
        after_compute_ms=after,
        after_compute_share_p50=None if after is None else ratio(after.p50, ttft),
        overlap=spread([each.overlap for each in handoffs if each.overlap is not None]),
    )


def byte_figures(handoffs: Sequence[Handoff], ideal: int) -> ByteFigures | None:
    """Sum up the bytes of one kind of request; None when there are no handoffs."""
    moved = spread([float(each.num_bytes) for each in handoffs])
    if moved is None:
        return None
    return ByteFigures(
        moved=moved, ideal=ideal, ratio=ratio(moved.p50, ideal), num_parts=max(each.num_parts for each in handoffs)
    )


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

    def report_takeover(self, report: Report) -> None:
        """The takeovers of the mode under test; the share at long prompts is an aim."""
        mode = self._modes[0]
        rows: list[tuple[str, ...]] = []
        figures: dict[str, TakeoverFigures] = {}
        for kind in self.kinds:
            samples = self.samples_of(kind, mode)
            found = takeover_figures(self._handoffs[kind, mode], samples)
            if found is None:
                report.fail(f"{kind}, {mode}: the event stream tells of no takeover")
                continue
            figures[kind] = found
            rows.append(
                (
                    kind,
                    str(found.num_handoffs),
                    *p50_p99(found.takeover_ms),
                    number(found.ttft_p50_ms),
                    percent(found.share_p50),
                    percent(found.share_p99),
                    *p50_p99(found.after_compute_ms),
                    percent(found.after_compute_share_p50),
                    "-" if found.overlap is None else percent(found.overlap.p50, 1),
                )
            )
            if samples[0].num_prompt_tokens == TAKEOVER_AIM_TOKENS:
                self._aim_takeover(report, f"{kind}, from the last push", found.share_p50)
                self._aim_takeover(report, f"{kind}, from the end of compute", found.after_compute_share_p50)
        header = (
            "prompt",
            "n",
            "takeover p50",
            "p99",
            "TTFT p50",
            "share p50",
            "share p99",
            "after compute p50",
            "p99",
            "share p50",
            "push overlapped",
        )
        title = f"takeover of {mode} (ms, last sender's DONE to the first decode step; share of the median TTFT)"
        report.add(Table(title=title, header=header, rows=tuple(rows)))
        report.put(f"{self._key}takeover", figures)

    def _aim_takeover(self, report: Report, what: str, share: float | None) -> None:
        shown = f"{percent(share)} of the median time to first token (aim: at most {TAKEOVER_AIM:.0%})"
        report.aim(f"{self._key}takeover, {what}", shown, met=share is not None and share <= TAKEOVER_AIM)

    def report_bytes(self, report: Report, destination: Sequence[RankManifest]) -> None:
        """Bytes moved beside the least possible, which is an aim."""
        mode = self._modes[0]
        rows: list[tuple[str, ...]] = []
        figures: dict[str, ByteFigures] = {}
        for kind in self.kinds:
            length = self.samples_of(kind, mode)[0].num_prompt_tokens
            found = byte_figures(self._handoffs[kind, mode], ideal_bytes(destination, length))
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


def _over_medians(left: Sequence[Sample], right: Sequence[Sample], name: str) -> float | None:
    ours, theirs = ([v for s in each if (v := getattr(s, name)) is not None] for each in (left, right))
    return ratio(median(ours), median(theirs)) if ours and theirs else None


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
