"""What was seen of guesses, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from contracts.errors import PdmeshError
from loadtest.report import Report, Table, number, percent
from loadtest.speculate_times import Coupling, PassTimes, RunTimes, Spent
from loadtest.statistics import Spread, median, spread

SPEED_AIM: Final = 0.85
"""Of the speed that follows from what passes cost by themselves, and from how many guesses are right."""
_US: Final = 1e3


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: so many sequences side by side, with so many guesses each, drawn at a temperature."""

    temperature: float
    batch: int
    depth: int


class SpeculateFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One case. Times in µs: `token_us` by the clock, all others of processor time, which waits for nobody.

    `token_us` and `token_cpu_us` are what a token of a sequence's answer took, rounds apart. `tokens_per_turn` is what a step gave
    a sequence; `right[i]` the share of turns in which guess i + 1 was right, with all before it, of those that had it to verify.
    `decode_us`, `verify_us` and `draft_us` are what passes cost by themselves.
    """

    case: Case
    token_us: Spread
    token_cpu_us: Spread
    tokens_per_turn: float
    right: tuple[float, ...]
    decode_us: float
    verify_us: float | None
    draft_us: float | None
    num_equal_texts: int
    num_texts: int


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How many times faster answers come than without guesses, and how many times they could.

    `possible` is tokens_per_turn * decode / (verify + depth * draft): steps that consist of their passes alone.
    """

    case: Case
    tokens_per_turn: float
    measured: float
    measured_by_clock: float
    possible: float

    @property
    def share(self) -> float:
        """How much of what is possible there is."""
        return self.measured / self.possible


def speculate_figures(
    case: Case, runs: Sequence[RunTimes], passes: Sequence[PassTimes], plain: Sequence[RunTimes]
) -> SpeculateFigures:
    """Sum up rounds of one case; `plain` are those without guesses, whose texts are held against these."""
    last = runs[-1]
    num_turns, num_tokens = (
        sum(values) for values in zip(*((run.num_turns, run.num_tokens) for run in runs), strict=True)
    )
    offered = [sum(each) for each in zip(*(run.num_offered for run in runs), strict=True)]
    right = [sum(each) for each in zip(*(run.num_right for run in runs), strict=True)]
    equal = [
        one[: len(other)] == other[: len(one)]
        for run, first in zip(runs, plain, strict=True)
        for one, other in zip(run.texts, first.texts, strict=True)
    ]
    return SpeculateFigures(
        case=case,
        token_us=_per_token([run.spent.wall_ns * case.batch / run.num_tokens for run in runs]),
        token_cpu_us=_per_token([run.spent.cpu_ns * case.batch / run.num_tokens for run in runs]),
        tokens_per_turn=num_tokens / num_turns,
        right=tuple(one / other for one, other in zip(right, offered, strict=True) if other),
        decode_us=_middle([each.decode for each in passes]) or 0.0,
        verify_us=_middle([each.verify for each in passes if each.verify is not None]),
        draft_us=_middle([each.draft for each in passes if each.draft is not None]),
        num_equal_texts=sum(equal),
        num_texts=len(last.texts) * len(runs),
    )


def speed_of(plain: SpeculateFigures, guessing: SpeculateFigures) -> Speed:
    """Of one case beside the same without guesses. Raises `PdmeshError` when its passes were not measured."""
    if guessing.verify_us is None or guessing.draft_us is None:
        raise PdmeshError("no pass that verifies was measured")
    cost = guessing.verify_us + guessing.case.depth * guessing.draft_us
    return Speed(
        case=guessing.case,
        tokens_per_turn=guessing.tokens_per_turn,
        measured=plain.token_cpu_us.p50 / guessing.token_cpu_us.p50,
        measured_by_clock=plain.token_us.p50 / guessing.token_us.p50,
        possible=guessing.tokens_per_turn * plain.decode_us / cost,
    )


