"""Digests of cached bytes that do not depend on how a cache is cut over ranks.

The unit is what no layout cuts: one KV head of one block (the tokens of it that count), one value head of an SSM state, the
channels of one key head in one row of one segment of a CONV state, a BOOTSTRAP as it is. A unit's value is a 64-bit mix of its name and the CRC-32 of
its bytes; a digest is the sum of values modulo 2**64. So the digest of a cache is the same whoever holds which of its units, and
in whatever order they are looked at, and what several source ranks have sent to a destination adds up to what lies there. Any
change of up to 32 neighbouring bits shows for certain (CRC-32), any other but for one in 2**32.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from common.layout.context_parallel import owned_blocks
from common.layout.shape import CacheShape
from common.layout.templates import CopyTemplate, PagedTemplate, Piece
from contracts.errors import InvalidValueError
from contracts.manifest import Namespace, PagedPlace, RankManifest, Role, Segment, SlotPlace, Span

DIGEST_MASK: Final = (1 << 64) - 1
_INDEX_STEP: Final = 0x9E3779B97F4A7C15
_PLACE_STEP: Final = 0xD1B54A32D192ED03

CacheName: TypeAlias = tuple[Namespace, Role, int]
"""Namespace, role, layer."""


class PagedUnits(NamedTuple):
    """Neighbouring KV heads of one cache, in blocks b of a sequence with `b % modulus == residue`.

    Block b is `block_ids[b // divisor]`: a source lists every block of a sequence, a destination those that it owns.
    """

    cache: CacheName
    first_head: int
    num_heads: int
    offset: int
    block_stride: int
    head_bytes: int
    token_bytes: int
    modulus: int
    residue: int
    divisor: int


class SlotUnits(NamedTuple):
    """Neighbouring units of one segment of a state, `unit_bytes` each, in `num_rows` rows of a slot."""

    cache: CacheName
    segment: Segment
    first_unit: int
    num_units: int
    offset: int
    slot_stride: int
    row_stride: int
    num_rows: int
    unit_bytes: int


Units: TypeAlias = PagedUnits | SlotUnits


class Held(NamedTuple):
    """Where one sequence lies in a rank, and which of its tokens count: `[start, end)`. A draft cache has no token 0.

    Its states begin at `conv_row` and `ssm_row` of the slot; a bootstrap has one row.
    """

    block_ids: Sequence[int]
    slot: int
    start: int
    end: int
    block_size: int
    conv_row: int = 0
    ssm_row: int = 0


def units_held(manifest: RankManifest, shape: CacheShape) -> tuple[Units, ...]:
    """All units of a sequence that a rank holds."""
    at = manifest.coordinates
    return tuple(_of_span(span, shape, at.dcp_size, at.dcp_rank) for span in manifest.spans)


def units_sent(templates: Iterable[CopyTemplate], shape: CacheShape) -> tuple[tuple[int, Units], ...]:
    """The units that a source rank sends, each with the destination rank that it goes to, where they lie at the source."""
    return tuple((template.part.dst_rank, units) for template in templates for units in _of_template(template, shape))


def digest(units: Units, data: memoryview, held: Held) -> int:
    """The sum of the values of `units`. `data` is the region's, as bytes."""
    if isinstance(units, SlotUnits):
        return _slot_digest(units, data, held)
    return _paged_digest(units, data, held)


def show(value: int) -> str:
    """A digest as it travels: 16 hexadecimal digits."""
    return f"{value:016x}"


