"""What a broker shows of a handoff fits into a message, whatever the handoff is made of."""

from __future__ import annotations

from contracts.codec import encode
from contracts.handoff import HandoffState
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.pull import Transfer
from services.broker.core.handoff import Handoff
from services.broker.core.step import step
from services.broker.core.view import view, view_of_record
from tests.unit.broker_steps import SECRET, SOURCE, finished, record, report, reserved, reserving, stored

PARTS = tuple(
    PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=layer, src_rank=0, dst_rank=0) for layer in range(50)
)


def half_done() -> Handoff:
    """Twenty of fifty parts have arrived."""
    handoff, _ = reserved(reserving(*PARTS))
    return step(handoff, report(*PARTS[:20]))[0]


def test_everything_is_shown_where_it_fits() -> None:
    """All parts with what is owed and done; those that are missing come first."""
    shown = view(half_done())
    assert (len(shown.parts), shown.num_parts) == (50, 50)
    assert [part.done == part.owed for part in shown.parts] == [False] * 30 + [True] * 20
    assert [(one.num_done, one.num_parts) for one in shown.record.progress] == [(20, 50)]


def test_a_message_carries_what_is_missing_before_anything_else() -> None:
    """The bound is kept to the byte, and the count says that there is more."""
    bare = len(encode(view(half_done(), 0)))
    for max_bytes in range(bare, bare + 3_000, 97):
        shown = view(half_done(), max_bytes)
        assert len(encode(shown)) <= max_bytes
        assert not any(part.done for part in shown.parts)
        assert shown.num_parts == 50
    assert 5 < len(shown.parts) < 30


def test_no_secret_is_shown() -> None:
    """Neither grant's; and the record in memory is ahead of the bucket's."""
    handoff, _ = reserved(reserving(*PARTS), pulled=(Role.KEY,))
    handoff, _ = finished(stored(handoff)[0], source=SOURCE)
    shown = view(handoff)
    assert shown.record.lock is not None
    assert {part.transfer for part in shown.parts} == {Transfer.PULL}
    assert SECRET not in encode(shown).decode()


def test_a_handoff_of_which_only_the_record_is_left_counts_its_parts() -> None:
    """Nobody remembers which they were."""
    progress = view(half_done()).record.progress
    shown = view_of_record(record(HandoffState.FINISHED, progress=progress))
    assert (shown.num_parts, shown.parts, shown.told) == (50, (), ())
