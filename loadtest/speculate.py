"""`speculate`: what guesses gain at each depth, beside none, in one run; and how often they are right by each way of drawing."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, Final

from tokenizers import Tokenizer

from common.runtime.clock import Clock
from loadtest.handoff import Say
from loadtest.remote_process import Closable, Process, Remote
from loadtest.report import Report
from loadtest.rounds import orders
from loadtest.speculate_figures import (
    Case,
    Speed,
    add_couplings,
    report_couplings,
    report_speculation,
    speculate_figures,
)
from loadtest.speculate_meshes import run_speculate_meshes
from loadtest.speculate_settings import SpeculateSettings
from loadtest.speculate_times import Coupling, PassTimes, RunTimes

_COUPLED_DEPTH: Final = 3
_NUM_COUPLED: Final = 4
_BEGINNINGS: Final = (
    "It is a truth universally acknowledged, that a single man",
    "And it came to pass in those days, that the people of the land",
    "She was not at all surprised to see him, but",
    "The king went out to the gate of the city, and",
    "My dear sister, you will be glad to hear that",
    "Then answered the prophet, and said unto them,",
    "There was a great deal of company at the house, and",
    "Now these are the names of the sons of",
)
"""Texts of the kind that the shipped model has seen: guesses at what follows random tokens tell of nothing."""


async def run_speculate(settings: SpeculateSettings, report: Report, clock: Clock, say: Say) -> None:
    """Measure, and fill the report. Raises PdmeshError when the rank or a mesh fails."""
    prompts = _prompts(settings)
    speeds = await asyncio.to_thread(measure, settings, prompts, report, say)
    if settings.num_requests:
        await run_speculate_meshes(settings, prompts, speeds, report, clock, say)


def measure(
    settings: SpeculateSettings, prompts: tuple[tuple[int, ...], ...], report: Report, say: Say
) -> tuple[Speed, ...]:
    """All depths, batches and temperatures of one rank, in rounds in which the depths take turns. Blocks."""
    depths = (0, *settings.depths)
    longest = max(map(len, prompts)) + settings.num_output_tokens + 2 * (max(depths) + 1)
    runs: dict[Case, list[RunTimes]] = defaultdict(list)
    passes: dict[Case, list[PassTimes]] = defaultdict(list)
    cases = [
        Case(temperature=temperature, batch=batch, depth=depth)
        for temperature in settings.temperatures
        for batch in settings.batches
        for depth in depths
    ]
    folder, most = str(settings.model), max(settings.batches)
    with Remote("rank", speculating_ranks, folder, depths, most, longest) as rank:
        for case in cases:
            _run(rank, case, prompts, 2 * (case.depth + 1))  # a warm-up
        for number, order in enumerate(orders([str(depth) for depth in depths], settings.num_rounds), start=1):
            for temperature in settings.temperatures:
                for batch in settings.batches:
                    for depth in map(int, order):
                        case = Case(temperature=temperature, batch=batch, depth=depth)
                        runs[case].append(_run(rank, case, prompts, settings.num_output_tokens))
                        num_before = len(prompts[0]) + settings.num_output_tokens // 2
                        asked = (depth, batch, num_before, temperature, settings.num_passes)
                        passes[case].extend(rank.ask("passes", *asked))
            say(f"round {number} of {settings.num_rounds}: {len(cases)} cases")
        figures = [speculate_figures(case, runs[case], passes[case], runs[_without_guesses(case)]) for case in cases]
        speeds = report_speculation(report, figures)
        for temperature in settings.temperatures:
            if temperature:
                texts = runs[Case(temperature=temperature, batch=most, depth=0)][0].texts
                report_couplings(report, temperature, _couplings(rank, prompts, texts, max(depths), temperature))
    return speeds


def speculating_ranks(*arguments: Any) -> Closable:
    """Ranks, made in a process of their own: torch stays out of this one."""
    from loadtest.speculate_rank import SpeculatingRanks

    return SpeculatingRanks(*arguments)


def _without_guesses(case: Case) -> Case:
    return Case(temperature=case.temperature, batch=case.batch, depth=0)


def _run(rank: Process, case: Case, prompts: tuple[tuple[int, ...], ...], num_tokens: int) -> RunTimes:
    found: RunTimes = rank.ask("run", case.depth, prompts[: case.batch], num_tokens, case.temperature)
    return found


def _couplings(
    rank: Process,
    prompts: tuple[tuple[int, ...], ...],
    texts: tuple[tuple[int, ...], ...],
    depth: int,
    temperature: float,
) -> tuple[Coupling, ...]:
    """Of the first few answers, at the places up to `_COUPLED_DEPTH`."""
    found: tuple[Coupling, ...] = ()
    for prompt, text in list(zip(prompts, texts, strict=False))[:_NUM_COUPLED]:
        new = rank.ask("couplings", depth, (*prompt, *text), len(prompt), temperature)[:_COUPLED_DEPTH]
        found = add_couplings(found, new) if found else new
    return found


def _prompts(settings: SpeculateSettings) -> tuple[tuple[int, ...], ...]:
    tokenizer = Tokenizer.from_file(str(settings.model / "tokenizer.json"))
    return tuple(tuple(tokenizer.encode(text).ids) for text in _BEGINNINGS)
