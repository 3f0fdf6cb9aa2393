"""What was seen of decode steps behind long contexts, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from contracts.errors import PdmeshError
from loadtest.dcp_times import ReadTime, StepTime
from loadtest.report import Report, Table, number, percent
from loadtest.statistics import Spread, median, spread

_MS: Final = 1e6


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of `tp` ranks, `dcp` of which share the blocks of a KV head, behind `num_tokens` tokens.

    A step is as long as that of its slowest rank, and takes as much processor time (`cpu`) as the busiest. `num_bytes` is what
    attention has to read on the rank that holds most; rates in GB/s (1e9 bytes) of one rank's processor time. `is_simulated`: the
    other ranks were not there.
    """

    tp: int
    dcp: int
    num_tokens: int
    is_simulated: bool
    step_ms: Spread
    cpu_ms: Spread
    collective_share: float
    collective_cpu_share: float
    num_collectives: int
    num_bytes: int
    attention_gb_per_s: float
    read_gb_per_s: float

    @property
    def ratio(self) -> float:
        """How near attention comes to a plain pass over the same bytes."""
        return self.attention_gb_per_s / self.read_gb_per_s


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """`at_zero_ms + per_token_ms * tokens`: what a step takes, by the length of its context."""

    at_zero_ms: float
    per_token_ms: float

    def at(self, num_tokens: int) -> float:
        """The ms at a length."""
        return self.at_zero_ms + self.per_token_ms * num_tokens


class Crossover(msgspec.Struct, frozen=True, kw_only=True):
    """From what length on a step with `dcp` is the faster one. `num_tokens` None: it never stays so; 0: at each.

    `speedup` is that at the longest context. Both by the time of steps, and by processor time, which is what a step takes but for
    waiting: other work on the machine does not spoil it.
    """

    tp: int
    dcp: int
    is_simulated: bool
    num_tokens: float | None
    speedup: float
    num_tokens_cpu: float | None
    speedup_cpu: float


class CacheBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one rank for some requests, and the bytes of its tensors."""

    num_blocks: int
    key_value_bytes: int
    state_bytes: int

    @property
    def block_bytes(self) -> float:
        """Keys and values of one block, in all layers."""
        return self.key_value_bytes / self.num_blocks


def step_figures(
    tp: int,
    dcp: int,
    num_tokens: int,
    steps: Sequence[Sequence[StepTime]],
    reads: Sequence[Sequence[ReadTime]],
    *,
    is_simulated: bool,
) -> StepFigures:
    """Sum up what each rank has told. Raises `PdmeshError` when there is nothing."""
    together = list(zip(*steps, strict=True))
    step_ms = spread([max(each.step_ns for each in ranks) / _MS for ranks in together])
    cpu_ms = spread([max(each.step_cpu_ns for each in ranks) / _MS for ranks in together])
    every = [each for rank in reads for each in rank]
    if step_ms is None or cpu_ms is None or not every:
        raise PdmeshError("no step was measured")
    flat = [each for rank in steps for each in rank]
    return StepFigures(
        tp=tp,
        dcp=dcp,
        num_tokens=num_tokens,
        is_simulated=is_simulated,
        step_ms=step_ms,
        cpu_ms=cpu_ms,
        collective_share=sum(each.collective_ns for each in flat) / sum(each.step_ns for each in flat),
        collective_cpu_share=sum(each.collective_cpu_ns for each in flat) / sum(each.step_cpu_ns for each in flat),
        num_collectives=flat[0].num_collectives,
        num_bytes=max(each.num_bytes for each in every),
        attention_gb_per_s=median([each.num_bytes / each.attention_cpu_ns for each in every]),
        read_gb_per_s=median([each.num_bytes / each.read_cpu_ns for each in every]),
    )


def line_of(lengths: Sequence[int], times_ms: Sequence[float]) -> Line:
    """The line through times, by least squares. Raises `PdmeshError` for fewer than two lengths."""
    if len(set(lengths)) < 2:
        raise PdmeshError("a line needs contexts of two lengths")
    mean_length, mean_time = sum(lengths) / len(lengths), sum(times_ms) / len(times_ms)
    across = sum((length - mean_length) ** 2 for length in lengths)
    slope = sum((x - mean_length) * (y - mean_time) for x, y in zip(lengths, times_ms, strict=True)) / across
    return Line(at_zero_ms=mean_time - slope * mean_length, per_token_ms=slope)


def crossover(alone: Sequence[StepFigures], shared: Sequence[StepFigures]) -> Crossover:
    """From where on `shared` is faster than `alone`, both in the order of the same lengths, by the lines through them."""
    lengths, last = [each.num_tokens for each in shared], shared[-1]

    def where(times_ms: Callable[[StepFigures], float]) -> float | None:
        first, other = (line_of(lengths, [times_ms(each) for each in figures]) for figures in (alone, shared))
        gained = first.per_token_ms - other.per_token_ms
        if gained > 0:
            return max(0.0, (other.at_zero_ms - first.at_zero_ms) / gained)
        # What is faster at the longest context, and gains nothing from a longer one, is so at each that was measured.
        return 0.0 if other.at(lengths[-1]) < first.at(lengths[-1]) else None

    return Crossover(
        tp=last.tp,
        dcp=last.dcp,
        is_simulated=last.is_simulated,
        num_tokens=where(lambda each: each.step_ms.p50),
        speedup=alone[-1].step_ms.p50 / last.step_ms.p50,
        num_tokens_cpu=where(lambda each: each.cpu_ms.p50),
        speedup_cpu=alone[-1].cpu_ms.p50 / last.cpu_ms.p50,
    )


def report_steps(report: Report, figures: Sequence[StepFigures]) -> None:
    """A table of steps, and one of where groups begin to pay."""
    rows = []
    for each in figures:
        alone = next(one for one in figures if (one.tp, one.dcp, one.num_tokens) == (each.tp, 1, each.num_tokens))
        rows.append(
            (
                f"{each.tp}{' (simulated)' if each.is_simulated else ''}",
                f"{each.num_tokens:,}",
                str(each.dcp),
                number(each.step_ms.p50),
                number(alone.step_ms.p50 / each.step_ms.p50),
                number(each.cpu_ms.p50),
                number(alone.cpu_ms.p50 / each.cpu_ms.p50),
                percent(each.collective_share, 1),
                percent(each.collective_cpu_share, 1),
                str(each.num_collectives),
                number(each.num_bytes / (1 << 20), 1),
                number(each.attention_gb_per_s),
                number(each.read_gb_per_s),
                number(each.ratio),
            )
        )
    header = (
        "ranks",
        "context",
        "dcp",
        "step ms p50",
        "dcp 1 over it",
        "CPU ms p50",
        "dcp 1 over it",
        "in collectives",
        "of CPU",
        "calls",
        "MiB to read",
        "attention GB/s",
        "plain read GB/s",
        "ratio",
    )
    title = "decode steps, and what attention reads of each rank's cache beside a plain pass over the same bytes"
    report.add(Table(title=title, header=header, rows=tuple(rows), num_names=3))
    report.put("steps", tuple(figures))
    report_crossovers(report, crossovers(figures))


def crossovers(figures: Sequence[StepFigures]) -> tuple[Crossover, ...]:
    """One for each number of ranks and size of groups; none where only one length was measured."""
    found = []
    for tp, dcp in dict.fromkeys((each.tp, each.dcp) for each in figures):
        alone, shared = ([each for each in figures if (each.tp, each.dcp) == (tp, one)] for one in (1, dcp))
        if dcp > 1 and len(shared) > 1:
            found.append(crossover(alone, shared))
    return tuple(found)


def report_crossovers(report: Report, found: Sequence[Crossover]) -> None:
    """A row for each size of groups."""
    if not found:
        return
    rows = tuple(
        (
            f"{each.tp}{' (simulated)' if each.is_simulated else ''}",
            str(each.dcp),
            _length(each.num_tokens),
            number(each.speedup),
            _length(each.num_tokens_cpu),
            number(each.speedup_cpu),
        )
        for each in found
    )
    header = (
        "ranks",
        "dcp",
        "pays from tokens",
        "at the longest, times",
        "by CPU time, from",
        "at the longest, times",
    )
    title = "from what length on sharing the blocks pays, by lines through the medians of step and of processor time"
    report.add(Table(title=title, header=header, rows=rows))
    report.put("crossovers", tuple(found))


def _length(num_tokens: float | None) -> str:
    return "at no length" if num_tokens is None else f"{num_tokens:,.0f}"


def report_memory(report: Report, lengths: Sequence[int], found: dict[int, CacheBytes]) -> None:
    """A row for each size of groups. More than its share and a block for each request is a failure."""
    alone = found[1]
    rows = []
    for dcp, each in found.items():
        most = alone.key_value_bytes / dcp + len(lengths) * each.block_bytes
        if each.key_value_bytes > most:
            report.fail(f"dcp {dcp}: {each.key_value_bytes} bytes of keys and values a rank; the most is {most:.0f}")
        sizes = (number(each.key_value_bytes / (1 << 20)), number(each.state_bytes / (1 << 20)))
        share = number(each.key_value_bytes / alone.key_value_bytes, 4)
        rows.append((str(dcp), f"{each.num_blocks:,}", *sizes, share, number(1 / dcp, 4)))
    shown = ", ".join(f"{length:,}" for length in lengths)
    header = ("dcp", "blocks", "KV MiB", "state MiB", "KV over dcp 1", "1/dcp")
    report.add(Table(title=f"cache tensors of a rank for requests of {shown} tokens", header=header, rows=tuple(rows)))
    report.put("memory", {str(dcp): each for dcp, each in found.items()})
