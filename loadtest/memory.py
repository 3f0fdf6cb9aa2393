"""`memory`: what each process of a mesh holds while it serves thousands of short requests, and whether that grows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from common.engine.model.config import load_config
from common.runtime.clock import Clock, Deadline
from contracts.errors import PdmeshError
from loadtest.growth import GROWTH_AIM, MIB, Growth, growth_of
from loadtest.handoff import Say, running
from loadtest.mesh import Mesh
from loadtest.processes import Usage, name_processes, usage
from loadtest.report import Report, Table, number, percent
from loadtest.rounds import Load, Target, random_prompts, run_rounds
from loadtest.settings import MemorySettings

SETTLE_S: Final = 0.3
"""After the last answer, before a look: memory is given back a little later."""
BUS: Final = "nats"
"""Keeps messages by design, up to the limits of its streams: its growth is shown, and is no aim."""
_WARM_UP: Final = -1
_SAY_EVERY: Final = 10
_SHOWN_ERRORS: Final = 5


async def run_memory(settings: MemorySettings, report: Report, clock: Clock, say: Say) -> None:
    """Measure one mesh after the other, and fill the report."""
    figures: dict[str, list[Growth]] = {}
    for transport in settings.transports:
        spec = settings.mesh(transport)
        async with running([spec], clock, say) as (mesh,):
            figures[transport] = await _load(settings, mesh, report, clock, say)
    report_memory(report, figures, settings.num_requests)


async def _load(settings: MemorySettings, mesh: Mesh, report: Report, clock: Clock, say: Say) -> list[Growth]:
    """All requests of one mesh, and what its processes held after each block of them."""
    vocab_size = settings.vocab_size or load_config(settings.model).vocab_size
    target = Target(mode=mesh.spec.mode, url=mesh.url, mesh=mesh)
    load = Load(num_rounds=1, concurrency=settings.concurrency, timeout_s=settings.request_timeout_s)

    async def send(count: int, block: int) -> None:
        asked = random_prompts(
            count=count,
            num_prompt_tokens=settings.num_prompt_tokens,
            num_output_tokens=settings.num_output_tokens,
            vocab_size=vocab_size,
            seed=settings.seed + block,
        )
        samples = await run_rounds([target], asked, load, clock=clock, say=_be_silent)
        for sample in [sample for sample in samples if sample.error][:_SHOWN_ERRORS]:
            report.fail(f"{mesh.spec.mode}, block {block}, request {sample.place}: {sample.error}")

    async def look() -> dict[int, Usage]:
        await clock.sleep(SETTLE_S)
        try:
            return await asyncio.to_thread(lambda: {pid: usage(pid) for pid in names})
        except OSError as error:
            raise PdmeshError(f"a process of {mesh.spec.mode} has ended: {error}") from error

    warm = Deadline.after(clock, settings.warm_up_s)
    await send(settings.num_warm_ups, _WARM_UP)
    while not warm.passed:
        await send(settings.sample_every, _WARM_UP)
    names = await asyncio.to_thread(name_processes, mesh.pid)
    say(f"{mesh.spec.mode}: {len(names)} processes")
    seen = [await look()]
    num_blocks = settings.num_requests // settings.sample_every
    for block in range(num_blocks):
        await send(settings.sample_every, block)
        seen.append(await look())
        if (block + 1) % _SAY_EVERY == 0 or block + 1 == num_blocks:
            say(f"{(block + 1) * settings.sample_every} of {settings.num_requests} requests")
    requests = [place * settings.sample_every for place in range(len(seen))]
    return [growth_of(name, requests, [each[pid] for each in seen]) for pid, name in names.items()]


def report_memory(report: Report, figures: Mapping[str, Sequence[Growth]], num_requests: int) -> None:
    """A table a transport, and an aim for each process but the bus."""
    for transport, processes in figures.items():
        rows = tuple(
            (
                each.name,
                number(each.own.level / MIB),
                number(each.own.growth / MIB, 3),
                percent(each.own.share),
                number(each.resident.level / MIB),
                percent(each.resident.share),
                number(each.fds.level, 1),
                number(each.fds.growth),
                number(each.threads.level, 1),
                number(each.threads.growth),
            )
            for each in processes
        )
        header = ("process", "own MiB", "growth MiB", "share", "RSS MiB", "share", "fds", "growth", "threads", "growth")
        title = f"growth over {num_requests} requests, {transport} (own: PSS without mapped files)"
        report.add(Table(title=title, header=header, rows=rows))
        for each in processes:
            if each.name == BUS:
                continue
            shown = f"{percent(max(each.own.share, each.resident.share))} (aim: below {GROWTH_AIM:.0%}, no more descriptors or threads)"
            report.aim(f"{transport}, {each.name} does not grow", shown, met=each.is_steady)
    report.put("memory", figures)


def _be_silent(_: str) -> None:
    """What `run_rounds` calls a round is a block here."""
