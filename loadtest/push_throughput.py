"""How fast a handoff's bytes move through the data plane, beside plain memcpy of as many bytes in the same regions.

One process, the real port, and the function that a rank's pusher calls. It writes at once what its queue holds of a sequence, so
both ends of that are measured: a write for what one layer has ready, and writes as a pusher makes them that is never without work.
A push binds what it writes (a chunk's blocks once for all layers, as in a rank); beside it the same write is measured with
everything bound before. Pushes, writes and memcpy take turns write by write, and sequences are rotated so that processor caches
do not flatter any. Of each write the median over all repetitions counts: what another program takes of the processor meanwhile
hits few of them.
"""

from __future__ import annotations

import ctypes
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from common.dataplane.port import Outcome, Region, RemoteRegion, TransferResult, WriteGrant
from common.dataplane.shm import ShmDataPlane
from common.engine.transfer.peers import Peer
from common.engine.transfer.push_lane import MAX_BATCHED
from common.engine.transfer.push_write import PushPart, cells_of, write_parts
from common.layout.bind import TokenChunk
from common.layout.part_copies import PartCopies
from common.layout.planner import ReshardPlan, plan
from common.layout.region import lay_out
from common.layout.run_batch import RunBatch
from common.layout.shape import CacheShape
from common.layout.templates import CopyTemplate
from common.runtime.clock import Clock
from contracts.errors import PdmeshError
from contracts.handoff import Grant
from contracts.manifest import Coordinates, PlannedPart
from loadtest.push_figures import PushFigures, sum_of_medians

_GENERATION: Final = 1
NUM_SEQUENCES: Final = 3
"""How many sequences are rotated, each with blocks and a slot of its own."""
_DEADLINE_S: Final = 60.0
_LINK_S: Final = 10.0


