"""What a decode worker's ranks have pulled of one handoff, as the cumulative reports that the broker's ledger reads. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import assert_never

from common.layout.ranges import RangeSet
from contracts.handoff import PartDone, PartsReport
from contracts.manifest import Namespace, Role
from contracts.pull import ShardPull, ShardState, Transfer
from contracts.rank_pull import PulledPart, PullReport, PullStopped, RoleMerged, ShardPulled

_PartKey = tuple[Namespace, Role, int, int]


class PulledParts:
    """The shards and parts of one handoff by source rank of replica `source_dp_rank`, and the cumulative reports of them.

    A pull under another lock begins anew: what the one before had read does not count. Revisions go on.
    """

    def __init__(self, handoff_id: str, incarnation: str) -> None:
        self._handoff_id = handoff_id
        self._incarnation = incarnation
        self._source_dp_rank = 0
        self._revisions: defaultdict[int, int] = defaultdict(int)
        self._parts: defaultdict[int, dict[_PartKey, RangeSet]] = defaultdict(dict)
        self._shards: dict[tuple[int, int], ShardPull] = {}

    @property
    def shards(self) -> tuple[ShardPull, ...]:
        """How far each shard is, by source, then destination rank."""
        return tuple(self._shards[key] for key in sorted(self._shards))

    def begin(self, source_dp_rank: int) -> None:
        """A pull from this replica of the source begins."""
        self._source_dp_rank = source_dp_rank
        self._parts.clear()
        self._shards.clear()

    def add(self, report: PullReport) -> frozenset[int]:
        """Take a report of a rank; the source ranks of which there is more to tell. A repeat tells nothing new."""
        match report:
            case ShardPulled(shard=shard):
                key = shard.source_rank, shard.destination_rank
                changed = self._add_parts(report.rank, report.parts)
                if self._shards.get(key) != shard:
                    self._shards[key] = shard
                    changed |= {shard.source_rank}
            case RoleMerged():
                changed = self._add_parts(report.rank, report.parts)
            case PullStopped():
                changed = set()
            case _:
                assert_never(report)
        for source_rank in changed:
            self._revisions[source_rank] += 1
        return frozenset(changed)

    def report(self, source_rank: int) -> PartsReport:
        """Everything that has arrived from one source rank."""
        shards = tuple(shard for shard in self.shards if shard.source_rank == source_rank)
        return PartsReport(
            handoff_id=self._handoff_id,
            incarnation=self._incarnation,
            source_dp_rank=self._source_dp_rank,
            source_rank=source_rank,
            revision=self._revisions[source_rank],
            parts=tuple(
                PartDone(namespace=namespace, role=role, layer=layer, destination_rank=to, ranges=ranges.ranges)
                for (namespace, role, layer, to), ranges in self._parts[source_rank].items()
            ),
            num_bytes=sum(shard.num_bytes for shard in shards if shard.state is ShardState.DONE),
            push_ms=sum(shard.duration_ms for shard in shards),
            transfer=Transfer.PULL,
            shards=shards,
        )

    def reports(self) -> tuple[PartsReport, ...]:
        """One report for each source rank of which anything is known."""
        known = {source_rank for source_rank, _ in self._shards} | {
            rank for rank, parts in self._parts.items() if parts
        }
        return tuple(self.report(source_rank) for source_rank in sorted(known))

    def _add_parts(self, destination_rank: int, parts: tuple[PulledPart, ...]) -> set[int]:
        changed = set()
        for part in parts:
            done = self._parts[part.source_rank]
            key = (part.namespace, part.role, part.layer, destination_rank)
            before = done.get(key, RangeSet())
            after = before.merge(RangeSet.of(part.ranges))
            if after != before:
                done[key] = after
                changed.add(part.source_rank)
        return changed
