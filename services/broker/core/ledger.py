"""What of a request's cache has arrived, held against what was planned: sets and ranges, never counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from common.layout.context_parallel import held_range
from common.layout.ranges import RangeSet
from contracts.errors import ErrorCode, PdmeshError
from contracts.handoff import PartDone, PartsReport, SourceProgress
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.pull import ShardPull, Transfer
from contracts.show import PartView

PartName = tuple[Namespace, Role, int, int]
"""A part of one source rank: namespace, role, layer, destination rank."""

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of tokens, or of the one unit that a state is."""

Source = tuple[Transfer, int]
"""Who brings bytes: a source rank that pushes them, or decode, which pulls them from that source rank."""

MAX_SHOWN_GAPS: Final = 4

Debt = tuple[tuple[PartName, Ranges], ...]
"""What one source owes: ascending ranges that do not touch, for each of its parts."""


class LedgerError(PdmeshError):
    """A report says something that cannot be: a part nobody planned, a range outside of it, or twice, or taken back."""

    code = ErrorCode.PROTOCOL


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one handoff. Closed once the done ranges of every planned part are exactly the ranges owed.

    A part whose role is in `pulled` is owed by decode, which reads it from its source rank, every other one by that rank.
    `debts` say for each source what it owes, part by part; `reports` holds the latest report of each source;
    `closed_parts` and `closed_sources` are what needs no more.
    """

    planned: tuple[PlannedPart, ...]
    num_cached_tokens: int
    num_prompt_tokens: int
    block_size: int
    pulled: frozenset[Role] = frozenset()
    debts: tuple[tuple[Source, Debt], ...] = ()
    reports: tuple[PartsReport, ...] = ()
    closed_parts: frozenset[tuple[Source, PartName]] = frozenset()
    closed_sources: frozenset[Source] = frozenset()

    @classmethod
    def open(
        cls,
        planned: Iterable[PlannedPart],
        *,
        num_cached_tokens: int,
        num_prompt_tokens: int,
        block_size: int,
        pulled: Iterable[Role] = (),
    ) -> Ledger:
        """A ledger to which nothing has been reported. Parts and sources that owe nothing are closed from the start."""
        ledger = cls(
            planned=tuple(planned),
            num_cached_tokens=num_cached_tokens,
            num_prompt_tokens=num_prompt_tokens,
            block_size=block_size,
            pulled=frozenset(pulled),
        )
        debts: dict[Source, list[tuple[PartName, Ranges]]] = {}
        owed: dict[
            tuple[object, ...], Ranges
        ] = {}  # of all layers and ranks alike: most plans have two or three of these
        for part in ledger.planned:
            name = (part.namespace, part.role, part.layer, part.dst_rank)
            kind = (part.namespace, part.role, part.modulus, part.residue)
            ranges = owed.get(kind)
            if ranges is None:
                ranges = owed[kind] = ledger.owed(part)
            debts.setdefault(ledger.source_of(part), []).append((name, ranges))
        return msgspec.structs.replace(
            ledger,
            debts=tuple((source, tuple(debt)) for source, debt in sorted(debts.items())),
            closed_parts=frozenset(
                (source, name) for source, debt in debts.items() for name, ranges in debt if not ranges
            ),
            closed_sources=frozenset(source for source, debt in debts.items() if not any(ranges for _, ranges in debt)),
        )

    @property
    def sources(self) -> frozenset[Source]:
        """Every source that the plan names."""
        return frozenset(source for source, _ in self.debts)

    @property
    def has_drafts(self) -> bool:
        """Whether the caches of a draft head are among what was planned."""
        return any(part.namespace is Namespace.DRAFT for part in self.planned)

    @property
    def owes(self) -> bool:
        """Whether anything is to be brought at all."""
        return any(ranges for _, debt in self.debts for _, ranges in debt)

    @property
    def closed(self) -> bool:
        """Whether everything that was planned is there."""
        return self.closed_sources == self.sources

    @property
    def num_bytes(self) -> int:
        """Bytes that the sources say they have written."""
        return sum(report.num_bytes for report in self.reports)

    @property
    def shards(self) -> tuple[ShardPull, ...]:
        """How far the pull of each shard is, as decode said last."""
        return tuple(shard for report in self.reports for shard in report.shards)

    @property
    def progress(self) -> tuple[SourceProgress, ...]:
        """How much of what each source owes has arrived. Parts that owe nothing do not count."""
        progress: list[SourceProgress] = []
        for (transfer, rank), debt in self.debts:
            report = self.report_of((transfer, rank))
            num_parts = num_done = _num_owing(debt)
            if (transfer, rank) not in self.closed_sources:
                num_done = sum(((transfer, rank), name) in self.closed_parts for name, ranges in debt if ranges)
            progress.append(
                SourceProgress(
                    transfer=transfer,
                    source_rank=rank,
                    num_parts=num_parts,
                    num_done=num_done,
                    num_bytes=0 if report is None else report.num_bytes,
                )
            )
        return tuple(progress)

    def open_by(self, transfer: Transfer) -> bool:
        """Whether parts that are moved this way have not arrived in full."""
        return any(source[0] is transfer for source in self.sources - self.closed_sources)

    def source_of(self, part: PlannedPart) -> Source:
        """Who owes `part`."""
        return (Transfer.PULL if part.role in self.pulled else Transfer.PUSH), part.src_rank

    def owed(self, part: PlannedPart) -> Ranges:
        """The ranges that `part` must bring: tokens past the cached ones, counted by what the destination keeps, or `[0, 1)` of a slot.

        A draft cache has no token 0: its first pair is kept at position 1.
        """
        if not part.role.is_paged:
            return ((0, 1),)
        start = max(self.num_cached_tokens, part.namespace.first_token)
        return held_range(start, self.num_prompt_tokens, self.block_size, part.modulus, part.residue)

    def take(self, report: PartsReport) -> Ledger:
        """The ledger after `report`; the same object for one that is not newer than what its source said last.

        Raises `LedgerError` for a report that contradicts the plan, itself, or an earlier one.
        """
        source = (report.transfer, report.source_rank)
        owed = self._owed_by(source)
        others = {one.source_dp_rank for one in self.reports} - {report.source_dp_rank}
        if others:
            raise LedgerError(
                f"source_dp_rank: {report.source_dp_rank} is not allowed; the rule is: {min(others)}, like all reports of a "
                "handoff: one replica computes the whole prompt"
            )
        before = self.report_of(source)
        if before is not None and report.revision <= before.revision:
            return self
        known, listed = _changed(() if before is None else before.parts, report.parts)
        closed: list[tuple[Source, PartName]] = []
        for name, ranges in listed.items():
            if known.get(name) != ranges:
                if name not in owed:
                    raise LedgerError(self._why_not_owed(source, name))
                if ranges == owed[name] or _grown(name, ranges, owed[name], known.get(name, ())) == owed[name]:
                    closed.append((source, name))
        if known and not known.keys() <= listed.keys():
            raise LedgerError(f"{_shown_source(source)}: revision {report.revision} takes parts back")
        kept = tuple(other for other in self.reports if (other.transfer, other.source_rank) != source)
        closed_parts = self.closed_parts.union(closed)
        complete = bool(closed) and all((source, name) in closed_parts for name in owed)
        return msgspec.structs.replace(
            self,
            reports=tuple(sorted((*kept, report), key=lambda one: (one.transfer, one.source_rank))),
            closed_parts=closed_parts,
            closed_sources=self.closed_sources | {source} if complete else self.closed_sources,
        )

    def report_of(self, source: Source) -> PartsReport | None:
        """The latest report of one source."""
        return next((report for report in self.reports if (report.transfer, report.source_rank) == source), None)

    def _owed_by(self, source: Source) -> dict[PartName, Ranges]:
        """What one source owes, by part: nothing, where its rank's parts are all moved the other way."""
        ranks = {rank for _, rank in self.sources}
        if source[1] not in ranks:
            raise LedgerError(f"source_rank: {source[1]} owes nothing; the rule is: one of {sorted(ranks)}")
        return next((dict(debt) for one, debt in self.debts if one == source), {})

    def _why_not_owed(self, source: Source, name: PartName) -> str:
        transfer, rank = source
        if name[1] in self.pulled and transfer is Transfer.PUSH:
            return f"{_shown(name)} is pulled by decode: source rank {rank} is not to push it"
        if name[1] not in self.pulled and transfer is Transfer.PULL:
            return f"{_shown(name)} is pushed by source rank {rank}: decode is not to pull it"
        return f"{_shown(name)} is no planned part of {_shown_source(source)}"

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
                    found.append(f"{_shown(name)} from {_shown_source(source)}: {shown}{more}")
        return tuple(found)

    def part_views(self) -> tuple[PartView, ...]:
        """Every part with what is owed and what has arrived: first those that are not complete."""
        complete: list[PartView] = []
        incomplete: list[PartView] = []
        for source, debt in self.debts:
            report = self.report_of(source)
            listed = {} if report is None else _listed(report.parts)
            for name, owed in debt:
                view = PartView(
                    namespace=name[0],
                    role=name[1],
                    layer=name[2],
                    destination_rank=name[3],
                    transfer=source[0],
                    source_rank=source[1],
                    owed=owed,
                    done=RangeSet.of(listed.get(name, ())).ranges,
                )
                (complete if (source, name) in self.closed_parts else incomplete).append(view)
        return (*incomplete, *complete)

    def num_parts(self, source: Source) -> int:
        """How many parts the plan asks of one source, for this prompt: of a short one some ranks get no block."""
        return next((_num_owing(debt) for one, debt in self.debts if one == source), 0)

    @property
    def num_owed_parts(self) -> int:
        """How many parts must bring something."""
        return sum(_num_owing(debt) for _, debt in self.debts)


def _changed(before: tuple[PartDone, ...], after: tuple[PartDone, ...]) -> tuple[dict[PartName, Ranges], ...]:
    """What two reports list differently: behind what a cumulative one repeats word by word, each part once."""
    num_same = 0
    for old, new in zip(before, after, strict=False):
        if old != new:
            break
        num_same += 1
    return _listed(before[num_same:]), _listed(after[num_same:])


def _num_owing(debt: Debt) -> int:
    return sum(bool(ranges) for _, ranges in debt)


def _listed(parts: Iterable[PartDone]) -> dict[PartName, Ranges]:
    """The ranges of each part, as they were listed."""
    listed: dict[PartName, Ranges] = {}
    for part in parts:
        name = (part.namespace, part.role, part.layer, part.destination_rank)
        listed[name] = listed.get(name, ()) + part.ranges
    return listed


def _grown(name: PartName, ranges: Ranges, owed: Ranges, known: Ranges) -> Ranges:
    """The done ranges of one part, with touching ones joined. Raises `LedgerError` when they cannot be."""
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


def _shown_source(source: Source) -> str:
    transfer, rank = source
    return f"source rank {rank}" + (", pulled by decode" if transfer is Transfer.PULL else "")
