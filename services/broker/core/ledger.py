"""What of a request's cache has arrived, held against what was planned: sets and ranges, never counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from common.layout.ranges import RangeSet
from contracts.errors import ErrorCode, PdmeshError
from contracts.handoff import PartDone, PartsReport
from contracts.manifest import Namespace, PlannedPart, Role

PartName = tuple[Namespace, Role, int, int]
"""A part of one source rank: namespace, role, layer, destination rank."""

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of tokens, or of the one unit that a state is."""

MAX_SHOWN_GAPS: Final = 4

Debt = tuple[tuple[PartName, Ranges], ...]
"""What one source rank owes: ascending ranges that do not touch, for each of its parts."""


class LedgerError(PdmeshError):
    """A report says something that cannot be: a part nobody planned, a range outside of it, or twice, or taken back."""

    code = ErrorCode.PROTOCOL


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one handoff. Closed once the done ranges of every planned part are exactly the ranges owed.

    `debts` say for each source rank what it owes, part by part; `reports` holds the latest report of each source rank, by
    rank; `closed_parts` and `closed_sources` are what needs no more.
    """

    planned: tuple[PlannedPart, ...]
    num_cached_tokens: int
    num_prompt_tokens: int
    block_size: int
    debts: tuple[tuple[int, Debt], ...] = ()
    reports: tuple[PartsReport, ...] = ()
    closed_parts: frozenset[tuple[int, PartName]] = frozenset()
    closed_sources: frozenset[int] = frozenset()

    @classmethod
    def open(
        cls, planned: Iterable[PlannedPart], *, num_cached_tokens: int, num_prompt_tokens: int, block_size: int
    ) -> Ledger:
        """A ledger to which nothing has been reported. Parts and sources that owe nothing are closed from the start."""
        ledger = cls(
            planned=tuple(planned),
            num_cached_tokens=num_cached_tokens,
            num_prompt_tokens=num_prompt_tokens,
            block_size=block_size,
        )
        debts: dict[int, list[tuple[PartName, Ranges]]] = {}
        for part in ledger.planned:
            name = (part.namespace, part.role, part.layer, part.dst_rank)
            debts.setdefault(part.src_rank, []).append((name, ledger.owed(part)))
        return msgspec.structs.replace(
            ledger,
            debts=tuple((source, tuple(debt)) for source, debt in sorted(debts.items())),
            closed_parts=frozenset(
                (source, name) for source, debt in debts.items() for name, ranges in debt if not ranges
            ),
            closed_sources=frozenset(source for source, debt in debts.items() if not any(ranges for _, ranges in debt)),
        )

    @property
    def sources(self) -> frozenset[int]:
        """Every source rank of the plan."""
        return frozenset(source for source, _ in self.debts)

    @property
    def closed(self) -> bool:
        """Whether everything that was planned is there."""
        return self.closed_sources == self.sources

    @property
    def num_bytes(self) -> int:
        """Bytes that the sources say they have written."""
        return sum(report.num_bytes for report in self.reports)

    def owed(self, part: PlannedPart) -> Ranges:
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
        owed = next((dict(debt) for rank, debt in self.debts if rank == source), None)
        if owed is None:
            raise LedgerError(f"source_rank: {source} owes nothing; the rule is: one of {sorted(self.sources)}")
        others = {one.source_dp_rank for one in self.reports} - {report.source_dp_rank}
        if others:
            raise LedgerError(
                f"source_dp_rank: {report.source_dp_rank} is not allowed; the rule is: {min(others)}, like all reports of a "
                "handoff: one replica computes the whole prompt"
            )
        before = self.report_of(source)
        if before is not None and report.revision <= before.revision:
            return self
        known = {} if before is None else _listed(before.parts)
        listed = _listed(report.parts)
        closed: list[tuple[int, PartName]] = []
        for name, ranges in listed.items():
            if known.get(name) != ranges:  # the rest of a cumulative report has been looked at before
                done = _grown(name, ranges, owed.get(name), known.get(name, ()))
                if done == owed[name]:
                    closed.append((source, name))
        if not known.keys() <= listed.keys():
            raise LedgerError(f"source rank {source}: revision {report.revision} takes parts back")
        kept = tuple(other for other in self.reports if other.source_rank != source)
        closed_parts = self.closed_parts.union(closed)
        complete = all((source, name) in closed_parts for name in owed)
        return msgspec.structs.replace(
            self,
            reports=tuple(sorted((*kept, report), key=lambda one: one.source_rank)),
            closed_parts=closed_parts,
            closed_sources=self.closed_sources | {source} if complete else self.closed_sources,
        )

    def report_of(self, source_rank: int) -> PartsReport | None:
        """The latest report of one source rank."""
        return next((report for report in self.reports if report.source_rank == source_rank), None)

    def missing(self, limit: int) -> tuple[str, ...]:
        """The first `limit` parts that are not there in full, in words, with the ranges that they lack."""
        found: list[str] = []
        for source, debt in self.debts:
            report = self.report_of(source)
            listed = {} if report is None else _listed(report.parts)
            for name, owed in debt:
                if len(found) >= limit:
                    return tuple(found)
                if (source, name) not in self.closed_parts:
                    done = RangeSet.of(listed.get(name, ()))
                    gaps = [gap for start, end in owed for gap in done.missing(start, end)]
                    shown = ", ".join(f"[{start}, {end})" for start, end in gaps[:MAX_SHOWN_GAPS])
                    more = " and more" if len(gaps) > MAX_SHOWN_GAPS else ""
                    found.append(f"{_shown(name)} from source rank {source}: {shown}{more}")
        return tuple(found)

    def num_parts(self, source_rank: int) -> int:
        """How many parts the plan asks of one source rank."""
        return sum(part.src_rank == source_rank for part in self.planned)


def _listed(parts: Iterable[PartDone]) -> dict[PartName, Ranges]:
    """The ranges of each part, as they were listed."""
    listed: dict[PartName, Ranges] = {}
    for part in parts:
        name = (part.namespace, part.role, part.layer, part.destination_rank)
        listed[name] = listed.get(name, ()) + part.ranges
    return listed


def _grown(name: PartName, ranges: Ranges, owed: Ranges | None, known: Ranges) -> Ranges:
    """The done ranges of one part, with touching ones joined. Raises `LedgerError` when they cannot be."""
    if owed is None:
        raise LedgerError(f"{_shown(name)} is no planned part of this source rank")
    reached = 0
    for start, end in sorted(ranges):
        if not reached <= start < end:
            raise LedgerError(f"{_shown(name)}: [{start}, {end}) is empty, negative or done twice")
        reached = end
    done, whole = RangeSet.of(ranges), RangeSet(owed)
    for start, end in done.ranges:
        if not whole.covers(start, end):
            raise LedgerError(f"{_shown(name)}: [{start}, {end}) is not owed; the rule is: inside {list(owed)}")
    if not all(done.covers(start, end) for start, end in known):
        raise LedgerError(f"{_shown(name)}: a newer report takes parts back")
    return done.ranges


def _shown(name: PartName) -> str:
    namespace, role, layer, destination = name
    return f"{namespace} {role} of layer {layer} for destination rank {destination}"
