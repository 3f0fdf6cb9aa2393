"""What a broker does about a draft's caches: they are owed like all others, and decode is told that they have come."""

from __future__ import annotations

import pytest

from contracts.codec import decode, encode
from contracts.handoff import HandoffRecord, HandoffState
from contracts.manifest import Namespace, PlannedPart, Role
from services.broker.core import effects as fx
from services.broker.core.ledger import Ledger
from services.broker.core.step import step
from tests.unit.broker_steps import KEY, STATE, adopted, finished, of, report, reserved, reserving, stored

DRAFT_KEY = PlannedPart(namespace=Namespace.DRAFT, role=Role.KEY, layer=0, src_rank=0, dst_rank=0)
BOOTSTRAP = PlannedPart(namespace=Namespace.DRAFT, role=Role.BOOTSTRAP, layer=0, src_rank=0, dst_rank=0)


@pytest.mark.parametrize(
    ("num_cached_tokens", "num_prompt_tokens", "expected"),
    [(0, 40, ((1, 40),)), (1, 40, ((1, 40),)), (16, 40, ((16, 40),)), (0, 2, ((1, 2),)), (0, 1, ()), (40, 40, ())],
)
def test_a_draft_owes_the_pairs_that_prefill_can_compute(
    num_cached_tokens: int, num_prompt_tokens: int, expected: tuple[tuple[int, int], ...]
) -> None:
    """Slots from 1 on, none of a prompt of one token; the bootstrap always, in one piece."""
    ledger = Ledger.open(
        (DRAFT_KEY, BOOTSTRAP),
        num_cached_tokens=num_cached_tokens,
        num_prompt_tokens=num_prompt_tokens,
        block_size=16,
    )
    assert ledger.has_drafts
    assert (ledger.owed(DRAFT_KEY), ledger.owed(BOOTSTRAP)) == (expected, ((0, 1),))
    assert not ledger.closed


def test_each_rank_of_a_group_is_owed_its_blocks_of_the_draft() -> None:
    """Counted by what it keeps: place 0 of the first rank's first block is nobody's pair."""
    second = PlannedPart(
        namespace=Namespace.DRAFT, role=Role.KEY, layer=0, src_rank=0, dst_rank=1, modulus=2, residue=1
    )
    first = PlannedPart(namespace=Namespace.DRAFT, role=Role.KEY, layer=0, src_rank=0, dst_rank=0, modulus=2)
    ledger = Ledger.open((first, second), num_cached_tokens=0, num_prompt_tokens=40, block_size=16)
    assert (ledger.owed(first), ledger.owed(second)) == (((1, 24),), ((0, 16),))


def commits(*planned: PlannedPart) -> tuple[list[fx.AskCommit], HandoffRecord]:
    """The commit of a handoff with this plan, and its record before."""
    handoff, _ = reserved(reserving(*planned))
    handoff, _ = stored(handoff)
    handoff, _ = finished(handoff)
    handoff, _ = step(handoff, report(*planned))
    record = handoff.record
    _, effects = stored(handoff)
    return of(effects, fx.AskCommit), record


@pytest.mark.parametrize(("planned", "drafts"), [((KEY, DRAFT_KEY), True), ((KEY, STATE), False)])
def test_decode_is_told_with_the_commit_whether_drafts_have_come(
    planned: tuple[PlannedPart, ...], drafts: bool
) -> None:
    """The plan says so, and so does the record: another broker may have to send the commit."""
    (asked,), record = commits(*planned)
    assert asked.message.drafts is drafts
    assert decode(encode(record), HandoffRecord).drafts is drafts


@pytest.mark.parametrize("drafts", [True, False])
def test_a_commit_that_another_broker_sends_again_says_the_same(drafts: bool) -> None:
    """It has no plan any more."""
    _, effects = adopted(HandoffState.COMMITTED, drafts=drafts)
    (asked,) = of(effects, fx.AskCommit)
    assert asked.message.drafts is drafts


def test_without_the_bootstrap_decode_is_not_given_the_request() -> None:
    """All of the draft's pairs are there, and the state that they go on from is not."""
    handoff, _ = reserved(reserving(KEY, DRAFT_KEY, BOOTSTRAP))
    handoff, _ = stored(handoff)
    handoff, _ = finished(handoff)
    handoff, _ = step(handoff, report(KEY, DRAFT_KEY))
    assert handoff.ledger is not None
    assert handoff.ledger.missing(4) == (
        "draft bootstrap of layer 0 for destination rank 0 from source rank 0: [0, 1)",
    )
    assert not handoff.commit_ready
