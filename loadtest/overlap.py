"""`overlap`: how much of the time that pushes take is hidden behind the compute of their prompts, and what keeps the rest from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from common.engine.model.config import load_config
from common.runtime.clock import Clock
from loadtest.client import Prompt, Sample
from loadtest.events import handoffs_of
from loadtest.handoff import Say, running
from loadtest.phases import STATE_ROLES, Handoff, PushTime
from loadtest.report import Report, Table, number, percent
from loadtest.rounds import Load, Target, orders, random_prompts, run_rounds
from loadtest.settings import OverlapSettings
from loadtest.statistics import Spread, spread

HIDDEN_AIM: Final = 0.95
_NUM_OUTPUT_TOKENS: Final = 2
_SHOWN_ERRORS: Final = 5


class OverlapFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of one length. `hidden` is the share of all push time that lay before the end of the last layer's compute.

    `per_handoff` is that share of each handoff by itself. `ready_before_last_layer` is the share of the push time of what was
    complete before the last layer's part of the last chunk: all that can be hidden where nothing of the last layer leaves before
    its end. Times in ms, means over the handoffs.
    """

    num_handoffs: int
    hidden: float
    per_handoff: Spread
    ready_before_last_layer: float
    compute_ms: float
    push_ms: float
    tokens_late_ms: float
    states_ms: float
    states_late_ms: float


async def run_overlap(settings: OverlapSettings, report: Report, clock: Clock, say: Say) -> None:
    """Measure, and fill the report. The lengths take turns in each round."""
    vocab_size = settings.vocab_size or load_config(settings.model).vocab_size

    def prompts(length: int, count: int, number: int) -> tuple[Prompt, ...]:
        return random_prompts(
            count=count,
            num_prompt_tokens=length,
            num_output_tokens=_NUM_OUTPUT_TOKENS,
            vocab_size=vocab_size,
            seed=settings.seed + number,
        )

    load = Load(num_rounds=1, concurrency=1, timeout_s=settings.request_timeout_s)
    by_kind = {f"{length} tokens": length for length in settings.prompt_tokens}
    samples: dict[str, list[Sample]] = {kind: [] for kind in by_kind}
    async with running([settings.mesh], clock, say) as (mesh,):
        targets = [Target(mode=mesh.spec.mode, url=mesh.url, mesh=mesh)]
        for number, order in enumerate(orders(tuple(by_kind), settings.num_rounds)):
            for kind in order:
                asked = prompts(by_kind[kind], settings.num_requests, number)
                warm_up = () if number else prompts(by_kind[kind], settings.num_warm_ups, settings.num_rounds)
                samples[kind] += await run_rounds(targets, asked, load, warm_up=warm_up, clock=clock, say=_be_silent)
            say(f"round {number + 1} of {settings.num_rounds}")
        told = {kind: await handoffs_of(mesh, own, clock, say) for kind, own in samples.items()}
    for kind, own in samples.items():
        for sample in [sample for sample in own if sample.error][:_SHOWN_ERRORS]:
            report.fail(f"{kind}, request {sample.place}: {sample.error}")
        good = sum(not sample.error for sample in own)
        if len(told[kind]) != good:
            report.fail(f"{kind}: the event stream tells of {len(told[kind])} requests; {good} were answered")
    report_overlap(report, {kind: overlap_figures(handoffs) for kind, handoffs in told.items()})


def overlap_figures(handoffs: Sequence[Handoff]) -> OverlapFigures | None:
    """Sum up the pushes of one kind of prompt; None when the events tell of none."""
    known = [each for each in handoffs if sum(push.busy_ns for push in each.pushes) > 0]
    shares = spread([_hidden(each.pushes) for each in known])
    if shares is None:
        return None
    pushes = [push for each in known for push in each.pushes]
    states = [push for push in pushes if push.role in STATE_ROLES]
    whole_ns = sum(push.busy_ns for push in pushes)
    late_ns, states_late_ns = (sum(push.late_ns for push in group) for group in (pushes, states))
    to_ms = 1e6 * len(known)
    return OverlapFigures(
        num_handoffs=len(known),
        hidden=_hidden(pushes),
        per_handoff=shares,
        ready_before_last_layer=1 - sum(push.last_ns for push in pushes if push.last_layer) / whole_ns,
        compute_ms=sum(each.phases.get("compute", 0.0) for each in known) / len(known),
        push_ms=whole_ns / to_ms,
        tokens_late_ms=(late_ns - states_late_ns) / to_ms,
        states_ms=sum(push.busy_ns for push in states) / to_ms,
        states_late_ms=states_late_ns / to_ms,
    )


def report_overlap(report: Report, figures: dict[str, OverlapFigures | None]) -> None:
    """The table, and an aim for each kind of prompt. One without pushes fails the report."""
    rows: list[tuple[str, ...]] = []
    for kind, found in figures.items():
        if found is None:
            report.fail(f"{kind}: the event stream tells of no push")
            continue
        shares = (found.hidden, found.per_handoff.p50, found.per_handoff.low, found.ready_before_last_layer)
        times_ms = (
            found.compute_ms,
            found.push_ms,
            found.tokens_late_ms,
            found.states_ms,
            found.states_late_ms,
        )
        shown = [*(percent(share, 1) for share in shares), *(number(time_ms, 3) for time_ms in times_ms)]
        rows.append((kind, str(found.num_handoffs), *shown))
        aim = f"{percent(found.hidden, 1)} (aim: at least {HIDDEN_AIM:.0%})"
        report.aim(f"push time hidden behind compute, {kind}", aim, met=found.hidden >= HIDDEN_AIM)
    header = (
        "prompt",
        "n",
        "hidden",
        "of a handoff p50",
        "lowest",
        "ready before the last layer",
        "compute ms",
        "push ms",
        "keys, values late",
        "states ms",
        "states late",
    )
    title = "push time before the end of the last layer's compute (shares of all push time; ms: means a handoff)"
    report.add(Table(title=title, header=header, rows=tuple(rows)))
    report.put("overlap", figures)


def _hidden(pushes: Sequence[PushTime]) -> float:
    return 1 - sum(push.late_ns for push in pushes) / sum(push.busy_ns for push in pushes)


def _be_silent(_: str) -> None:
    """What `run_rounds` calls a round is a part of one here."""
