"""Pulls as the broker sees them: who may move a request's bytes, and what must be there before the commit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import HandoffState, PartDigest, PullHandoff, RunPrefill
from contracts.manifest import Namespace, Role
from contracts.pull import PullEnded, RoleMerge, ShardPull, ShardState, Transfer
from contracts.requests import FinishReason
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff
from services.broker.core.step import step
from tests.unit.broker_steps import (
    DECODE,
    KEY,
    PREFILL,
    SECOND,
    SECRET,
    SOURCE,
    STATE,
    Effects,
    code_of,
    finished,
    names_of,
    of,
    report,
    reserved,
    reserving,
    stored,
)

SHARD = ShardPull(source_rank=0, destination_rank=0, state=ShardState.DONE, num_bytes=64, duration_ms=2.0)
TROUBLE = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message="shard 0 of rank 0 could not be read")


def prefilling(**says: Any) -> Handoff:
    """Prefill pushes the key, decode will pull the state; the bucket knows."""
    handoff, effects = reserved(reserving(KEY, STATE), pulled=(Role.SSM,), **says)
    (run,) = of(effects, fx.AskRun)
    assert isinstance(run.message, RunPrefill)
    assert run.message.pulled == (Role.SSM,)
    return stored(handoff)[0]


def pulling() -> Handoff:
    """Prefill has pushed its part and finished; the bucket knows of the lock."""
    handoff, _ = step(prefilling(), report(KEY))
    handoff, _ = finished(handoff, source=SOURCE)
    return stored(handoff)[0]


def over(lock: int = 1, **says: Any) -> ev.PullOver:
    """Decode's end of the pull, at 5 s."""
    values: dict[str, Any] = {"incarnation": "id", "wait_ms": 3.0, "total_ms": 4.0}
    message = PullEnded(handoff_id="r1-0", lock=lock, **(values | says))
    return ev.PullOver(at_ns=5 * SECOND, message=message)


def pulled(**says: Any) -> ev.PartsReported:
    """The state has arrived."""
    return report(STATE, transfer=Transfer.PULL, shards=(SHARD,), **says)


def test_the_end_of_prefill_gives_the_lock_to_decode() -> None:
    """It may read what prefill lets it read; the record says who moves the bytes since when, and holds no secret."""
    handoff, _ = step(prefilling(), report(KEY))
    handoff, effects = finished(handoff, source=SOURCE)
    (pull,) = of(effects, fx.AskPull)
    assert (pull.worker, pull.message) == (
        DECODE,
        PullHandoff(handoff_id="r1-0", incarnation="id", fence=4, lock=1, source=SOURCE, timeout_ms=7_000),
    )
    (locked,) = [effect for effect in of(effects, fx.Publish) if effect.name is EventName.REQUEST_LOCKED]
    assert (locked.fields["lock"], locked.fields["lock_holder"]) == (1, "d0")
    (store,) = of(effects, fx.StoreRecord)
    lock = store.record.lock
    assert lock is not None
    assert (lock.number, lock.holder, lock.taken_at) == (1, DECODE, "2030-01-01T00:00:03.000+00:00")
    assert store.record.source == msgspec.structs.replace(SOURCE, secret="")
    assert [(each.transfer, each.num_done) for each in store.record.progress] == [
        (Transfer.PULL, 0),
        (Transfer.PUSH, 1),
    ]
    others = [effect for effect in effects if not isinstance(effect, fx.AskPull)]
    assert not any(SECRET.encode() in msgspec.msgpack.encode(effect) for effect in others)
    assert handoff.record.state is HandoffState.PREFILLING


@pytest.mark.parametrize("last", ["report", "end"])
def test_the_commit_waits_for_both_the_bytes_and_the_end_of_the_pull(last: str) -> None:
    """In either order; it costs one write, which says that the lock is free and what every shard did."""
    first, second = (over(), pulled()) if last == "report" else (pulled(), over())
    handoff, effects = step(pulling(), first)
    assert not handoff.commit_ready
    if last == "report":  # everything was reported, decode says: what is missing is asked for at once
        assert [ask.role for ask in of(effects, fx.AskParts)] == [WorkerRole.DECODE]
        handoff, _ = stored(handoff)
    handoff, effects = step(handoff, second)
    (store,) = of(effects, fx.StoreRecord)
    assert (store.record.state, store.record.lock) == (HandoffState.COMMITTED, None)
    assert store.record.shards == (SHARD,)
    assert sum(each.num_done for each in store.record.progress) == 2
    handoff, effects = stored(handoff)
    assert len(of(effects, fx.AskCommit)) == 1


