"""What a new broker asks for when it goes on with a handoff that another one began."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import (
    CommitHandoff,
    Grant,
    HandoffState,
    PartDigest,
    PrefillFinished,
    RequestEnded,
    RunPrefill,
    TakenOver,
)
from contracts.manifest import Namespace, Role
from contracts.pull import PullEnded, RequestLock, Transfer
from contracts.requests import FinishReason, MixedRoute, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff
from services.broker.core.step import adopt, step
from tests.unit.broker_steps import (
    DECODE,
    GRANT,
    KEY,
    POLICY,
    PREFILL,
    SECOND,
    SECRET,
    SOURCE,
    STATE,
    Effects,
    adopted,
    adopting,
    code_of,
    finished,
    names_of,
    of,
    record,
    report,
    reserved,
    stored,
)

WITH_SECRET = msgspec.structs.replace(GRANT, secret=SECRET)
PLAN = ev.PlanFound(at_ns=2 * SECOND, planned=(KEY, STATE), block_size=16)
MIXED = MixedRoute(mixed=WorkerRef(worker_id="m0", incarnation="im"))
LOCK = RequestLock(number=1, holder=DECODE, taken_at="2030-01-01T00:00:01.000+00:00")
RAN = ev.RunAccepted(at_ns=3 * SECOND, rpc_ms=1.0)
DIGEST = PartDigest(namespace=Namespace.TARGET, role=Role.KEY, layer=0, destination_rank=0, digest="0" * 16)


def asked_again(handoff: Handoff) -> tuple[Handoff, Effects]:
    """The plan is found, decode gives its grant back, prefill is asked to run."""
    handoff, effects = step(handoff, PLAN)
    assert len(of(effects, fx.AskReserve)) == 1
    return reserved(handoff, grant=WITH_SECRET)


@pytest.mark.parametrize(
    ("state", "changes"),
    [
        (HandoffState.RESERVING, {"route": MIXED}),
        (HandoffState.RESERVING, {}),
        (HandoffState.PREFILLING, {}),
        (HandoffState.COMMITTED, {}),
        (HandoffState.COMMITTED, {"verify": True}),
    ],
)
def test_nobody_is_asked_for_anything_before_the_bucket_holds_the_new_term(
    state: HandoffState, changes: dict[str, Any]
) -> None:
    """The broker before may still lead: what its workers would refuse now is no verdict. A silent bucket does not stop it for ever."""
    handoff, effects = adopting(state, **changes)
    assert [type(effect) for effect in effects] == [fx.Publish, fx.StoreRecord]
    _, effects = stored(handoff)
    assert len(effects) == 1
    assert isinstance(effects[0], (fx.AskPlan, fx.AskRun, fx.AskCommit, fx.AskParts))
    silent = ErrorInfo(code=ErrorCode.BUS_UNAVAILABLE, message="no answer")
    unwritten = ev.RecordUnwritten(at_ns=4 * SECOND, write=handoff.num_writes, error=silent)
    assert step(handoff, unwritten)[1] == effects


def test_what_ends_before_the_bucket_holds_the_new_term_is_asked_for_nothing() -> None:
    """It is only told to let go, once the record says so."""
    handoff, _ = adopting(HandoffState.PREFILLING)
    handoff, _ = step(handoff, ev.CancelRequested(at_ns=2 * SECOND, reason="the client left"))
    handoff, effects = stored(handoff)
    assert [type(effect) for effect in effects] == [fx.StoreRecord]
    _, effects = stored(handoff)
    assert len(of(effects, fx.AskRelease)) == 2
    assert not of(effects, fx.AskPlan)


@pytest.mark.parametrize("state", [HandoffState.RESERVING, HandoffState.PREFILLING])
def test_what_was_not_committed_goes_on(state: HandoffState) -> None:
    """Plan, grant and run are asked for again, with the new fence and the secret; reports come from prefill's own record."""
    handoff, effects = adopted(state)
    assert names_of(effects) == [EventName.HANDOFF_ADOPTED]
    assert len(of(effects, fx.AskPlan)) == 1
    handoff, effects = asked_again(handoff)
    (run,) = of(effects, fx.AskRun)
    assert isinstance(run.message, RunPrefill)
    assert (run.message.grant, run.message.fence) == (WITH_SECRET, 4)
    handoff, effects = step(handoff, RAN)
    assert [ask.role for ask in of(effects, fx.AskParts)] == [WorkerRole.PREFILL]
    assert len(of(effects, fx.CheckParts)) == 1
    handoff, _ = step(handoff, report(KEY, STATE))
    handoff, _ = finished(handoff)
    while handoff.stored is None or handoff.stored.state is not HandoffState.COMMITTED:
        handoff, effects = stored(handoff)
    assert len(of(effects, fx.AskCommit)) == 1


