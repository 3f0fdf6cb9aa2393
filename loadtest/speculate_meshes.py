"""`speculate` on running meshes: what guesses gain where a client sees it, behind a handoff and without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from common.bus.port import Bus
from common.runtime.clock import Clock, Deadline
from contracts.errors import PdmeshError
from contracts.events import HandoffEvent
from loadtest.client import Prompt, Sample
from loadtest.handoff import Say, running
from loadtest.mesh import Mesh, MeshSpec
from loadtest.report import Report, Table, number, percent
from loadtest.rounds import Load, Target, run_rounds
from loadtest.settings import PD_MODE
from loadtest.speculate_figures import SPEED_AIM, Speed
from loadtest.speculate_settings import SpeculateSettings
from loadtest.statistics import Spread, ratio, spread
from services.launcher.bus import with_bus
from services.launcher.stream import read_all

MIXED: Final = "mixed"
_KINDS: Final = (MIXED, PD_MODE)
_SETTLE_S: Final = 10.0
_POLL_S: Final = 0.3
_SHOWN_ERRORS: Final = 5


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request: number `place` of a round."""

    round: int
    place: int
    token_ids: tuple[int, ...]


class MeshFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What clients and events of one mesh told: `num_steps` decode steps for all tokens but the first of each answer.

    `batch` requests were under way at once. `right` counts guesses by place, of `num_drafted` in all.
    """

    kind: str
    depth: int
    batch: int
    token_ms: Spread
    num_tokens: int
    num_steps: int
    num_drafted: int
    right: tuple[int, ...]
    answers: tuple[Answer, ...]

    @property
    def num_right(self) -> int:
        """Guesses that were right."""
        return sum(self.right)

    def answers_as(self, other: MeshFigures) -> tuple[int, int]:
        """How many answers are the same as `other`'s, of those that both have."""
        theirs = {(each.round, each.place): each.token_ids for each in other.answers}
        found = [
            each.token_ids == theirs.get((each.round, each.place))
            for each in self.answers
            if (each.round, each.place) in theirs
        ]
        return sum(found), len(found)

    @property
    def tokens_per_step(self) -> float:
        """What a step gave a request."""
        return self.num_tokens / self.num_steps


async def run_speculate_meshes(  # noqa: PLR0917 - the one call of a command
    settings: SpeculateSettings,
    prompts: Sequence[tuple[int, ...]],
    speeds: Sequence[Speed],
    report: Report,
    clock: Clock,
    say: Say,
) -> None:
    """Of each kind a mesh at each depth, and one without guesses, in rounds in which they take turns. `speeds` are the engine's."""
    found: list[MeshFigures] = []
    for kind in _KINDS:
        found += await _measure(settings, kind, prompts, report, clock, say)
    report_meshes(report, found, speeds)


async def _measure(  # noqa: PLR0917 - one kind
    settings: SpeculateSettings, kind: str, prompts: Sequence[tuple[int, ...]], report: Report, clock: Clock, say: Say
) -> list[MeshFigures]:
    depths = (0, *settings.depths)
    specs = [mesh_spec(settings, kind, depth) for depth in depths]
    asked = [
        Prompt(token_ids=prompts[place % len(prompts)], num_output_tokens=settings.num_output_tokens, seed=place)
        for place in range(settings.num_requests)
    ]
    found: list[MeshFigures] = []
    async with running(specs, clock, say) as meshes:
        targets = [Target(mode=mesh.spec.mode, url=mesh.url, mesh=mesh) for mesh in meshes]
        for batch in settings.batches:
            load = Load(num_rounds=settings.num_rounds, concurrency=batch, timeout_s=settings.request_timeout_s)
            samples = await run_rounds(targets, asked, load, warm_up=asked[:1], clock=clock, say=say)
            for mesh, depth in zip(meshes, depths, strict=True):
                ours = [each for each in samples if each.mode == mesh.spec.mode]
                good, told = await _heard(mesh, depth, batch, ours, report, clock, say)
                figures = mesh_figures(kind, depth, batch, good, told)
                found += [] if figures is None else [figures]
    return found


def mesh_spec(settings: SpeculateSettings, kind: str, depth: int) -> MeshSpec:
    """One worker that does it all, or a pair; both of a pair keep the draft's cache."""
    roles = ("mixed",) if kind == MIXED else ("prefill", "decode")
    guessing = f",num_speculative_tokens={depth}" if depth else ""
    workers = tuple((role, f"tp=1{guessing}") for role in roles)
    return MeshSpec(mode=f"{kind}, depth {depth}", model=settings.model, workers=workers)


async def _heard(  # noqa: PLR0917 - one mesh
    mesh: Mesh, depth: int, batch: int, samples: Sequence[Sample], report: Report, clock: Clock, say: Say
) -> tuple[list[Sample], list[HandoffEvent]]:
    """The answers of a mesh, and what its events say of guesses; nothing where it does not tell of all of them."""
    name = f"{mesh.spec.mode}, batch {batch}"
    failed = [sample.error for sample in samples if sample.error]
    for error in failed[:_SHOWN_ERRORS]:
        report.fail(f"{name}: {error}")
    good = [sample for sample in samples if not sample.error]
    told = await _ends(mesh, good, clock, say) if depth else []
    if depth and len(told) != len(good):
        report.fail(f"{name}: events tell of the guesses of {len(told)} requests of {len(good)}")
        return [], []
    return good, told


