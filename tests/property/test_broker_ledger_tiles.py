"""The ledger as a set of ranges: it closes with the last missing token, in whatever order and pieces reports come."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.handoff import PartDone, PartsReport
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.pull import Transfer
from services.broker.core.ledger import Ledger, LedgerError, Source


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """A plan over one or two sources, some of it under context parallel."""
    modulus = draw(st.sampled_from((1, 2, 4)))
    planned = [
        PlannedPart(
            namespace=draw(st.sampled_from(tuple(Namespace))),
            role=role,
            layer=layer,
            src_rank=source,
            dst_rank=destination,
            modulus=modulus if role in {Role.KEY, Role.VALUE} else 1,
            residue=destination % modulus if role in {Role.KEY, Role.VALUE} else 0,
        )
        for source in range(draw(st.integers(1, 2)))
        for destination in range(draw(st.integers(1, 2)))
        for layer, role in enumerate(draw(st.permutations(tuple(Role))))
    ]
    num_prompt_tokens = draw(st.integers(1, 40))
    return Ledger.open(
        planned,
        num_cached_tokens=draw(st.integers(0, num_prompt_tokens)),
        num_prompt_tokens=num_prompt_tokens,
        block_size=draw(st.sampled_from((1, 4, 16))),
        pulled=draw(st.sets(st.sampled_from(tuple(Role)))),
    )


@given(ledger=ledgers(), data=st.data())
def test_closes_with_the_last_piece_and_not_before(ledger: Ledger, data: st.DataObject) -> None:
    """Pieces of one token, reported cumulatively in any order: open until the very last one."""
    pieces = [
        (part, position)
        for part in ledger.planned
        for start, end in ledger.owed(part)
        for position in range(start, end)
    ]
    done: dict[PlannedPart, list[int]] = {}
    order = data.draw(st.permutations(pieces))
    step = max(1, len(order) // 8)
    for index, (part, position) in enumerate(order, start=1):
        assert not ledger.closed
        done.setdefault(part, []).append(position)
        if index % step and index < len(order):
            continue
        for source in sorted(ledger.sources):
            ledger = ledger.take(_report(ledger, source, index, done))
    assert ledger.closed
    assert all(one.num_done == one.num_parts for one in ledger.progress)


@given(ledger=ledgers(), data=st.data())
def test_no_part_moves_both_ways(ledger: Ledger, data: st.DataObject) -> None:
    """Every part has one source, by its role; the same part reported by the other way is refused, and closes nothing."""
    part = data.draw(st.sampled_from(ledger.planned))
    transfer, rank = ledger.source_of(part)
    assert transfer is (Transfer.PULL if part.role in ledger.pulled else Transfer.PUSH)
    other = Transfer.PUSH if transfer is Transfer.PULL else Transfer.PULL
    done = {part: [position for start, end in ledger.owed(part) for position in range(start, end)]}
    report = _report(ledger, (transfer, rank), 1, done)
    if report.parts and done[part]:
        with pytest.raises(LedgerError, match="is not to"):
            ledger.take(msgspec.structs.replace(report, transfer=other))


@given(ledger=ledgers())
def test_owed_ranges_of_a_group_tile_the_prompt(ledger: Ledger) -> None:
    """The tokens that the members of a context-parallel group are owed are disjoint, and together the whole prompt."""
    for part in ledger.planned:
        if part.role not in {Role.KEY, Role.VALUE}:
            assert ledger.owed(part) == ((0, 1),)
            continue
        group = [_member(part, residue) for residue in range(part.modulus)]
        tokens = sorted(
            _token(each, place, ledger.block_size)
            for each in group
            for start, end in ledger.owed(each)
            for place in range(start, end)
        )
        first = ledger.num_cached_tokens
        if part.namespace is Namespace.DRAFT:
            first = max(first, 1)
        assert tokens == list(range(first, ledger.num_prompt_tokens))


def _token(part: PlannedPart, place: int, block_size: int) -> int:
    """The token of the sequence that a destination rank keeps at this place among its own."""
    block, offset = divmod(place, block_size)
    return (block * part.modulus + part.residue) * block_size + offset


def _member(part: PlannedPart, residue: int) -> PlannedPart:
    return PlannedPart(
        namespace=part.namespace,
        role=part.role,
        layer=part.layer,
        src_rank=part.src_rank,
        dst_rank=part.dst_rank,
        modulus=part.modulus,
        residue=residue,
    )


def _report(ledger: Ledger, source: Source, revision: int, done: dict[PlannedPart, list[int]]) -> PartsReport:
    parts = tuple(
        PartDone(
            namespace=part.namespace,
            role=part.role,
            layer=part.layer,
            destination_rank=part.dst_rank,
            ranges=tuple((position, position + 1) for position in positions),
        )
        for part, positions in done.items()
        if ledger.source_of(part) == source
    )
    return PartsReport(
        handoff_id="r1-0",
        incarnation="i",
        source_rank=source[1],
        revision=revision,
        parts=parts,
        num_bytes=0,
        push_ms=0.0,
        transfer=source[0],
    )
