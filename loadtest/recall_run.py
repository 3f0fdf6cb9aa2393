"""`recall`: how many recall questions a mesh answers rightly, and how many fewer it does with a fault in its transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from common.runtime.clock import Clock
from loadtest.client import Prompt, Sample
from loadtest.handoff import running
from loadtest.mesh import MeshSpec
from loadtest.recall import RecallTask, count_right, make_task
from loadtest.report import Report, Table, number, percent
from loadtest.rounds import Load, Target, run_rounds
from loadtest.settings import RecallSettings
from loadtest.statistics import Interval, wilson

HEALTHY = "healthy"
FAULTY = "faulty"
_SHOWN_ERRORS = 5

Say = Callable[[str], None]


class RecallFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One mesh's answers. A request that failed answered nothing rightly.

    `num_unlike_healthy` counts tasks whose answer is not, token by token, the healthy mesh's.
    """

    mode: str
    num_tasks: int
    num_errors: int
    num_questions: int
    num_right: int
    num_unlike_healthy: int
    accuracy: Interval


async def run_recall(settings: RecallSettings, report: Report, clock: Clock, say: Say) -> None:
    """Ask the tasks, and fill the report. With a fault, it is a failure if accuracy does not drop beyond both intervals."""
    tasks = tasks_of(settings)
    if settings.url:
        figures = await _ask([Target(mode=HEALTHY, url=settings.url)], tasks, settings, report, clock, say)
    else:
        async with running(meshes_of(settings), clock, say) as meshes:
            targets = [Target(mode=mesh.spec.mode, url=mesh.url, mesh=mesh) for mesh in meshes]
            figures = await _ask(targets, tasks, settings, report, clock, say)
    report_recall(report, figures, fault=settings.fault)


def meshes_of(settings: RecallSettings) -> tuple[MeshSpec, ...]:
    """The healthy mesh, and the one with the fault if there is one."""
    healthy = MeshSpec(
        mode=HEALTHY,
        model=settings.model,
        workers=(("prefill", settings.prefill), ("decode", settings.decode)),
        overrides=settings.overrides,
    )
    if not settings.fault:
        return (healthy,)
    planted = (*settings.overrides, f"prefill.failpoints={settings.fault}")
    return (healthy, msgspec.structs.replace(healthy, mode=FAULTY, overrides=planted))


def tasks_of(settings: RecallSettings) -> tuple[RecallTask, ...]:
    """The tasks of these settings: held out from training, whatever the seed. Raises ValueError for sizes that do not exist."""
    return tuple(
        make_task(settings.seed + place, num_pairs=settings.num_pairs, num_questions=settings.num_questions)
        for place in range(settings.num_tasks)
    )


async def _ask(  # noqa: PLR0917 - whom, what and how, then the ports
    targets: Sequence[Target],
    tasks: Sequence[RecallTask],
    settings: RecallSettings,
    report: Report,
    clock: Clock,
    say: Say,
) -> list[RecallFigures]:
    """Every task to every target once, in rounds that take turns."""
    per_round = settings.num_tasks // settings.num_rounds
    load = Load(num_rounds=1, concurrency=settings.concurrency, timeout_s=settings.request_timeout_s)
    samples: list[Sample] = []
    for number_of_round in range(settings.num_rounds):
        say(f"round {number_of_round + 1} of {settings.num_rounds}: {per_round} tasks to each of {len(targets)} meshes")
        first = number_of_round * per_round
        prompts = [
            Prompt(token_ids=task.prompt, num_output_tokens=len(task.answer), seed=first + place)
            for place, task in enumerate(tasks[first : first + per_round])
        ]
        turned = [*targets[number_of_round % len(targets) :], *targets[: number_of_round % len(targets)]]
        samples += [
            msgspec.structs.replace(sample, round=number_of_round, place=first + sample.place)
            for sample in await run_rounds(turned, prompts, load, clock=clock, say=lambda _line: None)
        ]
    for sample in [sample for sample in samples if sample.error][:_SHOWN_ERRORS]:
        report.fail(f"{sample.mode}, task {sample.place}: {sample.error}")
    by_mode = [[sample for sample in samples if sample.mode == target.mode] for target in targets]
    return [score(own[0].mode, tasks, own, reference=by_mode[0]) for own in by_mode]


def score(
    mode: str, tasks: Sequence[RecallTask], samples: Sequence[Sample], *, reference: Sequence[Sample]
) -> RecallFigures:
    """Count right answers, and those unlike `reference`'s; `place` of each sample is the place of its task."""
    wanted = {sample.place: sample.token_ids for sample in reference}
    asked = sum(len(tasks[sample.place].values) for sample in samples)
    right = sum(count_right(tasks[sample.place], sample.token_ids) for sample in samples if not sample.error)
    return RecallFigures(
        mode=mode,
        num_tasks=len(samples),
        num_errors=sum(bool(sample.error) for sample in samples),
        num_questions=asked,
        num_right=right,
        num_unlike_healthy=sum(sample.token_ids != wanted[sample.place] for sample in samples),
        accuracy=wilson(right, asked),
    )


def report_recall(report: Report, figures: Sequence[RecallFigures], *, fault: str) -> None:
    """The table, and with a fault the drop in points (hundredths of all questions)."""
    rows = tuple(
        (
            each.mode,
            str(each.num_tasks),
            str(each.num_errors),
            str(each.num_questions),
            str(each.num_right),
            percent(each.accuracy.share),
            f"{percent(each.accuracy.low)} to {percent(each.accuracy.high)}",
            str(each.num_unlike_healthy),
        )
        for each in figures
    )
    header = ("mesh", "tasks", "errors", "questions", "right", "accuracy", "95 % interval (Wilson)", "unlike healthy")
    report.add(Table(title="recall", header=header, rows=rows))
    report.put("recall", list(figures))
    if not fault:
        return
    healthy, faulty = figures
    points = 100 * (healthy.accuracy.share - faulty.accuracy.share)
    seen = faulty.accuracy.high < healthy.accuracy.low
    drop = (fault, number(points), "yes" if seen else "no")
    report.add(Table(title="planted fault", header=("fault", "drop in points", "intervals apart"), rows=(drop,)))
    report.put("fault", {"spec": fault, "drop_points": points, "intervals_apart": seen})
    if not seen:
        report.fail(f"the planted fault {fault!r} does not show: accuracy drops by {points:.2f} points only")