def mesh_figures(
    kind: str, depth: int, batch: int, samples: Sequence[Sample], told: Sequence[HandoffEvent]
) -> MeshFigures | None:
    """Sum up the answers of a mesh, and what its events say of guesses; None without an answer."""
    token_ms = spread([each.inter_token_ms for each in samples if each.inter_token_ms is not None])
    if token_ms is None:
        return None
    num_tokens = sum(len(each.token_ids) - 1 for each in samples)
    # A mixed worker counts the step that gave the first token; a pair's decode worker has not seen it.
    firsts = len(told) if kind == MIXED else 0
    places = max((len(each.accepted_at) for each in told), default=0)
    return MeshFigures(
        kind=kind,
        depth=depth,
        batch=batch,
        token_ms=token_ms,
        num_tokens=num_tokens,
        num_steps=sum(each.num_steps or 0 for each in told) - firsts if depth else num_tokens,
        num_drafted=sum(each.num_drafted or 0 for each in told),
        right=tuple(
            sum(each.accepted_at[place] for each in told if place < len(each.accepted_at)) for place in range(places)
        ),
        answers=tuple(Answer(round=each.round, place=each.place, token_ids=each.token_ids) for each in samples),
    )


async def _ends(mesh: Mesh, samples: Sequence[Sample], clock: Clock, say: Say) -> list[HandoffEvent]:
    """The events that tell of guesses, of requests since the first of `samples`. They come in the background: waits for the last."""
    if not samples:
        return []
    began_ns = min(sample.sent_ns for sample in samples)

    async def read(bus: Bus) -> list[HandoffEvent]:
        deadline = Deadline.after(clock, _SETTLE_S)
        while True:
            events = (await read_all(bus)).events
            told = [event for event in events if event.num_steps is not None and event.at_ns >= began_ns]
            if deadline.passed or len(told) >= len(samples):
                return told
            await clock.sleep(_POLL_S)

    return await with_bus(mesh.nats_url, read, say=say)


def report_meshes(report: Report, found: Sequence[MeshFigures], speeds: Sequence[Speed]) -> None:
    """A table, and aims: speed beside what the engine's passes allow, and guesses alike in both kinds. Other answers fail the report."""
    by_name = {(each.kind, each.batch, each.depth): each for each in found}
    rows = []
    for each in found:
        plain = by_name.get((each.kind, each.batch, 0))
        if plain is None:
            raise PdmeshError(f"nothing was measured of {each.kind}, batch {each.batch}, without guesses")
        measured = plain.token_ms.p50 / each.token_ms.p50
        equal, compared = each.answers_as(plain)
        rows.append(
            (
                each.kind,
                str(each.batch),
                str(each.depth),
                number(each.token_ms.p50),
                number(each.token_ms.p99),
                number(each.tokens_per_step),
                " ".join(f"{count / each.num_steps:.2f}" for count in each.right) or "-",
                percent(ratio(each.num_right, each.num_drafted), 1),
                number(measured) if each.depth else "-",
                f"{equal} of {compared}",
            )
        )
        if not each.depth:
            continue
        name = f"{each.kind}, batch {each.batch}, depth {each.depth}"
        if equal < compared:
            report.fail(f"{name}: {compared - equal} of {compared} answers differ from those without guesses")
        allowed = [
            speed
            for speed in speeds
            if (speed.case.temperature, speed.case.batch, speed.case.depth) == (0, each.batch, each.depth)
        ]
        for speed in allowed:
            # Per step, so that prompts of other texts with other guesses do not count.
            possible = speed.possible / speed.tokens_per_turn * each.tokens_per_step
            shown = f"{percent(measured / possible, 0)} of {possible:.2f} times; wanted {SPEED_AIM:.0%}"
            report.aim(f"speed of {name}", shown, met=measured / possible >= SPEED_AIM)
    for batch, depth in dict.fromkeys((each.batch, each.depth) for each in found if each.depth):
        pair, mixed = by_name.get((PD_MODE, batch, depth)), by_name.get((MIXED, batch, depth))
        if pair is not None and mixed is not None:
            alike = (pair.right, pair.num_drafted) == (mixed.right, mixed.num_drafted)
            shown = f"{pair.num_right} of {pair.num_drafted}, and {mixed.num_right} of {mixed.num_drafted}"
            report.aim(f"guesses of {PD_MODE} as of {MIXED}, batch {batch}, depth {depth}", shown, met=alike)
    header = (
        "mesh",
        "batch",
        "depth",
        "ms a token p50",
        "p99",
        "tokens a step",
        "right a step, by place",
        "right of all",
        "times faster",
        "same answers",
    )
    legend = (
        f"one worker that does it all ({MIXED}), or a prefill and a decode worker ({PD_MODE})",
        "requests under way at once",
        "guesses a step",
        "time by the clock for a token behind the first one, the median of all answers",
        "the 99th percentile of the same",
        "what a decode step gave a request: its right guesses, and one token more",
        "share of decode steps in which the first guess was right, the first two, ...",
        "right guesses of all that were made",
        "ms a token without guesses over this",
        "answers that are those without guesses; anything less fails the run",
    )
    title = "meshes, as their clients see them"
    report.add(Table(title=title, header=header, rows=tuple(rows), num_names=3, legend=legend))
    report.put("meshes", tuple(found))
