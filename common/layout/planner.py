"""From the manifests of two workers to the copies that bring a request's caches from one to the other.

Every destination interval is cut at the borders of the source's intervals. A KV head that several source ranks hold is
written by one of them, the one that owes the fewest replicated heads so far: so the work spreads over the replicas, across
layers, heads and destination ranks, and the choice is the same wherever it is made. KEY and VALUE of a head share a writer.
A BOOTSTRAP, which every rank holds, is spread in the same way by itself: it weighs nothing beside the heads.

The caches of a draft head are planned where both workers keep those of the same head. Otherwise the rest is planned without them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from common.layout.link import (
    Holders,
    Interval,
    Tiling,
    check_groups,
    check_link,
    check_tensors,
    share_drafts,
    tile,
    why_no_drafts,
    without_drafts,
)
from common.layout.refusal import PlanRefusedError, PlanRule
from common.layout.side import check_side
from common.layout.templates import CopyTemplate, PagedTemplate, Piece, SlotTemplate, coalesce
from contracts.manifest import (
    Fingerprint,
    Namespace,
    PagedPlace,
    PlannedPart,
    RankManifest,
    Role,
    Segment,
    SlotPlace,
    Span,
    TensorKey,
)


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a plan: the worker's start that the plan was made for. Another start needs another plan."""

    worker_id: str
    incarnation: str
    fingerprint: Fingerprint


class ReshardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All copies between two workers, ordered by cache, destination and source rank.

    With `has_drafts` the draft's caches are among them; `why_no_drafts` says why not, unless no worker keeps any.
    """

    source: Endpoint
    destination: Endpoint
    templates: tuple[CopyTemplate, ...]
    has_drafts: bool = False
    why_no_drafts: str = ""

    @property
    def parts(self) -> tuple[PlannedPart, ...]:
        """What the ledger of a handoff waits for, each part once."""
        return tuple(dict.fromkeys(template.part for template in self.templates))

    def templates_for(self, src_rank: int) -> tuple[CopyTemplate, ...]:
        """What one source rank has to send."""
        return tuple(template for template in self.templates if template.part.src_rank == src_rank)

    def templates_into(self, dst_rank: int) -> tuple[CopyTemplate, ...]:
        """What one destination rank receives, or has to pull."""
        return tuple(template for template in self.templates if template.part.dst_rank == dst_rank)


def plan(source: Sequence[RankManifest], destination: Sequence[RankManifest]) -> ReshardPlan:
    """Plan the copies from the ranks of one worker to those of another, in any order of ranks.

    Raises `PlanRefusedError` for manifests that do not describe one whole worker each, or two workers that do not fit together.
    """
    source, destination = check_side("source", source), check_side("destination", destination)
    ours, theirs = source[0].fingerprint, destination[0].fingerprint
    check_link(ours, theirs)
    held, wanted = tile("source", source), tile("destination", destination)
    has_drafts = share_drafts(ours, theirs)
    if not has_drafts:
        held, wanted = without_drafts(held), without_drafts(wanted)
    check_tensors(held, wanted)
    check_groups(destination, wanted)
    writers = _Writers()
    templates: list[CopyTemplate] = []
    # What fewer ranks hold comes first: what more of them hold can then even out the difference.
    for key in sorted(wanted, key=lambda key: (max(map(len, held[key].values())), key)):
        for cut, receivers in wanted[key].items():
            pieces = _pieces(cut, held[key], by_unit=key.role.is_paged)
            for dst_rank, dst_span in receivers:
                for piece, holders in pieces:
                    src_rank, src_span = writers.choose(key, piece, holders, dst_rank)
                    copy = _template(key, piece, (source[src_rank], src_span), (destination[dst_rank], dst_span))
                    templates.append(copy)
    templates.sort(key=_order)
    return ReshardPlan(
        source=_endpoint(source[0]),
        destination=_endpoint(destination[0]),
        templates=coalesce(templates),
        has_drafts=has_drafts,
        why_no_drafts=why_no_drafts(ours, theirs),
    )


class _Writers:
    """Picks the source rank of each piece, and remembers how much each one owes already."""

    def __init__(self) -> None:
        self._owed: defaultdict[tuple[bool, int], int] = defaultdict(int)
        self._chosen: dict[tuple[Namespace, bool, int, Segment, Interval, int], int] = {}

    def choose(self, key: TensorKey, piece: Interval, holders: Holders, dst_rank: int) -> tuple[int, Span]:
        """The rank that writes `piece` to `dst_rank`, with its span."""
        if len(holders) == 1:
            return holders[0]
        paged = key.role.is_paged
        choice = (key.namespace, paged, key.layer, key.segment, piece, dst_rank)
        spans = dict(holders)
        rank = self._chosen.get(choice)
        if rank is None or rank not in spans:
            rank = self._chosen[choice] = min(spans, key=lambda held: (self._owed[paged, held], held))
            # Counted once, for KEY and VALUE together: between the two, ranks could not be compared.
            self._owed[paged, rank] += piece[1] - piece[0]
        return rank, spans[rank]


def _pieces(cut: Interval, held: Tiling, *, by_unit: bool) -> list[tuple[Interval, Holders]]:
    """The parts of `cut` that lie in different source intervals, with the ranks that hold each.

    With `by_unit`, what several ranks hold is cut into single units, so that each of them can write some.
    """
    start, end = cut
    pieces: list[tuple[Interval, Holders]] = []
    for (low, high), holders in held.items():
        if low < end and start < high:
            first, last = max(start, low), min(end, high)
            step = 1 if by_unit and len(holders) > 1 else last - first
            pieces += [((unit, unit + step), holders) for unit in range(first, last, step)]
    return pieces


def _template(
    key: TensorKey, piece: Interval, source: tuple[RankManifest, Span], destination: tuple[RankManifest, Span]
) -> CopyTemplate:
    (src, src_span), (dst, dst_span) = source, destination
    start, end = piece
    at = dst.coordinates
    src_place, dst_place = src_span.place, dst_span.place
    paged = isinstance(dst_place, PagedPlace)
    part = PlannedPart(
        namespace=key.namespace,
        role=key.role,
        layer=key.layer,
        src_rank=src.coordinates.tp_rank,
        dst_rank=at.tp_rank,
        modulus=at.dcp_size if paged else 1,
        residue=at.dcp_rank if paged else 0,
    )
    what = Piece(segment=key.segment, start=start, length=end - start)
    if isinstance(src_place, PagedPlace) and isinstance(dst_place, PagedPlace):
        head_bytes = src_place.head_bytes
        return PagedTemplate(
            part=part,
            piece=what,
            src_offset=src_place.offset + (start - src_span.start) * head_bytes,
            dst_offset=dst_place.offset + (start - dst_span.start) * head_bytes,
            src_block_stride=src_place.block_stride,
            dst_block_stride=dst_place.block_stride,
            src_num_blocks=src.num_blocks,
            dst_num_blocks=dst.num_blocks,
            head_bytes=head_bytes,
            token_bytes=src_place.token_bytes,
        )
    if isinstance(src_place, SlotPlace) and isinstance(dst_place, SlotPlace):
        unit_bytes = src_place.unit_bytes
        return SlotTemplate(
            part=part,
            pieces=(what,),
            src_offset=src_place.offset + (start - src_span.start) * unit_bytes,
            dst_offset=dst_place.offset + (start - dst_span.start) * unit_bytes,
            src_slot_stride=src_place.slot_stride,
            dst_slot_stride=dst_place.slot_stride,
            src_num_slots=src.num_slots,
            dst_num_slots=dst.num_slots,
            src_row_stride=src_place.row_stride,
            dst_row_stride=dst_place.row_stride,
            src_num_rows=src_place.num_rows,
            dst_num_rows=dst_place.num_rows,
            moved_rows=src_place.moved_rows,
            row_bytes=what.length * unit_bytes,
        )
    raise PlanRefusedError(PlanRule.UNIT, where=f"{key.role}/{key.layer}", expected=src_place, actual=dst_place)


def _order(template: CopyTemplate) -> tuple[bool, int, Role, int, int, int]:
    """Layers in the order in which they are computed, the draft's last; inside a part by destination, so that neighbours can be joined."""
    part = template.part
    return part.namespace is Namespace.DRAFT, part.layer, part.role, part.dst_rank, part.src_rank, template.dst_offset


def _endpoint(manifest: RankManifest) -> Endpoint:
    return Endpoint(worker_id=manifest.worker_id, incarnation=manifest.incarnation, fingerprint=manifest.fingerprint)