def _paged_digest(units: PagedUnits, data: memoryview, held: Held) -> int:
    start = max(held.start, units.cache[0].first_token)
    base = _name(units.cache, Segment.WHOLE)
    total = 0
    for block in owned_blocks(start, held.end, held.block_size, units.modulus, units.residue):
        first = max(start - block * held.block_size, 0)
        last = min(held.end - block * held.block_size, held.block_size)
        at = units.offset + held.block_ids[block // units.divisor] * units.block_stride + first * units.token_bytes
        nbytes = (last - first) * units.token_bytes
        place = base + block * _PLACE_STEP
        for head in range(units.num_heads):
            piece = data[at + head * units.head_bytes : at + head * units.head_bytes + nbytes]
            total += _value(place + (units.first_head + head) * _INDEX_STEP, piece)
    return total & DIGEST_MASK


def _slot_digest(units: SlotUnits, data: memoryview, held: Held) -> int:
    base = _name(units.cache, units.segment)
    first_row = {Role.CONV: held.conv_row, Role.SSM: held.ssm_row}.get(units.cache[1], 0)
    total = 0
    for row in range(units.num_rows):
        at = units.offset + held.slot * units.slot_stride + (first_row + row) * units.row_stride
        place = base + row * _PLACE_STEP
        for unit in range(units.num_units):
            piece = data[at + unit * units.unit_bytes : at + (unit + 1) * units.unit_bytes]
            total += _value(place + (units.first_unit + unit) * _INDEX_STEP, piece)
    return total & DIGEST_MASK


def _value(name: int, data: memoryview) -> int:
    """Mix a unit's name and the CRC-32 of its bytes, with the finalizer of SplitMix64: sums of them are as good as random."""
    bits = (name ^ (zlib.crc32(data) * _INDEX_STEP)) & DIGEST_MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & DIGEST_MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & DIGEST_MASK
    return bits ^ (bits >> 31)


def _name(cache: CacheName, segment: Segment) -> int:
    namespace, role, layer = cache
    text = f"{namespace}/{role}/{layer}/{segment}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _of_span(span: Span, shape: CacheShape, dcp_size: int, dcp_rank: int) -> Units:
    key, place = span.key, span.place
    cache = (key.namespace, key.role, key.layer)
    match place:
        case PagedPlace():
            return PagedUnits(
                cache=cache,
                first_head=span.start,
                num_heads=span.length,
                offset=place.offset,
                block_stride=place.block_stride,
                head_bytes=place.head_bytes,
                token_bytes=place.token_bytes,
                modulus=dcp_size,
                residue=dcp_rank,
                divisor=dcp_size,
            )
        case SlotPlace():
            piece = Piece(segment=key.segment, start=span.start, length=span.length)
            rows = place.moved_rows
            return _slot_units(
                cache, piece, place.offset, (place.slot_stride, place.row_stride), rows, place.unit_bytes, shape
            )


def _of_template(template: CopyTemplate, shape: CacheShape) -> Iterator[Units]:
    part = template.part
    cache = (part.namespace, part.role, part.layer)
    if isinstance(template, PagedTemplate):
        yield PagedUnits(
            cache=cache,
            first_head=template.piece.start,
            num_heads=template.piece.length,
            offset=template.src_offset,
            block_stride=template.src_block_stride,
            head_bytes=template.head_bytes,
            token_bytes=template.token_bytes,
            modulus=part.modulus,
            residue=part.residue,
            divisor=1,
        )
        return
    unit_bytes = template.row_bytes // sum(piece.length for piece in template.pieces)
    strides = template.src_slot_stride, template.src_row_stride
    offset = template.src_offset
    for piece in template.pieces:
        yield _slot_units(cache, piece, offset, strides, template.moved_rows, unit_bytes, shape)
        offset += piece.length * unit_bytes


def _slot_units(  # noqa: PLR0917 - where a piece lies
    cache: CacheName,
    piece: Piece,
    offset: int,
    strides: tuple[int, int],
    num_rows: int,
    unit_bytes: int,
    shape: CacheShape,
) -> SlotUnits:
    group = _group(piece.segment, shape)
    if piece.start % group or piece.length % group:
        rule = f"multiples of {group}, the channels of a key head"
        raise InvalidValueError(field=f"{piece.segment} channels", value=(piece.start, piece.length), rule=rule)
    return SlotUnits(
        cache=cache,
        segment=piece.segment,
        first_unit=piece.start // group,
        num_units=piece.length // group,
        offset=offset,
        slot_stride=strides[0],
        row_stride=strides[1],
        num_rows=num_rows,
        unit_bytes=group * unit_bytes,
    )


def _group(segment: Segment, shape: CacheShape) -> int:
    """How many units of the manifest make one of a digest: a value head of SSM, a bootstrap, the channels of a key head of CONV."""
    match segment:
        case Segment.WHOLE:
            return 1
        case Segment.Q | Segment.K:
            return shape.key_head_dim
        case Segment.V:
            return shape.value_head_dim * (shape.num_value_heads // shape.num_key_heads)