def test_the_end_of_a_pull_is_told_with_what_it_took() -> None:
    """The event has the lock, its time, the wait and the total, and what was moved."""
    handoff, _ = step(pulling(), pulled())
    merges = (RoleMerge(role=Role.SSM, merge_ms=0.5),)
    _, effects = step(handoff, over(merges=merges, parallel=False))
    (unlocked,) = [effect for effect in of(effects, fx.Publish) if effect.name is EventName.REQUEST_UNLOCKED]
    expected = {"lock": 1, "lock_holder": "d0", "wait_ms": 3.0, "total_ms": 4.0, "duration_ms": 1000.0}
    expected |= {"merge_ms": 0.5, "parallel": False, "num_parts": 1, "num_bytes": 100, "started_ns": 4 * SECOND}
    assert expected.items() <= unlocked.fields.items()


def test_a_push_costs_no_more_writes_than_before() -> None:
    """Five writes for a push, six for a pull: the lock is one more, its end goes with the commit."""

    def writes(handoff: Handoff, *events: ev.Event) -> int:
        while handoff.writing is not None:
            handoff, _ = stored(handoff)
        for event in events:
            handoff, _ = step(handoff, event)
            while handoff.writing is not None:
                handoff, _ = stored(handoff)
        assert handoff.record.state is HandoffState.COMMITTED
        return handoff.num_writes

    push, _ = finished(reserved(reserving(KEY, STATE))[0])
    assert writes(push, report(KEY, STATE)) == 3
    assert writes(pulling(), pulled(), over()) == 4


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, "source: a prefill whose cache decode pulls"),
        (msgspec.structs.replace(SOURCE, incarnation="old"), "source is of p0 old"),
        (msgspec.structs.replace(SOURCE, worker_id="p9"), "source is of p9 ip"),
    ],
)
def test_a_prefill_that_lets_nobody_read_breaks_the_protocol(source: Any, text: str) -> None:
    """Without the right to read there is no pull; nobody is given the lock."""
    handoff, effects = finished(prefilling(), source=source)
    assert not of(effects, fx.AskPull)
    assert code_of(handoff) is ErrorCode.PROTOCOL
    assert handoff.verdict is not None
    assert handoff.verdict.error is not None
    assert text in handoff.verdict.error.message
    assert handoff.record.lock is None


def test_a_first_token_that_ends_the_request_pulls_nothing() -> None:
    """Nobody will decode: the bytes stay where they are."""
    handoff, effects = finished(prefilling(), finish_reason=FinishReason.STOP)
    assert not of(effects, fx.AskPull)
    assert handoff.verdict is not None
    assert handoff.verdict.state is HandoffState.FINISHED


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (report(STATE), "is pulled by decode"),
        (report(KEY, transfer=Transfer.PULL), "is pushed by source rank 0"),
    ],
)
def test_a_part_that_moves_the_other_way_breaks_the_protocol(event: ev.PartsReported, text: str) -> None:
    """A state that was pushed may be overwritten by the pull, and the other way round: nobody may guess which is there."""
    handoff, _ = step(prefilling(), event)
    assert code_of(handoff) is ErrorCode.PROTOCOL
    assert handoff.verdict is not None
    assert handoff.verdict.error is not None
    assert text in handoff.verdict.error.message


@pytest.mark.parametrize("transfer", list(Transfer))
def test_a_report_counts_only_from_the_start_that_moves_the_bytes(transfer: Transfer) -> None:
    """Prefill's start for a push, decode's for a pull: the other's word changes nothing."""
    wrong = "ip" if transfer is Transfer.PULL else "id"
    part = STATE if transfer is Transfer.PULL else KEY
    handoff = prefilling()
    assert step(handoff, report(part, transfer=transfer, incarnation=wrong)) == (handoff, ())


@pytest.mark.parametrize("event", [over(0), over(2), over(1, incarnation="old")])
def test_the_end_of_another_pull_says_nothing(event: ev.PullOver) -> None:
    """Another taking of the lock, or another start of decode: the lock stays taken."""
    handoff = pulling()
    assert step(handoff, event) == (handoff, ())


def test_an_end_that_comes_twice_is_heard_once() -> None:
    """It is delivered until it is answered."""
    handoff, _ = step(pulling(), pulled())
    handoff, _ = step(handoff, over())
    assert step(handoff, over()) == (handoff, ())


