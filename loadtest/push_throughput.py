"""How fast a handoff's bytes move through the data plane, beside plain memcpy of as many bytes in the same regions.

One process, the real port and the real runs of a plan: one `write` a part, as a rank's pusher does it. Pushes and memcpy
take turns write by write, and sequences are rotated so that processor caches do not flatter either. Of each write the median
over all repetitions counts: what another program takes of the processor meanwhile hits few of them.
"""

from __future__ import annotations

import ctypes
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from common.dataplane.port import Outcome, Region, RemoteRegion, WriteGrant
from common.dataplane.shm import ShmDataPlane
from common.layout.bind import bind_extents, bind_slot, extents
from common.layout.planner import ReshardPlan, plan
from common.layout.region import lay_out
from common.layout.run import Run
from common.layout.shape import CacheShape
from common.layout.templates import PagedTemplate
from common.runtime.clock import Clock
from contracts.errors import PdmeshError
from contracts.manifest import Coordinates, PlannedPart
from loadtest.report import Report, Table, number
from loadtest.statistics import median

THROUGHPUT_AIM: Final = 0.9
_GENERATION: Final = 1
NUM_SEQUENCES: Final = 3
"""How many sequences are rotated, each with blocks and a slot of its own."""
_DEADLINE_S: Final = 60.0
_LINK_S: Final = 10.0


class PushFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One shape and one placement of blocks. Rates in GB/s (1e9 bytes), from the sum of each write's median time.

    `overhead_us_per_write` is what a push takes beyond the memcpy; `bind_ms` is what binding all parts of one request took.
    """

    shape: str
    blocks: str
    num_bytes: int
    num_writes: int
    num_runs: int
    push_gb_per_s: float
    memcpy_gb_per_s: float
    ratio: float
    overhead_us_per_write: float
    bind_ms: float


class _Write(msgspec.Struct, frozen=True, kw_only=True):
    """One part of one sequence, bound."""

    source: int
    destination: int
    runs: tuple[Run, ...]
    grant: WriteGrant
    num_bytes: int


@contextmanager
def bench(name: str, shape: CacheShape, *, source_tp: int, destination_tp: int, clock: Clock) -> Iterator[PushBench]:
    """The regions of two workers, planned and connected. Raises PdmeshError when the caches cannot be cut so."""
    sides = {"prefill": source_tp, "decode": destination_tp}
    maps = {
        side: [lay_out(shape, Coordinates(tp_rank=rank, tp_size=tp)) for rank in range(tp)]
        for side, tp in sides.items()
    }
    manifests = [[each.manifest(worker_id=side, incarnation=side, model=name) for each in maps[side]] for side in maps]
    num_cells = shape.num_blocks + shape.num_slots
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdmesh-push-")))
        regions: dict[str, list[Region]] = {}
        for side in sides:
            plane = ShmDataPlane(folder, peer_id=side, incarnation=side, now=clock.monotonic)
            stack.callback(plane.close)
            regions[side] = [plane.allocate(each.nbytes, num_cells) for each in maps[side]]
            for region in regions[side]:
                region.set_generations(range(num_cells), _GENERATION)
                ctypes.memset(_address(region), 1, region.descriptor.length)
        remotes = [plane.connect(each.descriptor, clock.monotonic() + _LINK_S) for each in regions["decode"]]
        yield PushBench(name, shape, plan(*manifests), regions["prefill"], regions["decode"], remotes, clock)


class PushBench:
    """Pushes sequences from the regions of one worker to those of another, and copies as many bytes plainly."""

    def __init__(  # noqa: PLR0917 - made by `bench` alone
        self,
        name: str,
        shape: CacheShape,
        compiled: ReshardPlan,
        sources: Sequence[Region],
        destinations: Sequence[Region],
        remotes: Sequence[RemoteRegion],
        clock: Clock,
    ) -> None:
        self._name = name
        self._shape = shape
        self._plan = compiled
        self._sources = sources
        self._destinations = destinations
        self._remotes = remotes
        self._clock = clock
        self._source_at = [_address(region) for region in sources]
        self._destination_at = [_address(region) for region in destinations]

    def measure(self, *, num_tokens: int, repeats: int, scattered: bool) -> PushFigures:
        """Push each of the rotated sequences `repeats` times. Raises PdmeshError if a push fails."""
        began_ns = self._clock.monotonic_ns()
        sequences = [self._bind(slot, num_tokens, scattered=scattered) for slot in range(NUM_SEQUENCES)]
        bind_ms = (self._clock.monotonic_ns() - began_ns) / 1e6 / NUM_SEQUENCES
        num_bytes = sum(write.num_bytes for write in sequences[0])
        pushes: list[list[int]] = []
        copies: list[list[int]] = []
        for turn in range((repeats + 1) * NUM_SEQUENCES):
            pushed, copied = (sequences[(turn + shift) % NUM_SEQUENCES] for shift in (0, 1))
            push_ns, copy_ns = self._take_turns(pushed, copied)
            if turn >= NUM_SEQUENCES:  # the first time round is for the page tables
                pushes.append(push_ns)
                copies.append(copy_ns)
        push_total_ns, copy_total_ns = sum_of_medians(pushes), sum_of_medians(copies)
        return PushFigures(
            shape=self._name,
            blocks="scattered" if scattered else "in order",
            num_bytes=num_bytes,
            num_writes=len(sequences[0]),
            num_runs=sum(len(write.runs) for write in sequences[0]),
            push_gb_per_s=num_bytes / push_total_ns,
            memcpy_gb_per_s=num_bytes / copy_total_ns,
            ratio=copy_total_ns / push_total_ns,
            overhead_us_per_write=(push_total_ns - copy_total_ns) / len(sequences[0]) / 1e3,
            bind_ms=bind_ms,
        )

    def _bind(self, slot: int, num_tokens: int, *, scattered: bool) -> list[_Write]:
        """Every part of one sequence as one write, in the order of the layers."""
        block_size, num_blocks = self._shape.block_size, self._shape.num_blocks
        per_sequence = -(-num_tokens // block_size)
        order = list(range(num_blocks))
        if scattered:
            random.Random(f"blocks/{num_blocks}").shuffle(order)
        ids = order[slot * per_sequence : (slot + 1) * per_sequence]
        by_part: dict[PlannedPart, list[Run]] = {}
        for template in self._plan.templates:
            runs = by_part.setdefault(template.part, [])
            if isinstance(template, PagedTemplate):
                part = template.part
                runs += bind_extents(
                    template,
                    extents(ids, ids, 0, num_tokens, block_size, modulus=part.modulus, residue=part.residue),
                )
            else:
                runs += bind_slot(template, slot, slot)
        lock_cell = num_blocks + slot
        grant = WriteGrant(lock_cell=lock_cell, cells=(*ids, lock_cell), generation=_GENERATION)
        return [
            _Write(
                source=part.src_rank,
                destination=part.dst_rank,
                runs=tuple(runs),
                grant=grant,
                num_bytes=sum(run.nbytes for run in runs),
            )
            for part, runs in by_part.items()
        ]

    def _take_turns(self, pushed: Sequence[_Write], copied: Sequence[_Write]) -> tuple[list[int], list[int]]:
        """Push one sequence and copy another, write by write in turns; return the nanoseconds of each write."""
        deadline = self._clock.monotonic() + _DEADLINE_S
        push_ns: list[int] = []
        copy_ns: list[int] = []
        for place, (push, copy) in enumerate(zip(pushed, copied, strict=True)):
            if place % 2:
                copy_ns.append(self._copy(copy))
                push_ns.append(self._push(push, deadline))
            else:
                push_ns.append(self._push(push, deadline))
                copy_ns.append(self._copy(copy))
        return push_ns, copy_ns

    def _push(self, write: _Write, deadline: float) -> int:
        """Nanoseconds that the data plane takes for one write."""
        region, remote = self._sources[write.source], self._remotes[write.destination]
        began_ns = self._clock.monotonic_ns()
        result = remote.write(write.runs, region, write.grant, deadline)
        took_ns = self._clock.monotonic_ns() - began_ns
        if result.outcome is not Outcome.DONE or result.nbytes != write.num_bytes:
            raise PdmeshError(f"a push of {self._name} ended {result.outcome.value}: {result.reason}")
        return took_ns

    def _copy(self, write: _Write) -> int:
        """Nanoseconds of one memcpy of as many bytes as `write` has, in a row, from where its first run begins."""
        source, destination = self._sources[write.source], self._destinations[write.destination]
        first = write.runs[0]
        source_at = min(first.local_offset, source.descriptor.length - write.num_bytes)
        destination_at = min(first.remote_offset, destination.descriptor.length - write.num_bytes)
        to = self._destination_at[write.destination] + destination_at
        origin = self._source_at[write.source] + source_at
        began_ns = self._clock.monotonic_ns()
        ctypes.memmove(to, origin, write.num_bytes)
        return self._clock.monotonic_ns() - began_ns


def report_push(report: Report, figures: Sequence[PushFigures]) -> None:
    """The table, and the aim that pushes run at nearly the speed of memcpy."""
    rows = tuple(
        (
            each.shape,
            each.blocks,
            number(each.num_bytes / 1e6),
            str(each.num_writes),
            str(each.num_runs),
            number(each.push_gb_per_s),
            number(each.memcpy_gb_per_s),
            number(each.ratio),
            number(each.overhead_us_per_write, 1),
            number(each.bind_ms),
        )
        for each in figures
    )
    header = (
        "caches",
        "blocks",
        "MB",
        "writes",
        "runs",
        "push GB/s",
        "memcpy GB/s",
        "ratio",
        "more us a write",
        "bind ms",
    )
    report.add(Table(title="push over memcpy (one process, one thread)", header=header, rows=rows, num_names=2))
    report.put("push_throughput", list(figures))
    for each in figures:
        shown = f"{number(each.ratio)} of memcpy (aim: at least {THROUGHPUT_AIM})"
        report.aim(f"push of {each.shape}, blocks {each.blocks}", shown, met=each.ratio >= THROUGHPUT_AIM)


def sum_of_medians(repetitions: Sequence[Sequence[int]]) -> float:
    """The median of each place over all repetitions, summed over the places. Raises ValueError without repetitions."""
    return sum(median(each) for each in zip(*repetitions, strict=True))


def _address(region: Region) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region.data))
