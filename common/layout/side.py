"""What the manifests of one worker must obey. Each broken rule is a `PlanRefusedError` by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from common.layout.context_parallel import dcp_rank
from common.layout.refusal import PlanRefusedError, PlanRule
from contracts.manifest import (
    MANIFEST_VERSION,
    Namespace,
    PagedPlace,
    RankManifest,
    Role,
    SlotPlace,
    Span,
)

MAX_OFFSET: Final = 2**63 - 1
_DRAFT_ROLES: Final = frozenset({Role.KEY, Role.VALUE, Role.BOOTSTRAP})


def check_side(side: str, manifests: Sequence[RankManifest]) -> tuple[RankManifest, ...]:
    """All ranks of one replica of a worker in the order of their tensor-parallel rank.

    Raises `PlanRefusedError` when they are not that, or break a rule that concerns one side alone.
    """
    if not manifests:
        raise PlanRefusedError(PlanRule.RANKS, where=side, expected="at least one rank", actual="none")
    for manifest in manifests:
        if manifest.schema_version != MANIFEST_VERSION:
            raise PlanRefusedError(
                PlanRule.SCHEMA_VERSION, where=side, expected=MANIFEST_VERSION, actual=manifest.schema_version
            )
    first = manifests[0]
    for manifest in manifests:
        _check_same_worker(side, first, manifest)
    at = first.coordinates
    if not 0 <= at.dp_rank < at.dp_size:
        raise PlanRefusedError(
            PlanRule.RANKS, where=side, expected=f"a replica below {at.dp_size}", actual=f"replica {at.dp_rank}"
        )
    ranks = sorted(manifest.coordinates.tp_rank for manifest in manifests)
    if at.tp_size != len(ranks) or ranks != list(range(len(ranks))):
        raise PlanRefusedError(PlanRule.RANKS, where=side, expected=f"ranks 0 to {at.tp_size - 1}", actual=ranks)
    ordered = tuple(sorted(manifests, key=lambda manifest: manifest.coordinates.tp_rank))
    for manifest in ordered:
        _check_rank(side, manifest)
    return ordered


def _check_same_worker(side: str, first: RankManifest, manifest: RankManifest) -> None:
    who = (manifest.worker_id, manifest.incarnation, manifest.coordinates.dp_rank)
    expected = (first.worker_id, first.incarnation, first.coordinates.dp_rank)
    if who != expected:
        raise PlanRefusedError(PlanRule.WORKER, where=side, expected=expected, actual=who)
    settings = (manifest.fingerprint, manifest.num_blocks, manifest.num_slots)
    wanted = (first.fingerprint, first.num_blocks, first.num_slots)
    if settings != wanted:
        raise PlanRefusedError(PlanRule.FINGERPRINT, where=side, expected=wanted, actual=settings)


def _check_rank(side: str, manifest: RankManifest) -> None:
    at = manifest.coordinates
    where = f"{side} rank {at.tp_rank}"
    numbers = (manifest.block_size, manifest.num_blocks, manifest.num_slots, manifest.region_bytes)
    _check_numbers(where, numbers, least=1)
    _check_numbers(where, (manifest.num_speculative_tokens,), least=0)
    if at.dcp_size < 1 or at.tp_size % at.dcp_size or at.dcp_rank != dcp_rank(at.tp_rank, at.dcp_size):
        expected = "dcp_size divides tp_size and dcp_rank = tp_rank % dcp_size"
        raise PlanRefusedError(PlanRule.CONTEXT_GROUP, where=where, expected=expected, actual=at)
    if manifest.interleave != manifest.block_size:
        expected = f"interleave = block_size = {manifest.block_size}"
        raise PlanRefusedError(PlanRule.INTERLEAVE, where=where, expected=expected, actual=manifest.interleave)
    kept = {span.key.role for span in manifest.spans if span.key.namespace is Namespace.DRAFT}
    if manifest.draft and kept != _DRAFT_ROLES:
        expected = f"caches of the draft {manifest.draft}: {', '.join(sorted(_DRAFT_ROLES))}"
        raise PlanRefusedError(PlanRule.TENSORS, where=where, expected=expected, actual=sorted(kept) or "none")
    groups: defaultdict[tuple[Namespace, Role, int], list[Span]] = defaultdict(list)
    for span in manifest.spans:
        _check_span(where, manifest, span)
        groups[span.key.namespace, span.key.role, span.key.layer].append(span)
    boxes = sorted(_box(where, manifest, spans) for spans in groups.values())
    for (_, end), (start, _) in pairwise(boxes):
        if start < end:
            raise PlanRefusedError(PlanRule.OVERLAP, where=where, expected=f"next cache from byte {end}", actual=start)


def _check_numbers(where: str, numbers: Sequence[int], least: int) -> None:
    for number in numbers:
        if not least <= number <= MAX_OFFSET:
            raise PlanRefusedError(PlanRule.OVERFLOW, where=where, expected=f"{least} to 2**63 - 1", actual=number)


def _check_span(where: str, manifest: RankManifest, span: Span) -> None:
    where = f"{where}, {span.key.name}"
    place = span.place
    _check_numbers(where, (span.key.layer, span.start, place.offset), least=0)
    paged = span.key.role.is_paged
    match place:
        case PagedPlace():
            _check_numbers(where, (span.length, place.block_stride, place.head_bytes, place.token_bytes), least=1)
            expected = manifest.block_size * place.token_bytes
            if (
                not paged
                or place.head_bytes != expected
                or place.token_bytes % manifest.dtypes.of(span.key.role).itemsize
            ):
                raise PlanRefusedError(PlanRule.UNIT, where=where, expected=f"{expected} bytes a head", actual=place)
        case SlotPlace():
            numbers = (place.slot_stride, place.row_stride, place.num_rows, place.moved_rows, place.unit_bytes)
            _check_numbers(where, (span.length, *numbers), least=1)
            if (
                paged
                or place.moved_rows > place.num_rows
                or place.unit_bytes % manifest.dtypes.of(span.key.role).itemsize
            ):
                raise PlanRefusedError(PlanRule.UNIT, where=where, expected="rows of whole elements", actual=place)
    _check_numbers(where, (span.start + span.length, _end(manifest, span)), least=0)
    if _end(manifest, span) > manifest.region_bytes:
        raise PlanRefusedError(
            PlanRule.BOUNDS, where=where, expected=f"at most {manifest.region_bytes}", actual=_end(manifest, span)
        )


def _end(manifest: RankManifest, span: Span) -> int:
    """The first byte behind the last one of the span."""
    width = _width(span)
    match span.place:
        case PagedPlace() as place:
            return place.offset + (manifest.num_blocks - 1) * place.block_stride + width
        case SlotPlace() as place:
            rows = (place.num_rows - 1) * place.row_stride
            return place.offset + (manifest.num_slots - 1) * place.slot_stride + rows + width


def _width(span: Span) -> int:
    """Bytes of the span that are contiguous: all heads of a block, or all units of a row."""
    place = span.place
    return span.length * (place.head_bytes if isinstance(place, PagedPlace) else place.unit_bytes)


def _box(where: str, manifest: RankManifest, spans: Sequence[Span]) -> tuple[int, int]:
    """The bytes between the first and the last of one cache; refuses spans of it that share a byte."""
    spans = sorted(spans, key=lambda span: span.place.offset)
    where = f"{where}, {spans[0].key.name}"
    strides = {tuple(_strides(span)) for span in spans}
    if len(strides) != 1:
        raise PlanRefusedError(
            PlanRule.UNIT, where=where, expected="one stride for all spans of a cache", actual=strides
        )
    base = end = spans[0].place.offset
    for span in spans:
        if span.place.offset < end:
            raise PlanRefusedError(PlanRule.OVERLAP, where=where, expected=f"from byte {end}", actual=span.place.offset)
        end = span.place.offset + _width(span)
    extent = end - base
    for stride, count in _strides(spans[0]):
        if extent > stride:
            raise PlanRefusedError(PlanRule.OVERLAP, where=where, expected=f"a stride of {extent}", actual=stride)
        extent = (count - 1) * stride + extent
    return base, max(_end(manifest, span) for span in spans)


def _strides(span: Span) -> Iterator[tuple[int, int]]:
    """Strides from the inside out, each with how often it is taken inside the next one."""
    match span.place:
        case PagedPlace() as place:
            yield place.block_stride, 1
        case SlotPlace() as place:
            yield place.row_stride, place.num_rows
            yield place.slot_stride, 1