def test_parts_are_asked_for_until_prefill_has_told_its_end() -> None:
    """Its end may have been told to the broker that is gone: it is not waited for in silence."""
    handoff, _ = asked_again(adopted(HandoffState.PREFILLING)[0])
    handoff, _ = step(handoff, RAN)
    for _ in range(3):
        handoff, effects = step(handoff, ev.PartsOverdue(at_ns=4 * SECOND))
        assert [ask.role for ask in of(effects, fx.AskParts)] == [WorkerRole.PREFILL]
        assert len(of(effects, fx.CheckParts)) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"grant": msgspec.structs.replace(WITH_SECRET, generation=4)},
        {"grant": msgspec.structs.replace(WITH_SECRET, block_ids=(0, 1, 3))},
        {"cached": 0},
        {"pulled": (Role.SSM,)},
        {"verify": True},
    ],
)
def test_a_grant_that_decode_no_longer_holds_fails_the_handoff(answer: dict[str, object]) -> None:
    """Prefill may be writing into what was granted before: nothing goes on, and the router may try again."""
    handoff, _ = step(adopted(HandoffState.PREFILLING)[0], PLAN)
    handoff, effects = reserved(handoff, **({"grant": WITH_SECRET} | answer))  # type: ignore[arg-type]  # by name
    assert not of(effects, fx.AskRun)
    assert code_of(handoff) is ErrorCode.TRANSFER_FAILED


def test_a_plan_that_cannot_be_had_fails_the_handoff() -> None:
    """One of the two is gone: as if the broker had seen it go."""
    error = ErrorInfo(code=ErrorCode.WORKER_LOST, message="gone")
    handoff, _ = step(adopted(HandoffState.PREFILLING)[0], ev.AskRefused(at_ns=SECOND, ask=ev.Ask.PLAN, error=error))
    assert code_of(handoff) is ErrorCode.WORKER_LOST


def test_a_plan_that_comes_twice_asks_once() -> None:
    """Delivery is not a second question."""
    handoff, _ = step(adopted(HandoffState.PREFILLING)[0], PLAN)
    assert step(handoff, PLAN) == (handoff, ())


def test_reports_that_come_before_the_plan_are_asked_for_later() -> None:
    """Without a plan they cannot be judged: they are neither believed nor refused, and prefill's end is kept."""
    handoff, _ = adopted(HandoffState.PREFILLING)
    assert step(handoff, report(KEY, STATE)) == (handoff, ())
    handoff, _ = finished(handoff)
    handoff, _ = asked_again(handoff)
    handoff, _ = step(handoff, RAN)
    handoff, _ = step(handoff, report(KEY, STATE))
    assert handoff.commit_ready


