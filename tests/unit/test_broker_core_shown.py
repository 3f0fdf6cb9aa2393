"""What a broker shows of a handoff: every field, and as much as fits to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.codec import encode
from contracts.events import EventName
from contracts.handoff import HandoffState, RequestEnded
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.pull import Transfer
from contracts.requests import FinishReason, WorkerRef
from contracts.show import HandoffView, PartView
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core import messages
from services.broker.core.leases import Leases
from services.broker.core.ledger import Ledger
from services.broker.core.step import step
from services.broker.core.view import view, view_of_record
from tests.unit.broker_steps import KEY, SECOND, SOURCE, STATE, adopted, record, report, reserved, reserving

DRAFT = PlannedPart(namespace=Namespace.DRAFT, role=Role.VALUE, layer=5, src_rank=3, dst_rank=1)


def test_a_part_is_shown_with_all_that_names_it() -> None:
    """Namespace, role, layer, both ranks, the way it moves, what is owed and what has arrived."""
    ledger = Ledger.open((DRAFT,), num_cached_tokens=16, num_prompt_tokens=40, block_size=16, pulled=(Role.VALUE,))
    assert ledger.part_views() == (
        PartView(
            namespace=Namespace.DRAFT,
            role=Role.VALUE,
            layer=5,
            destination_rank=1,
            transfer=Transfer.PULL,
            source_rank=3,
            owed=((16, 40),),
            done=(),
        ),
    )


def test_a_handoff_is_shown_with_who_holds_something() -> None:
    """Before there is a ledger, too; who has let go is shown as well."""
    handoff = reserving(KEY)
    both = (WorkerRole.DECODE, WorkerRole.PREFILL)
    bare = HandoffView(record=messages.for_bucket(handoff.record), parts=(), num_parts=0, told=both, settled=())
    assert view(handoff) == bare
    handoff, _ = step(handoff, ev.DeadlinePassed(at_ns=12 * SECOND))
    shown = view(step(handoff, settled(WorkerRole.PREFILL))[0])
    assert (shown.told, shown.settled) == (both, (WorkerRole.PREFILL,))
    assert (shown.quarantined, shown.unheard) == ((), ())


def settled(role: WorkerRole, **changes: Any) -> ev.ReleaseSettled:
    """What came of a release."""
    return ev.ReleaseSettled(at_ns=12 * SECOND, role=role, **({"acknowledged": True} | changes))


def told_by(effects: tuple[Any, ...]) -> list[tuple[EventName, bool | None]]:
    """Events, and whether they speak of quarantine."""
    return [(one.name, one.fields.get("quarantined")) for one in effects if isinstance(one, fx.Publish)]


def test_quarantine_and_silence_are_shown_apart_from_what_was_given_back() -> None:
    """Neither keeps the handoff; the event of a release tells of quarantine, too. Whoever answers a later release is unheard no more."""
    handoff, _ = step(reserving(KEY), ev.DeadlinePassed(at_ns=12 * SECOND))
    handoff, effects = step(handoff, settled(WorkerRole.DECODE, quarantined=True))
    assert told_by(effects) == [(EventName.DECODE_RELEASED, True)]
    handoff, effects = step(handoff, settled(WorkerRole.PREFILL, acknowledged=False))
    assert told_by(effects) == []
    shown = view(handoff)
    assert (shown.settled, shown.quarantined, shown.unheard) == (
        (WorkerRole.DECODE,),
        (WorkerRole.DECODE,),
        (WorkerRole.PREFILL,),
    )
    handoff, effects = step(handoff, settled(WorkerRole.DECODE))
    assert (view(handoff), told_by(effects)) == (shown, []), "only the first answer counts"
    handoff, effects = step(handoff, settled(WorkerRole.PREFILL))
    assert told_by(effects) == [(EventName.PREFILL_RELEASED, None)]
    shown = view(handoff)
    assert (shown.settled, shown.unheard) == ((WorkerRole.DECODE, WorkerRole.PREFILL), ())


@pytest.mark.parametrize("quarantined", [False, True])
def test_a_worker_that_ends_by_itself_says_whether_its_memory_is_free(quarantined: bool) -> None:
    """In its report of the end; one whose release was not heard before is unheard no more."""
    handoff, _ = adopted(HandoffState.DECODING)
    ended = RequestEnded(
        handoff_id="r1-0",
        incarnation="id",
        num_tokens=3,
        finish_reason=FinishReason.LENGTH,
        quarantined=quarantined,
    )
    found, effects = step(handoff, ev.WorkerEnded(at_ns=9 * SECOND, message=ended))
    assert (EventName.DECODE_RELEASED, quarantined or None) in told_by(effects)
    assert view(found).quarantined == ((WorkerRole.DECODE,) if quarantined else ())
    late, _ = step(handoff, ev.DeadlinePassed(at_ns=12 * SECOND))
    late, _ = step(late, settled(WorkerRole.DECODE, acknowledged=False))
    assert view(late).unheard == (WorkerRole.DECODE,)
    late, effects = step(late, ev.WorkerEnded(at_ns=13 * SECOND, message=ended))
    assert (EventName.DECODE_RELEASED, quarantined or None) in told_by(effects)
    assert (view(late).settled, view(late).unheard) == ((WorkerRole.DECODE,), ())


def test_as_many_parts_are_shown_as_fit() -> None:
    """One byte less, and the last one stays away."""
    handoff, _ = reserved(reserving(KEY, STATE))
    handoff, _ = step(handoff, report(KEY))
    whole = view(handoff)
    assert whole.num_parts == len(whole.parts) == 2
    room = len(encode(whole)) + 1  # the first part needs no comma, but is counted with one
    assert view(handoff, room) == whole
    assert len(view(handoff, room - 1).parts) == 1


def test_a_record_is_shown_without_secrets() -> None:
    """Nobody is known to hold anything."""
    known = record(HandoffState.FINISHED, source=SOURCE)
    assert view_of_record(known) == HandoffView(
        record=messages.for_bucket(known), parts=(), num_parts=0, told=(), settled=()
    )


def test_a_worker_that_signed_off_is_silent_no_more() -> None:
    """It is not found to be gone once more when its time is over, and verdicts are given from the first moment on."""
    leases = Leases(ttl_s=0.5)
    first, other = (WorkerRef(worker_id=f"decode-{n}", incarnation="i") for n in range(2))
    leases.heard(first, 0.0)
    leases.heard(other, 0.0)
    assert leases.signed_off("decode-0") == first
    assert leases.signed_off("decode-9") is None
    assert leases.expire(0.5) == (other,)
    assert leases.heard(first, 0.6) is None
    assert leases.expire(0.7) == ()