def report_speculation(report: Report, figures: Sequence[SpeculateFigures]) -> tuple[Speed, ...]:
    """A table of all cases, and an aim for each that guesses; returns how fast these are. Other texts fail the report."""
    plain = {(each.case.temperature, each.case.batch): each for each in figures if not each.case.depth}
    rows, speeds = [], []
    for each in figures:
        case = each.case
        speed = speed_of(plain[case.temperature, case.batch], each) if case.depth else None
        rows.append(
            (
                number(case.temperature, 1),
                str(case.batch),
                str(case.depth),
                number(each.tokens_per_turn),
                " ".join(f"{share:.2f}" for share in each.right) or "-",
                number(each.token_us.p50, 0),
                number(each.token_cpu_us.p50, 0),
                number(each.decode_us, 0),
                number(each.verify_us, 0),
                number(each.draft_us, 0),
                number(None if speed is None else speed.measured_by_clock),
                number(None if speed is None else speed.measured),
                number(None if speed is None else speed.possible),
                f"{each.num_equal_texts} of {each.num_texts}",
            )
        )
        if speed is not None:
            speeds.append(speed)
            name = f"temperature {case.temperature:g}, batch {case.batch}, depth {case.depth}"
            shown = f"{percent(speed.share, 0)} of {speed.possible:.2f} times; wanted {SPEED_AIM:.0%}"
            report.aim(f"speed, {name}", shown, met=speed.share >= SPEED_AIM)
            if each.num_equal_texts < each.num_texts:
                unequal = each.num_texts - each.num_equal_texts
                report.fail(f"{name}: {unequal} of {each.num_texts} texts differ from those without guesses")
    header = (
        "temperature",
        "batch",
        "depth",
        "tokens a step",
        "right, by place",
        "µs a token",
        "CPU µs a token",
        "decode pass",
        "verify pass",
        "draft pass",
        "times faster",
        "by CPU time",
        "possible",
        "same texts",
    )
    legend = (
        "at which tokens are drawn; 0 takes the likeliest",
        "sequences side by side",
        "guesses a step for each of them",
        "what a step gave a sequence: its right guesses, and one token more",
        "share of steps in which the first guess was right, the first two, ..., of those that had so many",
        "time by the clock for a token of a sequence",
        "processor time for it",
        "processor time in µs of one pass over a token of each sequence",
        "the same over that token and all guesses",
        "processor time in µs of one guess for each sequence",
        "µs a token without guesses over this",
        "CPU µs a token without guesses over this: what the aim is held against",
        "tokens a step * decode pass / (verify pass + depth * draft pass): steps that consist of their passes alone",
        "answers that are those without guesses; anything less fails the run",
    )
    title = "answers with guesses: µs a token of a sequence, and CPU µs of passes by themselves"
    report.add(Table(title=title, header=header, rows=tuple(rows), num_names=3, legend=legend))
    report.put("speculation", tuple(figures))
    report.put("speeds", tuple(speeds))
    return tuple(speeds)


def report_couplings(report: Report, temperature: float, found: Sequence[Coupling]) -> None:
    """A row for each place of a guess behind right ones: how often it is right by each way of drawing."""
    rows = tuple(
        (
            str(place),
            str(each.count),
            percent(each.race / each.count, 1),
            percent(each.rejection / each.count, 1),
            percent(each.one_number / each.count, 1),
            number(each.race / each.rejection),
        )
        for place, each in enumerate(found, start=1)
    )
    header = ("guess", "places", "one race", "rejection", "one number", "race over rejection")
    title = f"how often a guess is right at temperature {temperature:g}, by the way of drawing, from the weights"
    legend = (
        "its place behind right ones",
        "places in the texts that were looked at",
        "guess and choice drawn by the same race, as this engine does it",
        "what speculative sampling accepts: the most that is possible",
        "both drawn from their distributions by one and the same number",
        "how near this engine comes to the most that is possible",
    )
    report.add(Table(title=title, header=header, rows=rows, legend=legend))
    report.put("couplings", tuple(found))


def add_couplings(one: Sequence[Coupling], other: Sequence[Coupling]) -> tuple[Coupling, ...]:
    """Both, place by place."""
    return tuple(
        Coupling(
            count=a.count + b.count,
            race=a.race + b.race,
            rejection=a.rejection + b.rejection,
            one_number=a.one_number + b.one_number,
        )
        for a, b in zip(one, other, strict=True)
    )


def _per_token(times_ns: Sequence[float]) -> Spread:
    found = spread([time_ns / _US for time_ns in times_ns])
    if found is None:
        raise PdmeshError("no answer was measured")
    return found


def _middle(spent: Sequence[Spent]) -> float | None:
    return median([each.cpu_ns / _US for each in spent]) if spent else None