def test_a_pull_that_fails_frees_everything() -> None:
    """Lock, both workers' memory, and the router may try again; the record names the shard that failed."""
    failed = msgspec.structs.replace(SHARD, state=ShardState.FAILED, reason="gone")
    handoff, _ = step(pulling(), report(transfer=Transfer.PULL, shards=(failed,)))
    handoff, effects = step(handoff, over(error=TROUBLE))
    assert EventName.REQUEST_UNLOCKED in names_of(effects)
    (store,) = of(effects, fx.StoreRecord)
    assert (store.record.state, store.record.lock) == (HandoffState.FAILED, None)
    assert store.record.shards == (failed,)
    handoff, effects = stored(handoff)
    assert len(of(effects, fx.AskRelease)) == 2
    (answer,) = of(effects, fx.AnswerRouter)
    assert answer.frame.error == TROUBLE


@pytest.mark.parametrize(
    "end",
    [
        ev.CancelRequested(at_ns=5 * SECOND, reason="the client left"),
        ev.DeadlinePassed(at_ns=12 * SECOND),
        ev.WorkerGone(at_ns=5 * SECOND, worker=PREFILL),
        ev.WorkerGone(at_ns=5 * SECOND, worker=DECODE),
        ev.RouterGone(at_ns=5 * SECOND, router_id="router-0", incarnation="ir"),
        ev.AskRefused(at_ns=5 * SECOND, ask=ev.Ask.PULL, error=TROUBLE),
    ],
)
def test_every_end_frees_the_lock(end: ev.Event) -> None:
    """Whatever ends a handoff whose bytes are being pulled, the record that says so has no lock, and people hear it."""
    handoff, effects = step(pulling(), end)
    (store,) = of(effects, fx.StoreRecord)
    assert store.record.state.terminal
    assert store.record.lock is None
    if not handoff.terminal:
        handoff, effects = stored(handoff)
    assert names_of(effects).count(EventName.REQUEST_UNLOCKED) == 1
    assert handoff.record.lock is None
    assert len(of(effects, fx.AskRelease)) == 2


def test_prefill_is_needed_until_the_pull_has_ended() -> None:
    """With everything read it may go, though the commit is not written yet."""
    handoff, _ = step(pulling(), pulled())
    handoff, _ = step(handoff, over())
    assert step(handoff, ev.WorkerGone(at_ns=5 * SECOND, worker=PREFILL)) == (handoff, ())


def test_what_is_missing_is_asked_for_where_it_is_owed() -> None:
    """Pushed parts of prefill, pulled ones and the end of the pull of decode."""
    handoff, _ = finished(prefilling(), source=SOURCE)
    overdue = ev.PartsOverdue(at_ns=5 * SECOND)

    def asked(effects: Effects) -> set[WorkerRole]:
        return {ask.role for ask in of(effects, fx.AskParts)}

    assert asked(step(handoff, overdue)[1]) == {WorkerRole.PREFILL, WorkerRole.DECODE}
    handoff, _ = step(handoff, report(KEY))
    assert asked(step(handoff, overdue)[1]) == {WorkerRole.DECODE}
    handoff, _ = step(handoff, pulled())
    assert asked(step(handoff, overdue)[1]) == {WorkerRole.DECODE}
    handoff, _ = step(handoff, over())
    assert asked(step(handoff, overdue)[1]) == set()


def test_a_refusal_after_the_pull_was_accepted_is_late() -> None:
    """A repeated question whose answer was lost may be refused while the first one is at work."""
    handoff, _ = step(pulling(), ev.PullAccepted(at_ns=4 * SECOND, rpc_ms=1.0))
    refusal = ev.AskRefused(at_ns=5 * SECOND, ask=ev.Ask.PULL, error=TROUBLE)
    assert step(handoff, refusal) == (handoff, ())


def test_a_verified_handoff_needs_digests() -> None:
    """Decode was promised some: without them nothing is committed; with them they go to decode."""
    handoff, _ = reserved(reserving(KEY), verify=True)
    without, _ = finished(handoff)
    assert code_of(without) is ErrorCode.PROTOCOL
    digest = PartDigest(namespace=Namespace.TARGET, role=Role.KEY, layer=0, destination_rank=0, digest="0" * 16)
    handoff, _ = finished(handoff, digests=(digest,))
    handoff, _ = step(handoff, report(KEY))
    handoff, _ = stored(handoff)
    handoff, effects = stored(handoff)
    (commit,) = of(effects, fx.AskCommit)
    assert commit.message.digests == (digest,)
