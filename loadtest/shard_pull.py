"""`shard-pull`: serial pull, parallel pull and push beside each other, over links without latency and over slower ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from common.bus.port import Bus
from common.engine.model.config import load_config
from common.runtime.clock import Clock
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import PdmeshError
from contracts.events import EventName, HandoffEvent
from contracts.requests import Refused
from contracts.subjects import WorkerVerb
from contracts.workers import SetRefused, SettingChanged, SetWorker
from loadtest.client import Sample
from loadtest.events import handoffs_of
from loadtest.handoff import Say, running
from loadtest.mesh import Mesh, MeshSpec
from loadtest.phases import Handoff
from loadtest.report import Report, Table, number, percent
from loadtest.rounds import Load, Target, orders, random_prompts, run_rounds
from loadtest.settings import ShardPullSettings
from loadtest.statistics import Spread, spread
from services.launcher.bus import with_bus
from services.launcher.stream import read_all

WAIT_SHARE: Final = 0.44
"""The share of a restore that waiting for shards takes, one after the other, at the latency that is looked for."""
WAIT_AIM: Final = 0.30
SERIAL: Final = "pull, serial"
PARALLEL: Final = "pull, parallel"
PUSH: Final = "push"
MODES: Final = (SERIAL, PARALLEL, PUSH)
_NUM_OUTPUT_TOKENS: Final = 4
_SHOWN_ERRORS: Final = 5


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """One handoff, in ms: `restore` from the end of prefill's compute to decode's first step, `wait` for shards, `merge` of all roles.

    `pull` is all of the pull by decode's clock. A push has none of the last three.
    """

    restore: float
    wait: float | None = None
    merge: float | None = None
    pull: float | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The restores of one mode over links of one latency. Spreads in ms."""

    mode: str
    latency_ms: int
    ttft: Spread
    restore: Spread
    wait: Spread | None
    merge: Spread | None
    pull: Spread | None


async def run_shard_pull(settings: ShardPullSettings, report: Report, clock: Clock, say: Say) -> None:
    """Measure each topology without latency, find the latency, measure there, and fill the report."""
    figures: dict[str, tuple[Figures, ...]] = {}
    for prefill in settings.prefill:
        near = await _measure(settings, prefill, 0, report, clock, say)
        latencies = settings.latencies_ms or (latency_for(_of(near, SERIAL), num_shards(prefill)),)
        far: tuple[Figures, ...] = ()
        for latency_ms in latencies:
            far += await _measure(settings, prefill, latency_ms, report, clock, say)
        figures[f"prefill {prefill}, decode {settings.decode}"] = near + far
    report_shard_pull(report, figures)


def num_shards(prefill: str) -> int:
    """Source ranks of a prefill worker's SPEC."""
    found = [word.partition("=")[2] for word in prefill.split(",") if word.startswith("tp=")]
    return int(found[0]) if found else 1


def latency_for(serial: Figures, shards: int) -> int:
    """The latency of each link, in whole ms, at which waiting is `WAIT_SHARE` of a serial restore.

    A latency L adds `shards * L` to both: `(wait + shards * L) / (restore + shards * L) = WAIT_SHARE` is solved for it.
    """
    if serial.wait is None:
        raise PdmeshError("the events of a pull do not tell how long it waited")
    missing = WAIT_SHARE * serial.restore.p50 - serial.wait.p50
    return max(1, round(missing / (1 - WAIT_SHARE) / shards))