def test_an_adopted_lock_keeps_its_number() -> None:
    """Decode is asked to pull under it once more, which is delivery, and what it told the other broker is asked for."""
    handoff, _ = adopted(HandoffState.PREFILLING, pulled=(Role.SSM,), lock=LOCK)
    handoff, _ = step(handoff, PLAN)
    handoff, _ = reserved(handoff, grant=WITH_SECRET, pulled=(Role.SSM,))
    handoff, _ = step(handoff, RAN)
    handoff, _ = step(handoff, report(KEY))
    handoff, effects = finished(handoff, source=SOURCE)
    (pull,) = of(effects, fx.AskPull)
    assert (pull.message.lock, pull.message.fence, pull.message.source) == (1, 4, SOURCE)
    assert EventName.REQUEST_LOCKED not in names_of(effects)
    handoff, effects = step(handoff, ev.PullAccepted(at_ns=5 * SECOND, rpc_ms=1.0))
    assert [ask.role for ask in of(effects, fx.AskParts)] == [WorkerRole.DECODE]
    handoff, _ = step(handoff, report(STATE, transfer=Transfer.PULL))
    ended = PullEnded(handoff_id="r1-0", incarnation="id", lock=1)
    handoff, _ = step(handoff, ev.PullOver(at_ns=5 * SECOND, message=ended))
    assert handoff.commit_ready


def test_a_pull_that_ends_before_prefill_is_heard_again_is_not_asked_for_twice() -> None:
    """Decode delivers its end to the new broker while that still learns what prefill has to say."""
    handoff, _ = adopted(HandoffState.PREFILLING, pulled=(Role.SSM,), lock=LOCK)
    ended = PullEnded(handoff_id="r1-0", incarnation="id", lock=1)
    handoff, effects = step(handoff, ev.PullOver(at_ns=2 * SECOND, message=ended))
    assert EventName.REQUEST_UNLOCKED in names_of(effects)
    _, effects = finished(handoff, source=SOURCE)
    assert not of(effects, fx.AskPull)


def test_a_committed_record_is_committed_again() -> None:
    """With the new fence and what the record knows; the record gets the new fence, too."""
    _, effects = adopted(HandoffState.COMMITTED)
    (commit,) = [effect.message for effect in of(effects, fx.AskCommit)]
    assert commit == CommitHandoff(
        handoff_id="r1-0", incarnation="id", fence=4, first_token=9, num_cached_tokens=24, timeout_ms=7_000
    )
    (store,) = of(effects, fx.StoreRecord)
    assert (store.last, store.record.fence) == (8, 4)


def test_a_committed_record_that_is_to_be_verified_waits_for_the_digests() -> None:
    """They are in no record: prefill is asked for its end, and the commit carries them."""
    handoff, effects = adopted(HandoffState.COMMITTED, verify=True)
    assert not of(effects, fx.AskCommit)
    assert [ask.role for ask in of(effects, fx.AskParts)] == [WorkerRole.PREFILL]
    handoff, effects = finished(handoff, digests=(DIGEST,))
    (commit,) = of(effects, fx.AskCommit)
    assert commit.message.digests == (DIGEST,)
    again = PrefillFinished(handoff_id="r1-0", incarnation="ip", first_token=5, digests=(DIGEST,))
    assert step(handoff, ev.PrefillEnded(at_ns=5 * SECOND, message=again)) == (handoff, ())


def test_digests_that_nobody_knows_any_more_do_not_hold_up_the_commit() -> None:
    """Prefill has forgotten, so decode has taken over and answers from its record; if it has not, it refuses."""
    handoff, _ = adopted(HandoffState.COMMITTED, verify=True)
    silent = ErrorInfo(code=ErrorCode.DEADLINE_EXCEEDED, message="no answer")
    event = ev.PartsUnanswered(at_ns=SECOND, role=WorkerRole.PREFILL, error=silent)
    handoff, effects = step(handoff, event)
    assert (len(of(effects, fx.CheckParts)), len(of(effects, fx.AskCommit))) == (1, 0)
    handoff, effects = step(handoff, ev.PartsOverdue(at_ns=2 * SECOND))
    assert [ask.role for ask in of(effects, fx.AskParts)] == [WorkerRole.PREFILL]
    unknown = ErrorInfo(code=ErrorCode.UNKNOWN_HANDOFF, message="what?")
    event = ev.PartsUnanswered(at_ns=2 * SECOND, role=WorkerRole.PREFILL, error=unknown)
    handoff, effects = step(handoff, event)
    (commit,) = of(effects, fx.AskCommit)
    assert commit.message.digests == ()
    assert step(handoff, event) == (handoff, ())


