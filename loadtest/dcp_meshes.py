"""`dcp` on running meshes: bytes of a handoff into groups of ranks, and how much longer a context the same memory takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from common.engine.model.config import load_config
from common.runtime.clock import Clock
from loadtest.client import Prompt, Sample
from loadtest.dcp_settings import DcpSettings
from loadtest.events import destination_of, handoffs_of
from loadtest.figures import ByteFigures, byte_figures
from loadtest.handoff import Say, running
from loadtest.mesh import Mesh, MeshSpec
from loadtest.report import Report, Table, number
from loadtest.rounds import Load, Target, random_prompts, run_rounds

_NUM_OUTPUT_TOKENS: Final = 4
_LENGTHS: Final = (17, 100, 250)
"""Prompts of the handoffs that are counted: none fills its last block, and the shortest leaves ranks without a token."""


class MeshFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one decode worker showed. `num_tokens` is what its blocks hold; `region_bytes` what each rank sets aside for caches."""

    decode: str
    dcp: int
    num_tokens: int
    region_bytes: int
    bytes_of: dict[int, ByteFigures]
    longest_served: bool
    one_more_refused: bool
    answers: tuple[tuple[int, ...], ...]


async def run_dcp_meshes(settings: DcpSettings, report: Report, clock: Clock, say: Say) -> None:
    """One mesh after the other, each with another decode worker of the same number of blocks a rank."""
    found: list[MeshFigures] = []
    for decode in settings.decode:
        workers = (("prefill", settings.prefill), ("decode", f"{decode},num_blocks={settings.num_blocks}"))
        spec = MeshSpec(mode=f"decode {decode}", model=settings.model, workers=workers, overrides=settings.overrides)
        async with running([spec], clock, say) as (mesh,):
            found.append(await _measure(settings, decode, mesh, report, clock, say))
    report_meshes(report, found)


async def _measure(  # noqa: PLR0917 - one mesh
    settings: DcpSettings, decode: str, mesh: Mesh, report: Report, clock: Clock, say: Say
) -> MeshFigures:
    vocab_size = load_config(settings.model).vocab_size
    destination = await destination_of(mesh, say)
    first = destination.ranks[0]
    capacity = first.num_blocks * first.block_size * first.coordinates.dcp_size

    async def ask(length: int, count: int) -> list[Sample]:
        prompts: Sequence[Prompt] = random_prompts(
            count=count,
            num_prompt_tokens=length,
            num_output_tokens=_NUM_OUTPUT_TOKENS,
            vocab_size=vocab_size,
            seed=settings.seed,
        )
        load = Load(num_rounds=1, concurrency=1, timeout_s=settings.request_timeout_s)
        target = Target(mode=mesh.spec.mode, url=mesh.url, mesh=mesh)
        return await run_rounds([target], prompts, load, clock=clock, say=_be_silent)

    bytes_of: dict[int, ByteFigures] = {}
    answers: list[tuple[int, ...]] = []
    for length in _LENGTHS:
        samples = await ask(length, settings.num_requests)
        for sample in samples:
            answers.append(sample.token_ids)
            if sample.error:
                report.fail(f"{mesh.spec.mode}, {length} tokens: {sample.error}")
        figures = byte_figures(await handoffs_of(mesh, samples, clock, say), destination.ideal_bytes(length))
        if figures is None:
            report.fail(f"{mesh.spec.mode}, {length} tokens: the event stream tells of no handoff")
        else:
            bytes_of[length] = figures
    longest = (await ask(capacity - _NUM_OUTPUT_TOKENS, 1))[0]
    beyond = (await ask(capacity - _NUM_OUTPUT_TOKENS + 1, 1))[0]
    if longest.error:
        report.fail(f"{mesh.spec.mode}, {capacity} tokens, which fill its memory: {longest.error}")
    if not is_refusal(beyond, capacity):
        report.fail(
            f"{mesh.spec.mode}, {capacity + 1} tokens, which its memory cannot hold: {beyond.error or 'served'}"
        )
    return MeshFigures(
        decode=decode,
        dcp=first.coordinates.dcp_size,
        num_tokens=capacity,
        region_bytes=max(each.region_bytes for each in destination.ranks),
        bytes_of=bytes_of,
        longest_served=not longest.error,
        one_more_refused=is_refusal(beyond, capacity),
        answers=tuple(answers),
    )


def is_refusal(sample: Sample, capacity: int) -> bool:
    """Whether a request was refused as the client's fault, with the number of tokens that there is room for."""
    return "the server answered 4" in sample.error and str(capacity) in sample.error


def report_meshes(report: Report, found: Sequence[MeshFigures]) -> None:
    """Two tables, and an aim for each mesh. Answers are compared with those of the first one."""
    byte_rows, room_rows = [], []
    for each in found:
        exact = True
        for length, figures in each.bytes_of.items():
            moved = figures.moved
            exact = exact and moved.low == moved.high == figures.ideal
            cells = (number(moved.p50, 0), number(figures.ideal, 0), number(figures.ratio, 4), str(figures.num_parts))
            byte_rows.append((each.decode, str(length), *cells))
        report.aim(
            f"bytes of a handoff over ideal, decode {each.decode}", "all 1.0000" if exact else "not 1.0000", met=exact
        )
        if each is not found[0]:
            pairs = list(zip(each.answers, found[0].answers, strict=True))
            same = sum(one == other for one, other in pairs)
            shown = f"{same} of {len(pairs)}"
            report.aim(
                f"answers as those of decode {found[0].decode}, decode {each.decode}", shown, met=same == len(pairs)
            )
        room_rows.append(
            (
                each.decode,
                f"{each.region_bytes:,}",
                f"{each.num_tokens:,}",
                number(each.num_tokens / found[0].num_tokens),
                "served" if each.longest_served else "not served",
                "refused" if each.one_more_refused else "not refused",
            )
        )
    header = ("decode", "prompt", "bytes p50", "ideal", "ratio", "parts")
    report.add(
        Table(title="bytes of a handoff into groups of ranks", header=header, rows=tuple(byte_rows), num_names=2)
    )
    header = ("decode", "cache bytes a rank", "longest request", "times the first", "it is", "one token more is")
    report.add(Table(title="the longest request that the same memory takes", header=header, rows=tuple(room_rows)))
    report.put("meshes", tuple(found))


def _be_silent(_: str) -> None:
    """What `run_rounds` calls a round is one kind of requests here."""