async def _measure(  # noqa: PLR0917 - a topology at a latency
    settings: ShardPullSettings, prefill: str, latency_ms: int, report: Report, clock: Clock, say: Say
) -> tuple[Figures, ...]:
    """All modes over links of one latency, in rounds in which they take turns."""
    vocab_size = load_config(settings.model).vocab_size
    link = f"link:ms={latency_ms},mbs={settings.mb_per_s}"
    shaped = latency_ms > 0 or settings.mb_per_s > 0

    def spec(mode: str, side: str, extra: str) -> MeshSpec:
        overrides = (f"{side}.failpoints={link}",) if shaped else ()
        workers = (("prefill", prefill), ("decode", f"{settings.decode}{extra}"))
        return MeshSpec(mode=mode, model=settings.model, workers=workers, overrides=(*overrides, *settings.overrides))

    specs = [spec("pull", "decode", f",transfer=pull,pull={settings.pull}"), spec("push", "prefill", "")]
    load = Load(num_rounds=1, concurrency=1, timeout_s=settings.request_timeout_s)
    samples: dict[str, list[Sample]] = {mode: [] for mode in MODES}
    async with running(specs, clock, say) as (pulling, pushing):
        for round_number, order in enumerate(orders(MODES, settings.num_rounds)):
            asked = random_prompts(
                count=settings.num_requests,
                num_prompt_tokens=settings.num_prompt_tokens,
                num_output_tokens=_NUM_OUTPUT_TOKENS,
                vocab_size=vocab_size,
                seed=settings.seed + round_number,
            )
            for mode in order:
                mesh = pushing if mode == PUSH else pulling
                if mode != PUSH:
                    await _set_parallel(mesh, parallel=mode == PARALLEL, say=say)
                target = Target(mode=mode, url=mesh.url, mesh=mesh)
                warm_up = () if round_number else asked[: settings.num_warm_ups]
                samples[mode] += await run_rounds([target], asked, load, warm_up=warm_up, clock=clock, say=_be_silent)
            say(f"prefill {prefill}, {latency_ms} ms a link: round {round_number + 1} of {settings.num_rounds}")
        return tuple(
            [await _figures(mode, latency_ms, samples[mode], (pulling, pushing), report, clock, say) for mode in MODES]
        )


async def _figures(  # noqa: PLR0917 - the samples of one mode, and where their events are
    mode: str,
    latency_ms: int,
    samples: Sequence[Sample],
    meshes: tuple[Mesh, Mesh],
    report: Report,
    clock: Clock,
    say: Say,
) -> Figures:
    mesh = meshes[1] if mode == PUSH else meshes[0]
    for sample in [sample for sample in samples if sample.error][:_SHOWN_ERRORS]:
        report.fail(f"{mode}, request {sample.place}: {sample.error}")
    good = [sample for sample in samples if not sample.error]
    told = await handoffs_of(mesh, good, clock, say)
    if len(told) != len(good):
        report.fail(f"{mode}: the event stream tells of {len(told)} requests; {len(good)} were answered")
    events = await with_bus(mesh.nats_url, _events, say=say)
    return figures_of(
        mode, latency_ms, good, restores_of(told, events, parallel={SERIAL: False, PARALLEL: True}.get(mode))
    )


async def _events(bus: Bus) -> list[HandoffEvent]:
    return list((await read_all(bus)).events)


def restores_of(handoffs: Sequence[Handoff], events: Sequence[HandoffEvent], *, parallel: bool | None) -> list[Restore]:
    """The restores of `handoffs`. Raises `PdmeshError` for one that was pulled in another way than `parallel` says; None: pushed."""
    unlocked = {event.handoff_id: event for event in events if event.event is EventName.REQUEST_UNLOCKED}
    steps = {event.handoff_id: event.started_ns for event in events if event.event is EventName.TAKEN_OVER}
    computed: dict[str, int] = {}
    for event in events:
        if event.event is EventName.LAYER_COMPUTED:
            computed[event.handoff_id] = max(computed.get(event.handoff_id, 0), event.at_ns)
    found: list[Restore] = []
    for each in handoffs:
        name = each.handoff_id
        began, ended = computed.get(name), steps.get(name)
        pull = unlocked.get(name)
        if (None if pull is None else pull.parallel) is not parallel:
            raise PdmeshError(f"{name} was moved in another way than it was set to")
        if began is None or ended is None:
            continue
        restore = (ended - began) / 1e6
        if pull is None:
            found.append(Restore(restore=restore))
        else:
            found.append(Restore(restore=restore, wait=pull.wait_ms, merge=pull.merge_ms, pull=pull.total_ms))
    return found