def test_digests_of_a_prefill_that_is_gone_are_not_waited_for() -> None:
    """Nobody else has them, and decode may have been asked to commit before."""
    handoff, _ = adopted(HandoffState.COMMITTED, verify=True)
    handoff, effects = step(handoff, ev.WorkerGone(at_ns=2 * SECOND, worker=PREFILL))
    (commit,) = of(effects, fx.AskCommit)
    assert commit.message.digests == ()
    assert handoff.verdict is None


def test_decode_is_asked_to_commit_once_the_bucket_holds_the_term() -> None:
    """Prefill was gone before the record was found: until the claim is stored whoever led may still have decode commit."""
    handoff, _ = adopting(HandoffState.COMMITTED, verify=True)
    handoff, effects = step(handoff, ev.WorkerGone(at_ns=2 * SECOND, worker=PREFILL))
    assert effects == ()
    handoff, effects = stored(handoff)
    assert len(of(effects, fx.AskCommit)) == 1
    assert not of(effects, fx.AskParts)


def test_a_prefill_that_nobody_answers_for_is_asked_for_its_digests_again() -> None:
    """It may be about to listen again behind an outage; if it is gone the broker hears of that."""
    handoff, _ = adopted(HandoffState.COMMITTED, verify=True)
    error = ErrorInfo(code=ErrorCode.WORKER_LOST, message="nobody answers")
    _, effects = step(handoff, ev.PartsUnanswered(at_ns=SECOND, role=WorkerRole.PREFILL, error=error))
    assert (len(of(effects, fx.CheckParts)), len(of(effects, fx.AskCommit))) == (1, 0)


def test_a_takeover_that_comes_while_digests_are_awaited_needs_no_commit() -> None:
    """Decode had the commit from the other broker: its word is enough."""
    handoff, _ = adopted(HandoffState.COMMITTED, verify=True)
    over = TakenOver(handoff_id="r1-0", incarnation="id", prepare_ms=0, enqueue_ms=0, total_ms=0, first_step_ns=0)
    handoff, effects = step(handoff, ev.DecodeTookOver(at_ns=2 * SECOND, message=over))
    assert [release.role for release in of(effects, fx.AskRelease)] == [WorkerRole.PREFILL]
    _, effects = finished(handoff, digests=(DIGEST,))
    assert not of(effects, fx.AskCommit)


@pytest.mark.parametrize("ask", [ev.Ask.COMMIT, ev.Ask.RUN])
def test_a_worker_that_is_through_with_it_is_listened_to(ask: ev.Ask) -> None:
    """It took over and ended for the broker before, and refuses to begin again: its word of the end is on its way."""
    route = MixedRoute(mixed=WorkerRef(worker_id="m0", incarnation="im"))
    handoff, _ = (
        adopted(HandoffState.COMMITTED) if ask is ev.Ask.COMMIT else adopted(HandoffState.RESERVING, route=route)
    )
    error = ErrorInfo(code=ErrorCode.CANCELLED, message="r1-0 has been released already")
    assert step(handoff, ev.AskRefused(at_ns=2 * SECOND, ask=ask, error=error)) == (handoff, ())
    incarnation = "id" if ask is ev.Ask.COMMIT else "im"
    ended = RequestEnded(handoff_id="r1-0", incarnation=incarnation, num_tokens=8, finish_reason=FinishReason.LENGTH)
    handoff, _ = step(handoff, ev.WorkerEnded(at_ns=2 * SECOND, message=ended))
    assert handoff.verdict is not None
    assert (handoff.verdict.state, handoff.verdict.num_tokens) == (HandoffState.FINISHED, 8)


