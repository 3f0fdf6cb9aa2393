"""`handoff` and `contract`: the same requests through prefill/decode and through mixed workers, in one run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from common.engine.model.config import load_config
from common.runtime.clock import Clock
from loadtest.client import Prompt, Sample
from loadtest.comparison import Comparison
from loadtest.events import destination_of, handoffs_of
from loadtest.mesh import Mesh, MeshSpec
from loadtest.push_figures import PushFigures, report_push
from loadtest.push_shapes import BLOCK_TOKENS, large_shape, model_shape
from loadtest.push_throughput import NUM_SEQUENCES, bench
from loadtest.report import Report
from loadtest.rounds import Load, Target, random_prompts, run_rounds
from loadtest.settings import LoadSettings

_LARGE_NAME = "4B model (bf16)"
_SAFETY_CONCURRENCY = 2
_SAFETY = ", two at once"

Say = Callable[[str], None]


@asynccontextmanager
async def running(specs: Sequence[MeshSpec], clock: Clock, say: Say) -> AsyncIterator[list[Mesh]]:
    """Start meshes one after the other, and stop all of them together at the end, however it comes. Raises MeshFailed."""
    with tempfile.TemporaryDirectory(prefix="pdmesh-loadtest-") as folder:
        meshes: list[Mesh] = []
        try:
            for place, spec in enumerate(specs):
                logs = tempfile.mkdtemp(prefix=f"mesh-{place}-", dir=folder)
                meshes.append(await Mesh.start(spec, Path(logs), clock, say))
            yield meshes
        finally:
            async with asyncio.TaskGroup() as group:
                stops = {mesh: group.create_task(mesh.stop(), name=f"stop-{mesh.spec.mode}") for mesh in meshes}
            for mesh, stop in stops.items():
                if not stop.result():
                    say(f"{mesh.spec.mode} did not drain by itself")


async def run_handoff(settings: LoadSettings, report: Report, clock: Clock, say: Say) -> None:
    """Measure, and fill the report: times, ratios and answers; phases; handoff gap; bytes; push throughput."""
    async with running(settings.meshes, clock, say) as meshes:
        comparison = await _load(settings, meshes, clock, say)
        destination = await destination_of(meshes[0], say)
    comparison.report_times(report)
    comparison.report_phases(report)
    comparison.report_gap(report)
    comparison.report_bytes(report, destination)
    if settings.push_repeats:
        report_push(report, measure_pushes(settings, clock, say))


async def run_contract(settings: LoadSettings, report: Report, clock: Clock, say: Say) -> None:
    """The test contract: one request at a time in rounds, then two at once for safety; two tables, and answers compared."""
    async with running(settings.meshes, clock, say) as meshes:
        comparison = await _load(settings, meshes, clock, say)
    comparison.report_times(report)
    comparison.report_phases(report)
    comparison.report_gap(report)


async def _load(settings: LoadSettings, meshes: Sequence[Mesh], clock: Clock, say: Say) -> Comparison:
    """All requests of the settings, then what the event streams tell of them."""
    targets = [Target(mode=mesh.spec.mode, url=mesh.url, mesh=mesh) for mesh in meshes]
    comparison = Comparison([target.mode for target in targets])
    vocab_size = settings.vocab_size or load_config(settings.model).vocab_size

    def prompts(count: int, length: int, seed: int) -> tuple[Prompt, ...]:
        return random_prompts(
            count=count,
            num_prompt_tokens=length,
            num_output_tokens=settings.num_output_tokens,
            vocab_size=vocab_size,
            seed=seed,
        )

    for length in settings.prompt_tokens:
        kind = f"{length} tokens"
        say(f"{kind}: {settings.num_warm_ups} warm-ups, then {settings.num_rounds} rounds")
        load = Load(
            num_rounds=settings.num_rounds, concurrency=settings.concurrency, timeout_s=settings.request_timeout_s
        )
        asked = prompts(settings.num_requests, length, settings.seed)
        warm_up = prompts(settings.num_warm_ups, length, settings.seed + 1)
        comparison.add_samples(kind, await run_rounds(targets, asked, load, warm_up=warm_up, clock=clock, say=say))
    if settings.safety_requests:
        for length in settings.prompt_tokens:
            safety = Load(num_rounds=1, concurrency=_SAFETY_CONCURRENCY, timeout_s=settings.request_timeout_s)
            asked = prompts(settings.safety_requests, length, settings.seed)
            comparison.add_samples(
                f"{length} tokens{_SAFETY}", await run_rounds(targets, asked, safety, clock=clock, say=say)
            )
    for mesh in meshes:
        for kind in comparison.kinds:
            samples: list[Sample] = comparison.samples_of(kind, mesh.spec.mode)
            comparison.add_handoffs(kind, mesh.spec.mode, await handoffs_of(mesh, samples, clock, say))
    return comparison


def measure_pushes(settings: LoadSettings, clock: Clock, say: Say) -> list[PushFigures]:
    """Pushes of the longest prompt: of this model's caches and of a large model's, from two ranks to one."""
    num_tokens = max(settings.prompt_tokens)
    num_blocks = NUM_SEQUENCES * -(-num_tokens // BLOCK_TOKENS)
    shapes = {
        f"{settings.model.resolve().name} (float32)": model_shape(settings.model, num_blocks, NUM_SEQUENCES),
        _LARGE_NAME: large_shape(num_blocks, NUM_SEQUENCES),
    }
    figures: list[PushFigures] = []
    for name, shape in shapes.items():
        say(f"pushes of {num_tokens} tokens, {name}")
        with bench(name, shape, source_tp=2, destination_tp=1, clock=clock) as each:
            figures += [
                each.measure(
                    num_tokens=num_tokens,
                    repeats=settings.push_repeats,
                    scattered=scattered,
                    full_queue=full_queue,
                )
                for scattered in (False, True)
                for full_queue in (False, True)
            ]
    return figures
