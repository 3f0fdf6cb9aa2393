"""What of a request's cache has arrived, held against what was planned: sets and ranges, never counts."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from common.layout.ranges import RangeSet
from contracts.errors import ErrorCode, PdmeshError
from contracts.handoff import PartDone, PartsReport
from contracts.manifest import Namespace, PlannedPart, Role

PartName = tuple[Namespace, Role, int, int]
"""A part of one source rank: namespace, role, layer, destination rank."""


class LedgerError(PdmeshError):
    """A report says something that cannot be: a part nobody planned, a range outside of it, or twice, or taken back."""

    code = ErrorCode.PROTOCOL


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one handoff. Closed once the done ranges of every planned part are exactly the ranges owed.

    `reports` holds the latest report of each source rank, by rank; `closed_sources` those that owe nothing any more.
    """

    planned: tuple[PlannedPart, ...]
    num_cached_tokens: int
    num_prompt_tokens: int
    block_size: int
    reports: tuple[PartsReport, ...] = ()
    closed_sources: frozenset[int] = frozenset()

    @classmethod
    def open(
        cls, planned: Iterable[PlannedPart], *, num_cached_tokens: int, num_prompt_tokens: int, block_size: int
    ) -> Ledger:
        """A ledger to which nothing has been reported. Sources that owe nothing are closed from the start."""
        ledger = cls(
            planned=tuple(planned),
            num_cached_tokens=num_cached_tokens,
            num_prompt_tokens=num_prompt_tokens,
            block_size=block_size,
        )
        idle = frozenset(source for source in ledger.sources if not any(ledger._owed_by(source).values()))
        return msgspec.structs.replace(ledger, closed_sources=idle)

    @property
    def sources(self) -> frozenset[int]:
        """Every source rank of the plan."""
        return frozenset(part.src_rank for part in self.planned)

    @property
    def closed(self) -> bool:
        """Whether everything that was planned is there."""
        return self.closed_sources == self.sources

    @property
    def num_bytes(self) -> int:
        """Bytes that the sources say they have written."""
        return sum(report.num_bytes for report in self.reports)

    def owed(self, part: PlannedPart) -> tuple[tuple[int, int], ...]:
        """The ranges that `part` must bring: tokens of the destination's blocks past the cached ones, or `[0, 1)` of a state.

        A draft cache has no token 0: its first pair is kept at position 1.
        """
        if part.role in {Role.CONV, Role.SSM}:
            return ((0, 1),)
        start = max(self.num_cached_tokens, 1) if part.namespace is Namespace.DRAFT else self.num_cached_tokens
        end = self.num_prompt_tokens
        if start >= end:
            return ()
        if part.modulus == 1:
            return ((start, end),)
        size = self.block_size
        first = start // size
        first += (part.residue - first) % part.modulus
        blocks = range(first, -(-end // size), part.modulus)
        return tuple((max(start, block * size), min(end, (block + 1) * size)) for block in blocks)

    def take(self, report: PartsReport) -> Ledger:
        """The ledger after `report`; the same object for one that is not newer than what its source said last.

        Raises `LedgerError` for a report that contradicts the plan, itself, or an earlier one.
        """
        source = report.source_rank
        if source not in self.sources:
            raise LedgerError(f"source_rank: {source} owes nothing; the rule is: one of {sorted(self.sources)}")
        before = self.report_of(source)
        if before is not None and report.revision <= before.revision:
            return self
        owed = self._owed_by(source)
        done = _done(report.parts)
        for name, ranges in done.items():
            if name not in owed:
                raise LedgerError(f"source rank {source}: {_shown(name)} is no planned part")
            for start, end in ranges.ranges:
                if not any(low <= start and end <= high for low, high in owed[name]):
                    raise LedgerError(
                        f"source rank {source}: {_shown(name)}: [{start}, {end}) is not owed; "
                        f"the rule is: inside {list(owed[name])}"
                    )
        if before is not None:
            for name, ranges in _done(before.parts).items():
                after = done.get(name, RangeSet())
                if not all(after.covers(start, end) for start, end in ranges.ranges):
                    raise LedgerError(
                        f"source rank {source}: {_shown(name)}: revision {report.revision} takes parts back"
                    )
        kept = tuple(other for other in self.reports if other.source_rank != source)
        complete = all(done.get(name, RangeSet()).ranges == ranges for name, ranges in owed.items())
        return msgspec.structs.replace(
            self,
            reports=tuple(sorted((*kept, report), key=lambda one: one.source_rank)),
            closed_sources=self.closed_sources | {source} if complete else self.closed_sources,
        )

    def report_of(self, source_rank: int) -> PartsReport | None:
        """The latest report of one source rank."""
        return next((report for report in self.reports if report.source_rank == source_rank), None)

    def num_parts(self, source_rank: int) -> int:
        """How many parts the plan asks of one source rank."""
        return sum(part.src_rank == source_rank for part in self.planned)

    def _owed_by(self, source: int) -> dict[PartName, tuple[tuple[int, int], ...]]:
        return {
            (part.namespace, part.role, part.layer, part.dst_rank): self.owed(part)
            for part in self.planned
            if part.src_rank == source
        }


def _done(parts: Iterable[PartDone]) -> dict[PartName, RangeSet]:
    """What a report says is done, with touching ranges joined. Raises `LedgerError` for ranges that are empty or overlap."""
    listed: dict[PartName, list[tuple[int, int]]] = {}
    for part in parts:
        name = (part.namespace, part.role, part.layer, part.destination_rank)
        listed.setdefault(name, []).extend(part.ranges)
    done: dict[PartName, RangeSet] = {}
    for name, ranges in listed.items():
        reached = 0
        for start, end in sorted(ranges):
            if not reached <= start < end:
                raise LedgerError(f"{_shown(name)}: [{start}, {end}) is empty, negative or done twice")
            reached = end
        done[name] = RangeSet.of(ranges)
    return done


def _shown(name: PartName) -> str:
    namespace, role, layer, destination = name
    return f"{namespace} {role} of layer {layer} for destination rank {destination}"