class _Write(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of one sequence that are ready together for one destination rank, bound and to be bound."""

    copies: tuple[PartCopies, ...]
    batch: RunBatch
    grant: WriteGrant


class _Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """One of the rotated sequences."""

    grant: Grant
    num_tokens: int
    writes: tuple[_Write, ...]


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
        self._sources = sources
        self._destinations = destinations
        self._clock = clock
        self._source_at = [_address(region) for region in sources]
        self._destination_at = [_address(region) for region in destinations]
        self._peer = Peer(
            templates=compiled.templates,
            parts={},
            regions=dict(enumerate(remotes)),
            num_blocks=shape.num_blocks,
            num_slots=shape.num_slots,
        )
        by_part: dict[PlannedPart, list[CopyTemplate]] = {}
        for template in compiled.templates:
            by_part.setdefault(template.part, []).append(template)
        self._parts = [PartCopies(part, found) for part, found in by_part.items()]

    def measure(self, *, num_tokens: int, repeats: int, scattered: bool, full_queue: bool) -> PushFigures:
        """Push each of the rotated sequences `repeats` times. Raises PdmeshError if a push fails."""
        batches = self._batches(full_queue=full_queue)
        sequences = [self._bind(batches, slot, num_tokens, scattered=scattered) for slot in range(NUM_SEQUENCES)]
        writes = sequences[0].writes
        num_bytes = sum(write.batch.nbytes for write in writes)
        samples: list[list[list[int]]] = [[], [], []]
        for turn in range((repeats + 1) * NUM_SEQUENCES):
            times = self._take_turns([sequences[(turn + shift) % NUM_SEQUENCES] for shift in range(len(samples))])
            if turn >= NUM_SEQUENCES:  # the first time round is for the page tables
                for held, found in zip(samples, times, strict=True):
                    held.append(found)
        push_ns, write_ns, copy_ns = map(sum_of_medians, samples)
        return PushFigures(
            shape=self._name,
            blocks="scattered" if scattered else "in order",
            queue="full" if full_queue else "one layer",
            num_bytes=num_bytes,
            num_writes=len(writes),
            num_runs=sum(len(write.batch) for write in writes),
            push_gb_per_s=num_bytes / push_ns,
            write_gb_per_s=num_bytes / write_ns,
            memcpy_gb_per_s=num_bytes / copy_ns,
            ratio=copy_ns / push_ns,
            write_ratio=copy_ns / write_ns,
            overhead_us_per_write=(push_ns - copy_ns) / len(writes) / 1e3,
            bind_ms=(push_ns - write_ns) / 1e6,
        )

    def _batches(self, *, full_queue: bool) -> list[tuple[PartCopies, ...]]:
        """The parts that leave together, in the order of the layers."""
        queues: dict[tuple[int, ...], list[PartCopies]] = {}
        for copies in self._parts:
            part = copies.part
            link = part.src_rank, part.dst_rank
            queues.setdefault(link if full_queue else (part.layer, *link), []).append(copies)
        return [
            tuple(queue[first : first + MAX_BATCHED])
            for queue in queues.values()
            for first in range(0, len(queue), MAX_BATCHED)
        ]

    def _bind(
        self, batches: Iterable[tuple[PartCopies, ...]], slot: int, num_tokens: int, *, scattered: bool
    ) -> _Sequence:
        """One sequence with its writes bound."""
        block_size, num_blocks = self._shape.block_size, self._shape.num_blocks
        per_sequence = -(-num_tokens // block_size)
        order = list(range(num_blocks))
        if scattered:
            random.Random(f"blocks/{num_blocks}").shuffle(order)
        ids = tuple(order[slot * per_sequence : (slot + 1) * per_sequence])
        grant = Grant(worker_id="decode", incarnation="decode", generation=_GENERATION, block_ids=ids, slot=slot)
        chunk = self._chunk(grant, num_tokens)
        lock_cell = num_blocks + slot
        writes: list[_Write] = []
        for copies in batches:
            parts = [_ready(each, chunk, slot) for each in copies]
            cells = cells_of(parts, lock_cell)
            writes.append(
                _Write(
                    copies=copies,
                    batch=RunBatch(placed for each in parts for placed in each.place(slot)),
                    grant=WriteGrant(lock_cell=lock_cell, cells=cells, generation=_GENERATION),
                )
            )
        return _Sequence(grant=grant, num_tokens=num_tokens, writes=tuple(writes))

    def _chunk(self, grant: Grant, num_tokens: int) -> TokenChunk:
        return TokenChunk(grant.block_ids, grant.block_ids, 0, num_tokens, self._shape.block_size)

    def _take_turns(self, sequences: Sequence[_Sequence]) -> tuple[list[int], list[int], list[int]]:
        """Push one sequence, write another and copy a third, write by write in turns; return the nanoseconds of each."""
        deadline = self._clock.monotonic() + _DEADLINE_S
        pushed, written, copied = sequences
        # Chunks that nothing is bound of yet, one for each source rank: the first write binds for all layers, as in a rank.
        chunks = [self._chunk(pushed.grant, pushed.num_tokens) for _ in self._sources]
        times: tuple[list[int], list[int], list[int]] = ([], [], [])
        for place, write in enumerate(pushed.writes):
            chunk = chunks[write.copies[0].part.src_rank]
            actions = (
                partial(self._push, pushed.grant, write, chunk, deadline),
                partial(self._write, written.writes[place], deadline),
                partial(self._copy, copied.writes[place]),
            )
            for shift in range(len(actions)):
                index = (place + shift) % len(actions)
                times[index].append(actions[index]())
        return times

    def _push(self, grant: Grant, write: _Write, chunk: TokenChunk, deadline: float) -> int:
        """Nanoseconds that a pusher takes to bind and write what is ready."""
        part = write.copies[0].part
        region = self._sources[part.src_rank]
        began_ns = self._clock.monotonic_ns()
        parts = [_ready(each, chunk, grant.slot) for each in write.copies]
        result = write_parts(self._peer, part.dst_rank, grant, parts, region, None, deadline)
        return self._took(began_ns, result, write)

    def _write(self, write: _Write, deadline: float) -> int:
        """Nanoseconds that the data plane takes for a write that is bound."""
        part = write.copies[0].part
        region, remote = self._sources[part.src_rank], self._peer.regions[part.dst_rank]
        began_ns = self._clock.monotonic_ns()
        result = remote.write(write.batch, region, write.grant, deadline)
        return self._took(began_ns, result, write)

    def _took(self, began_ns: int, result: TransferResult, write: _Write) -> int:
        took_ns = self._clock.monotonic_ns() - began_ns
        if result.outcome is not Outcome.DONE or result.nbytes != write.batch.nbytes:
            raise PdmeshError(f"a push of {self._name} ended {result.outcome.value}: {result.reason}")
        return took_ns

    def _copy(self, write: _Write) -> int:
        """Nanoseconds of plain memcpy of the bytes of `write`: each part's in a row, from where its first piece begins."""
        part = write.copies[0].part
        source, destination = self._sources[part.src_rank], self._destinations[part.dst_rank]
        calls = []
        for placed in write.batch.placed:
            first, num_bytes = next(placed.runs()), placed.pattern.nbytes
            source_at = min(first.local_offset, source.descriptor.length - num_bytes)
            destination_at = min(first.remote_offset, destination.descriptor.length - num_bytes)
            to = self._destination_at[part.dst_rank] + destination_at
            calls.append((to, self._source_at[part.src_rank] + source_at, num_bytes))
        began_ns = self._clock.monotonic_ns()
        for to, origin, num_bytes in calls:
            ctypes.memmove(to, origin, num_bytes)
        return self._clock.monotonic_ns() - began_ns


def _ready(copies: PartCopies, chunk: TokenChunk, slot: int) -> PushPart:
    return PushPart(copies=copies, chunk=None if copies.is_state else chunk, slot=slot)


def _address(region: Region) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region.data))
