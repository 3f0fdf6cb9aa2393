"""The ledger's single rules: what a report may not say, and what it says twice."""

from __future__ import annotations

import pytest

from contracts.handoff import PartDone, PartsReport
from contracts.manifest import Namespace, PlannedPart, Role
from services.broker.core.ledger import Ledger, LedgerError

KEY = PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=3, src_rank=0, dst_rank=1)
STATE = PlannedPart(namespace=Namespace.TARGET, role=Role.SSM, layer=0, src_rank=0, dst_rank=1)
OTHER = PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=3, src_rank=2, dst_rank=1)

Ranges = tuple[tuple[int, int], ...]


def ledger(*planned: PlannedPart, num_cached_tokens: int = 16) -> Ledger:
    """A prompt of 40 tokens in blocks of 16."""
    return Ledger.open(planned, num_cached_tokens=num_cached_tokens, num_prompt_tokens=40, block_size=16)


def report(*parts: tuple[PlannedPart, Ranges], revision: int = 1, source: int = 0, dp_rank: int = 0) -> PartsReport:
    """A report of these parts."""
    done = tuple(
        PartDone(
            namespace=part.namespace, role=part.role, layer=part.layer, destination_rank=part.dst_rank, ranges=ranges
        )
        for part, ranges in parts
    )
    return PartsReport(
        handoff_id="r1-0",
        incarnation="i",
        source_dp_rank=dp_rank,
        source_rank=source,
        revision=revision,
        parts=done,
        num_bytes=100,
        push_ms=1.0,
    )


def test_needs_every_planned_part_of_every_source() -> None:
    """One source that says nothing keeps the ledger open, however much the others report."""
    open_ledger = ledger(KEY, STATE, OTHER).take(report((KEY, ((16, 40),)), (STATE, ((0, 1),))))
    assert open_ledger.closed_sources == {0}
    assert not open_ledger.closed
    closed = open_ledger.take(report((OTHER, ((32, 40), (16, 32))), source=2))
    assert closed.closed
    assert closed.num_bytes == 200


def test_an_older_or_equal_revision_says_nothing_new() -> None:
    """Reports are cumulative: late and repeated ones leave the ledger as it is."""
    after = ledger(KEY).take(report((KEY, ((16, 30),)), revision=2))
    assert after.take(report((KEY, ((16, 20),)), revision=1)) is after
    assert after.take(report((KEY, ((16, 40),)), revision=2)) is after


def test_the_ranks_of_two_replicas_do_not_add_up() -> None:
    """One replica computes a prompt: equal rank numbers of another one must never close its parts."""
    open_ledger = ledger(KEY, OTHER).take(report((KEY, ((16, 40),)), dp_rank=1))
    assert open_ledger.take(report((OTHER, ((16, 40),)), source=2, dp_rank=1)).closed
    with pytest.raises(LedgerError, match="source_dp_rank: 0 is not allowed; the rule is: 1"):
        open_ledger.take(report((OTHER, ((16, 40),)), source=2))


def test_a_source_that_owes_nothing_is_closed_from_the_start() -> None:
    """With the whole prompt cached at decode only states are owed."""
    assert ledger(KEY, num_cached_tokens=40).closed
    assert not ledger(KEY, STATE, num_cached_tokens=40).closed


@pytest.mark.parametrize(
    ("ranges", "rule"),
    [
        (((16, 20), (18, 24)), "done twice"),
        (((16, 20), (16, 20)), "done twice"),
        (((20, 20),), "empty"),
        (((0, 20),), "not owed"),
        (((16, 41),), "not owed"),
        (((-1, 3),), "negative"),
    ],
)
def test_ranges_that_cannot_be(ranges: Ranges, rule: str) -> None:
    """Overlapping, empty and out-of-range ranges are protocol errors that name the part."""
    with pytest.raises(LedgerError, match=rule) as caught:
        ledger(KEY).take(report((KEY, ranges)))
    assert "key of layer 3" in caught.value.message


def test_parts_and_sources_that_nobody_planned() -> None:
    """A part or a source outside the plan is a protocol error."""
    with pytest.raises(LedgerError, match="no planned part"):
        ledger(KEY).take(report((STATE, ((0, 1),))))
    with pytest.raises(LedgerError, match="owes nothing"):
        ledger(KEY).take(report((KEY, ((16, 40),)), source=5))


def test_a_report_takes_nothing_back() -> None:
    """A newer report that holds less than an older one is a protocol error."""
    after = ledger(KEY).take(report((KEY, ((16, 30),))))
    with pytest.raises(LedgerError, match="takes parts back"):
        after.take(report((KEY, ((20, 40),)), revision=2))


def test_blocks_of_another_context_parallel_rank_are_not_owed() -> None:
    """Under dcp a destination is owed its own blocks alone."""
    part = PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=3, src_rank=0, dst_rank=1, modulus=2, residue=1)
    fresh = ledger(part, num_cached_tokens=20)
    assert fresh.owed(part) == ((20, 32),)
    assert fresh.take(report((part, ((20, 32),)))).closed
    with pytest.raises(LedgerError, match="not owed"):
        fresh.take(report((part, ((20, 40),))))
