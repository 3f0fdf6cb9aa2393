"""What a prefill worker's ranks have pushed of one handoff, as the cumulative reports that the broker's ledger reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from common.layout.ranges import RangeSet
from contracts.handoff import PartDone, PartsReport
from contracts.manifest import Namespace, Role
from contracts.rank import PartPushed

PartKey = tuple[Namespace, Role, int, int]


@dataclass(slots=True)
class PartProgress:
    """One part of one source rank so far: what is done, and what it took."""

    ranges: RangeSet
    num_bytes: int = 0
    push_ms: float = 0.0
    first_started_ns: int = 0


@dataclass(slots=True)
class _RankParts:
    revision: int
    parts: dict[PartKey, PartProgress]


class PushedParts:
    """The parts of one handoff by source rank, all of them ranks of the replica that computes its prompt."""

    def __init__(self, handoff_id: str, incarnation: str, dp_rank: int) -> None:
        self._handoff_id = handoff_id
        self._incarnation = incarnation
        self._dp_rank = dp_rank
        self._ranks: dict[int, _RankParts] = {}

    def add(self, push: PartPushed) -> PartProgress:
        """Record a finished push and return the progress of its part."""
        rank = self._ranks.setdefault(push.rank, _RankParts(revision=0, parts={}))
        key = (push.namespace, push.role, push.layer, push.destination_rank)
        part = rank.parts.setdefault(key, PartProgress(ranges=RangeSet(), first_started_ns=push.started_ns))
        part.ranges = part.ranges.add(push.start, push.end)
        part.num_bytes += push.num_bytes
        part.push_ms += (push.done_ns - push.started_ns) / 1e6
        rank.revision += 1
        return part

    def report(self, source_rank: int) -> PartsReport:
        """Everything that one source rank has finished."""
        rank = self._ranks[source_rank]
        return PartsReport(
            handoff_id=self._handoff_id,
            incarnation=self._incarnation,
            source_dp_rank=self._dp_rank,
            source_rank=source_rank,
            revision=rank.revision,
            parts=tuple(
                PartDone(namespace=namespace, role=role, layer=layer, destination_rank=to, ranges=part.ranges.ranges)
                for (namespace, role, layer, to), part in rank.parts.items()
            ),
            num_bytes=sum(part.num_bytes for part in rank.parts.values()),
            push_ms=sum(part.push_ms for part in rank.parts.values()),
        )

    def reports(self) -> tuple[PartsReport, ...]:
        """One report for each source rank that has finished anything."""
        return tuple(self.report(rank) for rank in sorted(self._ranks))
