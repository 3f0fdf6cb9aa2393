"""What a broker does with late, repeated and partial news of a pull."""

from __future__ import annotations

from msgspec.structs import replace

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import HandoffState
from contracts.manifest import Role
from contracts.pull import PullEnded, RequestLock, Transfer
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff
from services.broker.core.step import step
from tests.unit.broker_steps import (
    DECODE,
    KEY,
    SECOND,
    SOURCE,
    STATE,
    Effects,
    adopted,
    finished,
    of,
    report,
    reserved,
    reserving,
    stored,
)

ACCEPTED = ev.PullAccepted(at_ns=5 * SECOND, rpc_ms=1.0)
LOCK = RequestLock(number=1, holder=DECODE, taken_at="2030-01-01T00:00:01.000+00:00")
TROUBLE = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message="shard 0 of rank 0 could not be read")
OVER = ev.PullOver(at_ns=5 * SECOND, message=PullEnded(handoff_id="r1-0", incarnation="id", lock=1))


def pulling() -> Handoff:
    """Prefill has finished and pushed its key; decode has been asked to pull the state."""
    handoff, _ = stored(reserved(reserving(KEY, STATE), pulled=(Role.SSM,))[0])
    handoff, _ = step(handoff, report(KEY))
    return stored(finished(handoff, source=SOURCE)[0])[0]


def adopted_pulling() -> Handoff:
    """The same, after another broker had taken the lock."""
    handoff, _ = adopted(HandoffState.PREFILLING, pulled=(Role.SSM,), lock=LOCK)
    handoff, _ = step(handoff, ev.PlanFound(at_ns=2 * SECOND, planned=(KEY, STATE), block_size=16))
    handoff, _ = reserved(handoff, pulled=(Role.SSM,))
    return finished(handoff, source=SOURCE)[0]


def unlocked(effects: Effects) -> dict[str, object]:
    """What people are told of the lock's end."""
    (event,) = [effect for effect in of(effects, fx.Publish) if effect.name is EventName.REQUEST_UNLOCKED]
    return dict(event.fields)


def test_an_accepted_pull_is_waited_for() -> None:
    """Decode reports by itself; only what it told another broker is asked for, and once."""
    handoff, effects = step(pulling(), ACCEPTED)
    assert effects == ()
    assert handoff.pull_accepted
    handoff, effects = step(adopted_pulling(), ACCEPTED)
    assert [ask.role for ask in of(effects, fx.AskParts)] == [WorkerRole.DECODE]
    assert step(handoff, ACCEPTED) == (handoff, ())


def test_a_pull_that_is_accepted_without_a_lock_or_after_its_end_asks_for_nothing() -> None:
    """Its end was quicker than the answer."""
    handoff, _ = step(adopted_pulling(), OVER)
    assert step(handoff, ACCEPTED) == (handoff, ())
    judged, _ = step(adopted_pulling(), ev.CancelRequested(at_ns=4 * SECOND, reason="gone"))
    assert not of(step(judged, ACCEPTED)[1], fx.AskParts)


def test_a_pull_that_is_accepted_after_the_end_is_released_again() -> None:
    """Decode took it over after it had been released."""
    handoff, _ = step(pulling(), ev.DeadlinePassed(at_ns=12 * SECOND))
    _, effects = step(handoff, ACCEPTED)
    assert [release.role for release in of(effects, fx.AskRelease)] == [WorkerRole.DECODE]


def test_a_pull_that_ends_for_a_judged_handoff_is_not_heard() -> None:
    """The lock ends with the handoff."""
    judged, _ = step(pulling(), ev.CancelRequested(at_ns=4 * SECOND, reason="gone"))
    assert step(judged, OVER) == (judged, ())


def test_the_end_of_an_adopted_pull_has_no_time_of_its_own() -> None:
    """Nobody here saw the lock being taken."""
    _, effects = step(adopted_pulling(), OVER)
    fields = unlocked(effects)
    assert (fields.get("duration_ms"), fields.get("started_ns")) == (None, None)


def test_the_end_of_a_pull_counts_what_was_pulled() -> None:
    """Not what was pushed; and it carries what went wrong."""
    handoff, _ = step(pulling(), report(STATE, transfer=Transfer.PULL, num_bytes=64))
    _, effects = step(handoff, replace(OVER, message=replace(OVER.message, error=TROUBLE)))
    fields = unlocked(effects)
    assert (fields["num_parts"], fields["num_bytes"], fields["error"]) == (1, 64, TROUBLE)


def test_reports_that_an_ended_pull_owes_are_asked_for_of_decode() -> None:
    """It has read everything, and says so, but its last report is lost."""
    handoff, _ = step(pulling(), OVER)
    assert handoff.pull_ended is not None
    _, effects = step(handoff, ev.PartsOverdue(at_ns=6 * SECOND))
    assert [ask.role for ask in of(effects, fx.AskParts)] == [WorkerRole.DECODE]
