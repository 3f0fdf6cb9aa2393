"""Plans executed on bytes, by the way that a push takes: parts, chunks and placed patterns. Then every byte is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from common.layout.bind import TokenChunk
from common.layout.part_copies import PartCopies
from common.layout.planner import ReshardPlan, plan
from common.layout.run_batch import Placed, RunPattern
from common.layout.templates import CopyTemplate
from contracts.manifest import Namespace, PlannedPart
from tests.property.layout_world import Bytes, Content, Request, Worker, unsharded

Offsets = npt.NDArray[np.int64]
Pair = tuple[Request, Request]
"""A sequence as the source and as the destination keep it."""


def link(source: Worker, destination: Worker) -> ReshardPlan:
    """The plan between two workers, from their manifests alone."""
    return plan(source.manifests(), destination.manifests())


def parts_of(templates: Iterable[CopyTemplate]) -> list[PartCopies]:
    """The parts of some templates, ready to be placed."""
    by_part: dict[PlannedPart, list[CopyTemplate]] = {}
    for template in templates:
        by_part.setdefault(template.part, []).append(template)
    return [PartCopies(part, found) for part, found in by_part.items()]


class Transfer:
    """The bytes of some sequences on their way from one worker's regions to another's."""

    def __init__(self, source: Worker, destination: Worker, pairs: Sequence[Pair]) -> None:
        self._source = source
        self._destination = destination
        self._pairs = pairs
        size = source.shape.block_size
        self._chunks = {
            (namespace, number): [
                TokenChunk(src.block_ids, dst.block_ids, start, end, size) for start, end in src.cuts(namespace)
            ]
            for number, (src, dst) in enumerate(pairs)
            for namespace in Namespace
        }
        self._offsets: dict[RunPattern, tuple[Offsets, Offsets]] = {}
        self.num_bytes = self.num_told_bytes = 0
        """Bytes that were copied, and those that a pusher would report."""
        self.writes = [np.zeros(region.size, dtype=np.int64) for region in destination.regions]
        """How often each byte of each destination rank was written."""

    def run(self, parts: Iterable[PartCopies]) -> None:
        """Copy all parts of all sequences."""
        for copies in parts:
            part = copies.part
            for number, (src, dst) in enumerate(self._pairs):
                if copies.is_state:
                    rows = {"src_row": src.row(part.role), "dst_row": dst.row(part.role)}
                    self._copy(part, copies.place_state(src.slot, dst.slot, **rows))
                    self.num_told_bytes += copies.state_bytes
                    continue
                for chunk in self._chunks[part.namespace, number]:
                    self._copy(part, copies.place_tokens(chunk))
                    tokens = sum(end - start for start, end in copies.token_ranges(chunk))
                    self.num_told_bytes += tokens * copies.token_bytes

    def _copy(self, part: PlannedPart, placed: Iterable[Placed]) -> None:
        origin, target = self._source.regions[part.src_rank], self._destination.regions[part.dst_rank]
        for each in placed:
            local, remote = self._bytes_of(each.pattern)
            reached = remote + each.remote_base
            target[reached] = origin[local + each.local_base]
            np.add.at(self.writes[part.dst_rank], reached, 1)
            self.num_bytes += each.pattern.nbytes

    def _bytes_of(self, pattern: RunPattern) -> tuple[Offsets, Offsets]:
        """Source and destination of every byte of a pattern."""
        found = self._offsets.get(pattern)
        if found is None:
            local: list[Offsets] = [np.empty(0, np.int64)]
            remote: list[Offsets] = [np.empty(0, np.int64)]
            for run in pattern.runs():
                piece, inside = np.arange(run.count)[:, None], np.arange(run.length)
                local.append((run.local_offset + piece * run.local_stride + inside).ravel())
                remote.append((run.remote_offset + piece * run.remote_stride + inside).ravel())
            found = self._offsets[pattern] = np.concatenate(local), np.concatenate(remote)
        return found


class Checker:
    """Checks transfers between workers that are filled, and whose images are computed, once for many pairs of them."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        self._filled: set[int] = set()
        self._images: dict[int, tuple[list[Bytes], list[Bytes]]] = {}
        self._kept: list[Worker] = []
        self.num_cases = 0

    def check(
        self, source: Worker, destination: Worker, templates: Iterable[CopyTemplate] | None = None
    ) -> ReshardPlan:
        """Execute the plan and assert: each byte once, equal to the unsharded slices, no byte too many, and all of them told.

        `templates` stands in for the plan's own, to show that a wrong plan is found.
        """
        self._prepare(source, destination)
        made = link(source, destination)
        destination.poison()
        transfer = Transfer(source, destination, self._pairs)
        transfer.run(parts_of(made.templates if templates is None else templates))
        expected, owned = self._images[id(destination)]
        for rank, region in enumerate(destination.regions):
            assert np.array_equal(transfer.writes[rank], owned[rank]), f"rank {rank}: not each byte exactly once"
            assert np.array_equal(region, expected[rank]), f"rank {rank}: bytes differ from the unsharded slice"
        needed = sum(int(mask.sum(dtype=np.int64)) for mask in owned)
        assert transfer.num_bytes == transfer.num_told_bytes == needed, "bytes moved, told and needed differ"
        self.num_cases += 1
        return made

    def _prepare(self, source: Worker, destination: Worker) -> None:
        if id(source) not in self._filled:
            self._filled.add(id(source))
            self._kept.append(source)
            for content, (src, _) in zip(self._contents(source), self._pairs, strict=True):
                source.fill(content, src)
        if id(destination) not in self._images:
            self._kept.append(destination)
            requests = [dst for _, dst in self._pairs]
            self._images[id(destination)] = destination.images(self._contents(destination), requests)

    def _contents(self, worker: Worker) -> list[Content]:
        """What the sequences keep, unsharded: no two of them the same."""
        return [
            unsharded(worker.shape, src.num_tokens, 1 + 7919 * number) for number, (src, _) in enumerate(self._pairs)
        ]
