"""What a ledger says, word for word: of reports that cannot be, and of what is missing; and what a view of it shows."""

from __future__ import annotations

import pytest

from contracts.errors import ErrorCode
from contracts.handoff import PartDone, PartsReport, SourceProgress
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.pull import Transfer
from services.broker.core.ledger import Ledger, LedgerError

KEY = PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=3, src_rank=0, dst_rank=1)
VALUE = PlannedPart(namespace=Namespace.TARGET, role=Role.VALUE, layer=3, src_rank=0, dst_rank=1)
STATE = PlannedPart(namespace=Namespace.TARGET, role=Role.SSM, layer=0, src_rank=2, dst_rank=1)
Ranges = tuple[tuple[int, int], ...]
NAME = "target key of layer 3 for destination rank 1"


def ledger(*planned: PlannedPart, cached: int = 16, prompt: int = 40, pulled: tuple[Role, ...] = ()) -> Ledger:
    """A prompt of 40 tokens in blocks of 16, of which 16 are cached."""
    return Ledger.open(planned, num_cached_tokens=cached, num_prompt_tokens=prompt, block_size=16, pulled=pulled)


def report(
    *parts: tuple[PlannedPart, Ranges],
    revision: int = 1,
    rank: int = 0,
    dp_rank: int = 0,
    transfer: Transfer = Transfer.PUSH,
    num_bytes: int = 100,
) -> PartsReport:
    """A report of one source rank."""
    return PartsReport(
        handoff_id="r1-0",
        incarnation="i",
        source_dp_rank=dp_rank,
        source_rank=rank,
        revision=revision,
        parts=tuple(
            PartDone(
                namespace=one.namespace, role=one.role, layer=one.layer, destination_rank=one.dst_rank, ranges=done
            )
            for one, done in parts
        ),
        num_bytes=num_bytes,
        push_ms=1.0,
        transfer=transfer,
    )


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (report((KEY, ((16, 20), (18, 24)))), f"{NAME}: [18, 24) is empty, negative or done twice"),
        (report((KEY, ((20, 20),))), f"{NAME}: [20, 20) is empty, negative or done twice"),
        (report((KEY, ((-1, 3),))), f"{NAME}: [-1, 3) is empty, negative or done twice"),
        (report((KEY, ((16, 41),))), f"{NAME}: [16, 41) is not owed; the rule is: inside [(16, 40)]"),
        (report((KEY, ((15, 40),))), f"{NAME}: [15, 40) is not owed; the rule is: inside [(16, 40)]"),
        (report(rank=5), "source_rank: 5 owes nothing; the rule is: one of [0, 2]"),
        (
            report((STATE, ((0, 1),))),
            "target ssm of layer 0 for destination rank 1 is no planned part of source rank 0",
        ),
        (
            report((KEY, ((16, 40),)), transfer=Transfer.PULL),
            f"{NAME} is pushed by source rank 0: decode is not to pull it",
        ),
    ],
)
def test_a_report_that_cannot_be_is_refused_word_for_word(told: PartsReport, text: str) -> None:
    """The part, the range and the rule; a protocol error."""
    with pytest.raises(LedgerError) as caught:
        ledger(KEY, STATE).take(told)
    assert (caught.value.message, caught.value.code) == (text, ErrorCode.PROTOCOL)


def test_what_a_later_report_may_not_do() -> None:
    """Take ranges or parts back, or come from another replica."""
    before = ledger(KEY, VALUE).take(report((KEY, ((16, 32),)), (VALUE, ((16, 24),))))
    for told, text in (
        (
            report((KEY, ((16, 24),)), (VALUE, ((16, 24),)), revision=2),
            f"{NAME}: a newer report takes parts back",
        ),
        (report((KEY, ((16, 40),)), revision=2), "source rank 0: revision 2 takes parts back"),
        (
            report((KEY, ((16, 40),)), revision=2, dp_rank=3),
            (
                "source_dp_rank: 3 is not allowed; the rule is: 0, like all reports of a handoff: "
                "one replica computes the whole prompt"
            ),
        ),
    ):
        with pytest.raises(LedgerError) as caught:
            before.take(told)
        assert caught.value.message == text
    pulled = ledger(KEY, VALUE, pulled=(Role.KEY,))
    with pytest.raises(LedgerError) as caught:
        pulled.take(report((KEY, ((16, 40),))))
    assert caught.value.message == f"{NAME} is pulled by decode: source rank 0 is not to push it"
    with pytest.raises(LedgerError) as caught:
        pulled.take(report((STATE, ((0, 1),)), transfer=Transfer.PULL))
    assert caught.value.message == (
        "target ssm of layer 0 for destination rank 1 is pushed by source rank 0: decode is not to pull it"
    )


