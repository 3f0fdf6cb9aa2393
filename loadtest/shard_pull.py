"""`shard-pull`: serial pull, parallel pull and push beside each other, over links without latency and over slower ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from common.bus.port import Bus
from common.engine.model.config import load_config
from common.runtime.clock import Clock
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import PdmeshError
from contracts.events import HandoffEvent
from contracts.requests import Refused
from contracts.subjects import WorkerVerb
from contracts.workers import SetRefused, SettingChanged, SetWorker
from loadtest.client import Sample
from loadtest.events import handoffs_of
from loadtest.handoff import Say, running
from loadtest.mesh import Mesh, MeshSpec
from loadtest.report import Report
from loadtest.rounds import Load, Target, orders, random_prompts, run_rounds
from loadtest.settings import ShardPullSettings
from loadtest.shard_pull_figures import (
    MODES,
    PARALLEL,
    PUSH,
    SERIAL,
    Figures,
    figures_at,
    figures_of,
    latency_for,
    num_shards,
    report_shard_pull,
    restores_of,
)
from services.launcher.bus import with_bus
from services.launcher.stream import read_all

_NUM_OUTPUT_TOKENS: Final = 4
_SHOWN_ERRORS: Final = 5


async def run_shard_pull(settings: ShardPullSettings, report: Report, clock: Clock, say: Say) -> None:
    """Measure each topology without latency, find the latency, measure there, and fill the report.

    Raises `PdmeshError` when nothing can be measured.
    """
    figures: dict[str, tuple[Figures, ...]] = {}
    for prefill in settings.prefill:
        near = await _measure(settings, prefill, 0, report, clock, say)
        latencies = settings.latencies_ms or (latency_for(figures_at(near, SERIAL, 0), num_shards(prefill)),)
        far: tuple[Figures, ...] = ()
        for latency_ms in filter(None, latencies):
            far += await _measure(settings, prefill, latency_ms, report, clock, say)
        figures[f"prefill {prefill}, decode {settings.decode}"] = near + far
    report_shard_pull(report, figures)


async def _measure(  # noqa: PLR0917 - a topology at a latency
    settings: ShardPullSettings, prefill: str, latency_ms: int, report: Report, clock: Clock, say: Say
) -> tuple[Figures, ...]:
    """All modes over links of one latency, in rounds in which they take turns."""
    vocab_size = settings.vocab_size or load_config(settings.model).vocab_size
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
    bad = [f"{mode}, request {sample.place}: {sample.error}" for sample in samples if sample.error]
    good = [sample for sample in samples if not sample.error]
    if not good:
        raise PdmeshError("; ".join(["no request was answered", *bad[:_SHOWN_ERRORS]]))
    for each in bad[:_SHOWN_ERRORS]:
        report.fail(each)
    told = await handoffs_of(mesh, good, clock, say)
    if len(told) != len(good):
        report.fail(f"{mode}: the event stream tells of {len(told)} requests; {len(good)} were answered")
    events = await with_bus(mesh.nats_url, _events, say=say)
    return figures_of(
        mode, latency_ms, good, restores_of(told, events, parallel={SERIAL: False, PARALLEL: True}.get(mode))
    )


async def _events(bus: Bus) -> list[HandoffEvent]:
    return list((await read_all(bus)).events)


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


def _be_silent(_: str) -> None:
    """What `run_rounds` calls a round is a part of one here."""