def figures_of(mode: str, latency_ms: int, samples: Sequence[Sample], restores: Sequence[Restore]) -> Figures:
    """Sum up one mode. Raises `PdmeshError` when nothing is known of it."""
    ttft = spread([sample.ttft_ms for sample in samples])
    restore = spread([each.restore for each in restores])
    if ttft is None or restore is None:
        raise PdmeshError(f"{mode}: the events tell of no restore")
    return Figures(
        mode=mode,
        latency_ms=latency_ms,
        ttft=ttft,
        restore=restore,
        wait=spread([each.wait for each in restores if each.wait is not None]),
        merge=spread([each.merge for each in restores if each.merge is not None]),
        pull=spread([each.pull for each in restores if each.pull is not None]),
    )


def report_shard_pull(report: Report, figures: dict[str, tuple[Figures, ...]]) -> None:
    """A table for each topology, with parallel against serial, and the aim at the latency that was looked for."""
    header = (
        "links",
        "mode",
        "n",
        "TTFT ms",
        "restore p50",
        "p99",
        "pull wait p50",
        "merge p50",
        "pull p50",
        "restore",
        "wait",
    )
    for topology, all_of in figures.items():
        rows: list[tuple[str, ...]] = []
        for each in all_of:
            serial = _of([one for one in all_of if one.latency_ms == each.latency_ms], SERIAL)
            spreads = (each.wait, each.merge, each.pull)
            shown = ["-" if one is None else number(one.p50) for one in spreads]
            rows.append(
                (
                    f"{each.latency_ms} ms",
                    each.mode,
                    str(each.restore.count),
                    number(each.ttft.p50),
                    number(each.restore.p50),
                    number(each.restore.p99),
                    *shown,
                    _change(each.restore, serial.restore),
                    _change(each.wait, serial.wait),
                )
            )
        title = f"{topology}: from the end of prefill's compute to decode's first step (last columns: against serial)"
        report.add(Table(title=title, header=header, rows=tuple(rows), num_names=2))
        far = [one for one in all_of if one.latency_ms > 0]
        if far:
            serial, parallel = _of(far, SERIAL), _of(far, PARALLEL)
            if serial.wait is not None and parallel.wait is not None:
                fell = 1 - parallel.wait.p50 / serial.wait.p50
                share = serial.wait.p50 / serial.restore.p50
                shown_aim = (
                    f"{percent(fell)} (aim: at least {WAIT_AIM:.0%}), where serial pull wait is {percent(share)} of the restore; "
                    f"restore {_change(parallel.restore, serial.restore)}"
                )
                report.aim(f"{topology}: reading side by side shortens the wait", shown_aim, met=fell >= WAIT_AIM)
    report.put("shard_pull", figures)


async def _set_parallel(mesh: Mesh, *, parallel: bool, say: Say) -> None:
    """Change the decode worker's setting while it runs. Raises `PdmeshError` when it refuses."""
    worker_id = mesh.spec.worker_ids("decode")[0]

    async def change(bus: Bus) -> None:
        message = SetWorker(key="parallel_shard_pull", value=str(int(parallel)))
        reply = await bus.request(subjects.worker_rpc("decode", worker_id, WorkerVerb.SET), encode(message))
        answer: SettingChanged | SetRefused | Refused = decode(
            reply.data,
            SettingChanged | SetRefused | Refused,  # type: ignore[arg-type]  # a union is not a type
        )
        if not isinstance(answer, SettingChanged):
            raise PdmeshError.from_info(answer.error)

    await with_bus(mesh.nats_url, change, say=say)


def _of(figures: Sequence[Figures], mode: str) -> Figures:
    return next(each for each in figures if each.mode == mode)


def _change(one: Spread | None, other: Spread | None) -> str:
    if one is None or other is None or one is other:
        return "-"
    return f"{one.p50 / other.p50 - 1:+.1%}" if other.p50 else "-"


def _be_silent(_: str) -> None:
    """What `run_rounds` calls a round is a part of one here."""