def test_a_decoding_record_is_waited_for() -> None:
    """Decode needs no broker to go on, and prefill is not needed any more: its memory comes back now, not at the end."""
    handoff, effects = adopted(HandoffState.DECODING)
    assert [type(effect) for effect in effects] == [fx.Publish, fx.StoreRecord, fx.AskRelease]
    (release,) = of(effects, fx.AskRelease)
    assert (release.role, release.message.reason) == (WorkerRole.PREFILL, "decode has taken over")
    _, effects = step(handoff, ev.DeadlinePassed(at_ns=12 * SECOND))
    assert [release.role for release in of(effects, fx.AskRelease)] == [WorkerRole.DECODE]


def test_a_mixed_record_is_asked_to_run_again() -> None:
    """The worker answers from its table; nothing else was under way."""
    mixed = MixedRoute(mixed=WorkerRef(worker_id="m0", incarnation="im"))
    handoff, effects = adopted(HandoffState.RESERVING, route=mixed)
    assert [run.role for run in of(effects, fx.AskRun)] == [WorkerRole.MIXED]
    handoff, _ = step(handoff, RAN)
    assert handoff.state is HandoffState.DECODING


@pytest.mark.parametrize("state", [HandoffState.FAILED, HandoffState.CANCELLED, HandoffState.FINISHED])
def test_an_ended_record_is_told_again_to_all_whom_it_concerns(state: HandoffState) -> None:
    """The broker that wrote it may have told nobody: memory comes back, the router hears of a failure; people are not told twice."""
    error = ErrorInfo(code=ErrorCode.WORKER_LOST, message="gone") if state is HandoffState.FAILED else None
    ended = record(state, error=error)
    event = ev.Adopted(at_ns=SECOND, record=ended, revision=8, deadline_ns=11 * SECOND, begun_ns=0)
    handoff, effects = adopt(event, POLICY)
    releases = of(effects, fx.AskRelease)
    assert {release.role for release in releases} == {WorkerRole.PREFILL, WorkerRole.DECODE}
    answers = [effect.frame.error for effect in of(effects, fx.AnswerRouter)]
    assert len(answers) == (0 if state is HandoffState.FINISHED else 1)
    assert error is None or answers == [error]
    assert len(effects) == len(releases) + len(answers)
    for release in releases:
        handoff, effects = step(handoff, ev.ReleaseSettled(at_ns=SECOND, role=release.role, acknowledged=True))
    assert fx.Forget() in effects


def test_a_grant_type_is_what_decode_gave() -> None:
    """The secret is no part of what is compared: the bucket never had it."""
    assert isinstance(WITH_SECRET, Grant)
    handoff, _ = step(adopted(HandoffState.PREFILLING)[0], PLAN)
    handoff, effects = reserved(handoff, grant=WITH_SECRET)
    assert len(of(effects, fx.AskRun)) == 1
    assert not any(SECRET.encode() in msgspec.msgpack.encode(effect) for effect in of(effects, fx.StoreRecord))


@pytest.mark.parametrize("state", [HandoffState.COMMITTED, HandoffState.DECODING])
def test_a_commit_that_came_after_the_record_was_read_is_obeyed(state: HandoffState) -> None:
    """The broker before was slow, not gone: decode has the request, and is asked once the bucket holds the new term."""
    handoff, _ = adopting(HandoffState.PREFILLING)
    assert handoff.is_claiming
    found = record(state)
    conflict = ev.RecordConflict(at_ns=4 * SECOND, write=handoff.num_writes, found=found, revision=9)
    handoff, effects = step(handoff, conflict)
    (store,) = of(effects, fx.StoreRecord)
    assert (store.last, store.record.state, store.record.fence) == (9, state, 4)
    assert not of(effects, fx.AskCommit)
    handoff, effects = stored(handoff)
    assert len(of(effects, fx.AskCommit)) == (1 if state is HandoffState.COMMITTED else 0)
    over = TakenOver(handoff_id="r1-0", incarnation="id", prepare_ms=0, enqueue_ms=0, total_ms=0, first_step_ns=0)
    handoff, _ = step(handoff, ev.DecodeTookOver(at_ns=5 * SECOND, message=over))
    assert (handoff.verdict, handoff.state) == (None, HandoffState.DECODING)
