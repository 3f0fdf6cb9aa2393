"""The ledger's single rules: what a report may not say, and what it says twice."""

from __future__ import annotations

import msgspec
import pytest

from contracts.handoff import PartDone, PartsReport
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.pull import ShardPull, ShardState, Transfer
from services.broker.core.ledger import Ledger, LedgerError

KEY = PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=3, src_rank=0, dst_rank=1)
STATE = PlannedPart(namespace=Namespace.TARGET, role=Role.SSM, layer=0, src_rank=0, dst_rank=1)
OTHER = PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=3, src_rank=2, dst_rank=1)

Ranges = tuple[tuple[int, int], ...]


def ledger(*planned: PlannedPart, num_cached_tokens: int = 16, pulled: tuple[Role, ...] = ()) -> Ledger:
    """A prompt of 40 tokens in blocks of 16."""
    return Ledger.open(planned, num_cached_tokens=num_cached_tokens, num_prompt_tokens=40, block_size=16, pulled=pulled)


def report(
    *parts: tuple[PlannedPart, Ranges],
    revision: int = 1,
    source: int = 0,
    dp_rank: int = 0,
    transfer: Transfer = Transfer.PUSH,
    shards: tuple[ShardPull, ...] = (),
) -> PartsReport:
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
        transfer=transfer,
        shards=shards,
    )


def test_needs_every_planned_part_of_every_source() -> None:
    """One source that says nothing keeps the ledger open, however much the others report."""
    open_ledger = ledger(KEY, STATE, OTHER).take(report((KEY, ((16, 40),)), (STATE, ((0, 1),))))
    assert open_ledger.closed_sources == {(Transfer.PUSH, 0)}
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
    assert fresh.owed(part) == ((4, 16),)
    assert fresh.take(report((part, ((4, 16),)))).closed
    with pytest.raises(LedgerError, match="not owed"):
        fresh.take(report((part, ((4, 24),))))


def test_a_rank_of_a_group_that_gets_no_block_counts_nowhere() -> None:
    """Of one block rank 0 gets all: the part of rank 1 is closed from the start, and is neither owed nor done in what people see."""
    parts = [msgspec.structs.replace(KEY, dst_rank=rank, modulus=2, residue=rank) for rank in (0, 1)]
    fresh = ledger(*parts, num_cached_tokens=32)
    assert [fresh.owed(part) for part in parts] == [((16, 24),), ()]
    assert (fresh.num_owed_parts, fresh.num_parts((Transfer.PUSH, 0))) == (1, 1)
    (before,) = fresh.progress
    assert (before.num_done, before.num_parts) == (0, 1)
    closed = fresh.take(report((parts[0], ((16, 24),))))
    assert closed.closed
    assert [(one.num_done, one.num_parts) for one in closed.progress] == [(1, 1)]


def test_a_pulled_part_is_owed_by_decode() -> None:
    """The same source rank pushes one part and is read for the other: both reports are needed, each from who moves the bytes."""
    fresh = ledger(KEY, STATE, pulled=(Role.SSM,))
    assert fresh.sources == {(Transfer.PUSH, 0), (Transfer.PULL, 0)}
    pushed = fresh.take(report((KEY, ((16, 40),))))
    assert not pushed.closed
    assert (pushed.open_by(Transfer.PUSH), pushed.open_by(Transfer.PULL)) == (False, True)
    assert pushed.take(report((STATE, ((0, 1),)), transfer=Transfer.PULL)).closed


def test_revisions_of_push_and_pull_have_nothing_to_do_with_each_other() -> None:
    """Two reporters count for themselves."""
    pushed = ledger(KEY, STATE, pulled=(Role.SSM,)).take(report((KEY, ((16, 40),)), revision=9))
    assert pushed.take(report((STATE, ((0, 1),)), transfer=Transfer.PULL, revision=1)).closed


@pytest.mark.parametrize(
    ("part", "ranges", "transfer", "rule"),
    [
        (STATE, ((0, 1),), Transfer.PUSH, "is pulled by decode: source rank 0 is not to push it"),
        (KEY, ((16, 40),), Transfer.PULL, "is pushed by source rank 0: decode is not to pull it"),
    ],
)
def test_a_part_that_moves_the_other_way(part: PlannedPart, ranges: Ranges, transfer: Transfer, rule: str) -> None:
    """Who is to move a part is decided before prefill runs: the other way is a protocol error, even if it moves first."""
    with pytest.raises(LedgerError, match=rule):
        ledger(KEY, STATE, pulled=(Role.SSM,)).take(report((part, ranges), transfer=transfer))


def test_a_rank_whose_parts_all_move_the_other_way_may_say_so() -> None:
    """A report without parts closes nothing and breaks nothing."""
    fresh = ledger(KEY, pulled=(Role.KEY,))
    heard = fresh.take(report())
    assert (heard.closed, heard.closed_sources) == (False, frozenset())
    assert heard.take(report((KEY, ((16, 40),)), transfer=Transfer.PULL)).closed


def test_progress_and_shards_are_told_by_source() -> None:
    """What people see of a transfer: how much each source owes and has brought, and how far each shard is."""
    shard = ShardPull(source_rank=0, destination_rank=1, state=ShardState.PULLING)
    after = ledger(KEY, STATE, OTHER, pulled=(Role.SSM,)).take(report((KEY, ((16, 30),))))
    after = after.take(report(transfer=Transfer.PULL, shards=(shard,)))
    told = {(one.transfer, one.source_rank): (one.num_done, one.num_parts, one.num_bytes) for one in after.progress}
    assert told == {(Transfer.PUSH, 0): (0, 1, 100), (Transfer.PUSH, 2): (0, 1, 0), (Transfer.PULL, 0): (0, 1, 100)}
    assert after.shards == (shard,)
    assert after.missing(1) == (
        "target ssm of layer 0 for destination rank 1 from source rank 0, pulled by decode: [0, 1)",
    )


def test_views_show_what_is_missing_first() -> None:
    """Every part with what it owes and has: the complete ones come last, since a message may not carry all."""
    after = ledger(KEY, STATE, pulled=(Role.SSM,)).take(report((STATE, ((0, 1),)), transfer=Transfer.PULL))
    first, second = after.part_views()
    assert (first.role, first.transfer, first.owed, first.done) == (Role.KEY, Transfer.PUSH, ((16, 40),), ())
    assert (second.role, second.transfer, second.done) == (Role.SSM, Transfer.PULL, ((0, 1),))
