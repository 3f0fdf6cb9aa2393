"""What two workers must agree on, and how the ranks of each tile the logical tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from common.layout.refusal import Mismatch, PlanRefusedError, PlanRule, WorkersDifferError
from contracts.manifest import Fingerprint, Namespace, PagedPlace, RankManifest, SlotPlace, Span, TensorKey

Interval = tuple[int, int]
Holders = list[tuple[int, Span]]
Tiling = dict[Interval, Holders]
"""The half-open intervals of one tensor, ascending, each with the ranks that hold it and their spans."""


def check_link(source: Fingerprint, destination: Fingerprint) -> None:
    """Raise `PlanRefusedError` unless a cache of `source` can be continued at `destination`. Topologies may differ."""
    found = mismatches(source, destination)
    if found:
        raise WorkersDifferError(found)


def mismatches(source: Fingerprint, destination: Fingerprint) -> tuple[Mismatch, ...]:
    """Every field of two fingerprints that must be equal and is not, and what only a destination may have."""
    found = list(_differences(source, destination))
    # With other blocks it is another one as well: the blocks are what to change.
    if source.block_size == destination.block_size and source.interleave != destination.interleave:
        found.append(
            Mismatch(
                rule=PlanRule.INTERLEAVE,
                field="interleave",
                source=source.interleave,
                destination=destination.interleave,
                remedy="set dcp_interleave alike, to block_size",
            )
        )
    if source.topology.dcp_size != 1:
        found.append(
            Mismatch(
                rule=PlanRule.CONTEXT_PARALLEL,
                field="dcp",
                source=source.topology.dcp_size,
                destination=destination.topology.dcp_size,
                remedy="set dcp=1 at the prefill worker, whose ranks keep whole KV heads",
            )
        )
    return tuple(found)


def _differences(source: Fingerprint, destination: Fingerprint) -> Iterator[Mismatch]:
    pairs: tuple[tuple[PlanRule, str, object, object, str], ...] = (
        (PlanRule.MODEL, "model", source.model, destination.model, "start both from the same checkpoint"),
        (PlanRule.BLOCK_SIZE, "block_size", source.block_size, destination.block_size, "set block_size alike"),
        (PlanRule.DTYPES, "dtypes", source.dtypes, destination.dtypes, "set dtype alike"),
    )
    for rule, field, ours, theirs, remedy in pairs:
        if ours != theirs:
            yield Mismatch(rule=rule, field=field, source=ours, destination=theirs, remedy=remedy)


def share_drafts(source: Fingerprint, destination: Fingerprint) -> bool:
    """Whether both workers keep caches of the same draft head: then these are handed over with the rest."""
    return bool(source.draft) and source.draft == destination.draft


def why_no_drafts(source: Fingerprint, destination: Fingerprint) -> str:
    """Why the draft's caches stay behind though a worker keeps some, and what to change; "" otherwise."""
    if source.draft == destination.draft:
        return ""
    remedy = "start both from a checkpoint with the same draft head"
    lacking = "prefill" if not source.draft else "decode" if not destination.draft else ""
    if lacking:
        remedy = f"set num_speculative_tokens with drafter=mtp at the {lacking} worker, too"
    return Mismatch(
        rule=PlanRule.DRAFT, field="draft", source=source.draft, destination=destination.draft, remedy=remedy
    ).text


def without_drafts(tiled: dict[TensorKey, Tiling]) -> dict[TensorKey, Tiling]:
    """The tensors of the model's own layers."""
    return {key: tiling for key, tiling in tiled.items() if key.namespace is Namespace.TARGET}


def tile(side: str, manifests: Sequence[RankManifest]) -> dict[TensorKey, Tiling]:
    """Per tensor and interval, ascending: the ranks that hold it, each with its span.

    Raises `PlanRefusedError` unless the intervals of a tensor tile it from 0 on: two ranks hold the same interval or disjoint ones.
    """
    held: defaultdict[TensorKey, defaultdict[Interval, Holders]] = defaultdict(lambda: defaultdict(list))
    for manifest in manifests:
        rank = manifest.coordinates.tp_rank
        for span in manifest.spans:
            holders = held[span.key][span.start, span.start + span.length]
            if holders and holders[-1][0] == rank:
                where = f"{side} rank {rank}, {span.key.name}"
                raise PlanRefusedError(PlanRule.OVERLAP, where=where, expected="one span an interval", actual="two")
            holders.append((rank, span))
    tiled: dict[TensorKey, Tiling] = {}
    for key in sorted(held):
        end = 0
        for low, high in sorted(held[key]):
            if low != end:
                rule = PlanRule.GAP if low > end else PlanRule.OVERLAP
                raise PlanRefusedError(rule, where=f"{side}, {key.name}", expected=f"a span from {end}", actual=low)
            end = high
        tiled[key] = {interval: held[key][interval] for interval in sorted(held[key])}
    return tiled


def check_tensors(source: dict[TensorKey, Tiling], destination: dict[TensorKey, Tiling]) -> None:
    """Raise `PlanRefusedError` unless both sides hold the same tensors, at least one, of the same extent, in the same units."""
    if not source:
        raise PlanRefusedError(PlanRule.TENSORS, where="source", expected="at least one tensor", actual="none")
    if source.keys() != destination.keys():
        only = sorted(key.name for key in source.keys() ^ destination.keys())
        raise PlanRefusedError(PlanRule.TENSORS, where="destination", expected="those of the source", actual=only)
    for key, ours in source.items():
        theirs = destination[key]
        extent, wanted = list(ours)[-1][1], list(theirs)[-1][1]
        if extent != wanted:
            where = f"{'source' if extent < wanted else 'destination'}, {key.name}"
            raise PlanRefusedError(PlanRule.GAP, where=where, expected=max(extent, wanted), actual=min(extent, wanted))
        units = {_unit(span) for side in (ours, theirs) for holders in side.values() for _, span in holders}
        if len(units) != 1:
            raise PlanRefusedError(PlanRule.UNIT, where=key.name, expected="one unit on all ranks", actual=units)


def check_groups(destination: Sequence[RankManifest], wanted: dict[TensorKey, Tiling]) -> None:
    """Raise `PlanRefusedError` unless all ranks of a context-parallel group hold the same KV heads: they share their blocks."""
    dcp_size = destination[0].coordinates.dcp_size
    for key, cuts in wanted.items():
        if not key.role.is_paged:
            continue
        for (start, end), receivers in cuts.items():
            ranks = [rank for rank, _ in receivers]
            groups = {rank // dcp_size for rank in ranks}
            expected = [rank for group in sorted(groups) for rank in range(group * dcp_size, (group + 1) * dcp_size)]
            if ranks != expected:
                where = f"destination, {key.role}/{key.layer} heads {start} to {end}"
                remedy = f"set dcp of the decode worker, which is {dcp_size}, to a divisor of {len(ranks)}"
                wanted_ranks = f"ranks {expected} in groups ({remedy})"
                raise PlanRefusedError(PlanRule.CONTEXT_GROUP, where=where, expected=wanted_ranks, actual=ranks)


def _unit(span: Span) -> tuple[str, int, int]:
    """What a unit of the span is made of: it must be equal wherever the tensor is held. How many rows a slot has is a rank's own affair."""
    match span.place:
        case PagedPlace() as place:
            return "paged", place.head_bytes, place.token_bytes
        case SlotPlace() as place:
            return "slot", place.unit_bytes, place.moved_rows