def test_what_is_missing_is_told_with_its_gaps() -> None:
    """In the order of the sources, at most so many parts, and at most four gaps of each."""
    opened = ledger(KEY, VALUE, STATE, prompt=400, pulled=(Role.SSM,))
    gapped = tuple((start, start + 8) for start in range(16, 96, 16))
    partly = opened.take(report((KEY, gapped), (VALUE, ((16, 400),))))
    state = "target ssm of layer 0 for destination rank 1 from source rank 2, pulled by decode: [0, 1)"
    key = f"{NAME} from source rank 0: [24, 32), [40, 48), [56, 64), [72, 80) and more"
    assert set(partly.missing(8)) == {state, key}
    assert len(partly.missing(1)) == 1
    assert partly.missing(0) == ()
    four = tuple((start, start + 8) for start in range(16, 80, 16))
    exactly = ledger(KEY, prompt=80).take(report((KEY, four)))
    assert exactly.missing(1) == (f"{NAME} from source rank 0: [24, 32), [40, 48), [56, 64), [72, 80)",)
    assert exactly.num_parts((Transfer.PUSH, 0)) == 1
    assert exactly.num_parts((Transfer.PULL, 0)) == 0


def test_progress_counts_parts_and_bytes_of_each_source() -> None:
    """A source that has said nothing has brought nothing; parts that owe nothing do not count."""
    opened = ledger(KEY, VALUE, STATE)
    assert opened.owes
    assert opened.open_by(Transfer.PUSH)
    assert not opened.open_by(Transfer.PULL)
    partly = opened.take(report((KEY, ((16, 40),)), (VALUE, ((16, 24),))))
    first = SourceProgress(transfer=Transfer.PUSH, source_rank=0, num_parts=2, num_done=1, num_bytes=100)
    second = SourceProgress(transfer=Transfer.PUSH, source_rank=2, num_parts=1, num_done=0, num_bytes=0)
    assert partly.progress == (first, second)
    whole = partly.take(report((STATE, ((0, 1),)), rank=2, num_bytes=7))
    whole = whole.take(report((KEY, ((16, 40),)), (VALUE, ((16, 24), (24, 40))), revision=2, num_bytes=200))
    assert (whole.closed, whole.num_bytes, whole.missing(8)) == (True, 207, ())
    assert not whole.open_by(Transfer.PUSH)
    assert [one.num_done for one in whole.progress] == [2, 1]
    assert [one.source_rank for one in whole.reports] == [0, 2]
    cached = ledger(KEY, cached=40)
    assert (cached.owes, cached.closed, cached.progress[0].num_done) == (False, True, 0)
    assert (whole.num_owed_parts, cached.num_owed_parts, cached.num_parts((Transfer.PUSH, 0))) == (3, 0, 0)


def test_a_draft_cache_owes_nothing_at_its_first_position() -> None:
    """Its first pair is kept at position 1; with more cached than that, it owes what the others owe."""
    draft = PlannedPart(namespace=Namespace.DRAFT, role=Role.KEY, layer=0, src_rank=0, dst_rank=0)
    assert ledger(draft, cached=0).owed(draft) == ((1, 40),)
    assert ledger(draft, cached=16).owed(draft) == ((16, 40),)
    assert ledger(KEY, cached=0).owed(KEY) == ((0, 40),)
    assert ledger(draft, cached=0, prompt=1).owed(draft) == ()


def test_blocks_of_a_destination_among_several_are_owed_within_the_prompt() -> None:
    """Every third block of 16 tokens, from the one with the residue on, the first and the last cut; counted by what it keeps."""
    part = PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=0, src_rank=0, dst_rank=0, modulus=3, residue=1)
    assert ledger(part, cached=20, prompt=75).owed(part) == ((4, 27),)
    assert ledger(part, cached=32, prompt=64).owed(part) == ()


def test_a_part_that_is_listed_twice_counts_with_all_of_its_ranges() -> None:
    """A report may tell of the pieces of a part one by one."""
    whole = ledger(KEY).take(report((KEY, ((16, 24),)), (KEY, ((24, 40),))))
    assert whole.closed


def test_a_pulled_role_of_another_layer_is_no_planned_part() -> None:
    """It moves the right way, but nobody planned it."""
    other = PlannedPart(namespace=Namespace.TARGET, role=Role.SSM, layer=9, src_rank=2, dst_rank=1)
    with pytest.raises(LedgerError) as caught:
        ledger(KEY, STATE, pulled=(Role.SSM,)).take(report((other, ((0, 1),)), rank=2, transfer=Transfer.PULL))
    assert caught.value.message == (
        "target ssm of layer 9 for destination rank 1 is no planned part of source rank 2, pulled by decode"
    )
