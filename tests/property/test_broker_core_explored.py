"""The handoff's state machine, explored: every order in which events can come, again and again, and never."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import pytest

from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import (
    Grant,
    HandoffRecord,
    HandoffState,
    PartDone,
    PartsReport,
    PrefillFinished,
    RequestEnded,
    Reserved,
    TakenOver,
)
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.requests import DisaggregatedRoute, FinishReason, MixedRoute, SamplingParams, SubmitRequest, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core import progress
from services.broker.core.handoff import Handoff, Policy
from services.broker.core.ledger import Ledger
from services.broker.core.step import begin, step
from services.broker.core.turn import Turn

PREFILL = WorkerRef(worker_id="p0", incarnation="ip")
DECODE = WorkerRef(worker_id="d0", incarnation="id")
MIXED = WorkerRef(worker_id="m0", incarnation="im")
HANDOFF = "r1-0"
NUM_TOKENS = 4
TROUBLE = ErrorInfo(code=ErrorCode.WORKER_FAILED, message="trouble")
OUTAGE = ErrorInfo(code=ErrorCode.BUS_UNAVAILABLE, message="outage")

PLANNED = (
    PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=0, src_rank=0, dst_rank=0),
    PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=0, src_rank=1, dst_rank=0),
    PlannedPart(namespace=Namespace.TARGET, role=Role.SSM, layer=1, src_rank=1, dst_rank=0),
)


def report(source: int, revision: int, *parts: tuple[Role, int, int, int]) -> PartsReport:
    """What one source rank has done: role, layer, start, end."""
    done = tuple(
        PartDone(namespace=Namespace.TARGET, role=role, layer=layer, destination_rank=0, ranges=((start, end),))
        for role, layer, start, end in parts
    )
    return PartsReport(
        handoff_id=HANDOFF,
        incarnation=PREFILL.incarnation,
        source_rank=source,
        revision=revision,
        parts=done,
        num_bytes=8,
        push_ms=1.0,
    )


REPORTS = (
    report(0, 1, (Role.KEY, 0, 0, 2)),
    report(0, 2, (Role.KEY, 0, 0, 4)),
    report(1, 1, (Role.KEY, 0, 0, 4), (Role.SSM, 1, 0, 1)),
)
WRONG_REPORT = report(1, 1, (Role.KEY, 7, 0, 4))


def submitted(*, mixed: bool = False) -> ev.Submitted:
    """A request at time 0 with a deadline at 1 s."""
    return ev.Submitted(
        at_ns=0,
        submit=SubmitRequest(
            handoff_id=HANDOFF,
            request_id="r1",
            attempt=0,
            router_id="router-0",
            route=MixedRoute(mixed=MIXED) if mixed else DisaggregatedRoute(prefill=PREFILL, decode=DECODE),
            num_prompt_tokens=NUM_TOKENS,
            prompt_hash="h",
            sampling=SamplingParams(max_tokens=3, seed=1),
            timeout_ms=1000,
        ),
        deadline_ns=1_000_000_000,
        deadline_at="2030-01-01T00:00:01Z",
        planned=() if mixed else PLANNED,
    )


class World(msgspec.Struct, frozen=True, kw_only=True):
    """A handoff, everything that may happen to it, and what it has done so far."""

    handoff: Handoff
    pending: frozenset[ev.Event]
    key: tuple[HandoffRecord, int] | None = None
    revision: int = 0
    told: frozenset[WorkerRole] = frozenset()
    released: frozenset[WorkerRole] = frozenset()
    freed: frozenset[WorkerRole] = frozenset()
    num_commits: int = 0
    num_router_answers: int = 0
    num_submit_answers: int = 0
    num_forgets: int = 0


Offer = Callable[[fx.Effect], tuple[ev.Event, ...]]


def start(offer: Offer, always: tuple[ev.Event, ...], *, mixed: bool = False, outages: bool = False) -> list[World]:
    """The world after the submit; more than one where a write may or may not arrive."""
    handoff, effects = begin(submitted(mixed=mixed), Policy())
    return list(react(World(handoff=handoff, pending=frozenset(always)), effects, offer, outages=outages))


def react(world: World, effects: tuple[fx.Effect, ...], offer: Offer, *, outages: bool) -> Iterator[World]:
    """Perform effects: note and check what they are, and let their outcomes become possible."""
    worlds = [world]
    for effect in effects:
        worlds = [after for before in worlds for after in perform(before, effect, offer, outages=outages)]
    yield from worlds


def perform(world: World, effect: fx.Effect, offer: Offer, *, outages: bool) -> Iterator[World]:
    """One effect, with the invariants that can be seen at it."""
    pending = world.pending | frozenset(offer(effect))
    world = msgspec.structs.replace(world, pending=pending)
    match effect:
        case fx.StoreRecord():
            yield from store(world, effect, outages=outages)
        case fx.AskReserve() | fx.AskRun() | fx.AskCommit():
            role = {fx.AskReserve: WorkerRole.DECODE, fx.AskCommit: WorkerRole.DECODE}.get(type(effect))
            role = effect.role if isinstance(effect, fx.AskRun) else role
            assert role is not None
            assert role not in world.released, "asked after its release"
            assert not world.handoff.terminal, "asked after the end"
            assert world.handoff.verdict is None, "asked after the verdict"
            commits = world.num_commits + isinstance(effect, fx.AskCommit)
            assert commits <= 1, "two commits"
            if isinstance(effect, fx.AskCommit):
                ledger = world.handoff.ledger
                told = set() if ledger is None else {(each.source_rank, each.revision) for each in ledger.reports}
                assert told == {(0, 2), (1, 1)}, "committed with an open ledger"
                assert world.handoff.finished is not None, "committed before prefill finished"
                assert world.handoff.stored is not None
                assert world.handoff.stored.state is HandoffState.COMMITTED, "committed before the bucket took it"
            roles = {role, WorkerRole.PREFILL} if isinstance(effect, fx.AskReserve) else {role}  # it has the prompt
            yield msgspec.structs.replace(world, told=world.told | roles, num_commits=commits)
        case fx.AskRelease(role=role, message=message):
            assert role in world.told, "released one that was never told"
            again = message.reason == "the handoff has ended"
            assert again or role not in world.freed, "released one that has freed itself"
            assert again or role not in world.released, "released twice"
            yield msgspec.structs.replace(world, released=world.released | {role})
        case fx.AnswerRouter(frame=frame):
            assert frame.final
            assert frame.error is not None
            yield msgspec.structs.replace(world, num_router_answers=world.num_router_answers + 1)
        case fx.AnswerSubmit():
            yield msgspec.structs.replace(world, num_submit_answers=world.num_submit_answers + 1)
        case fx.Forget():
            assert world.handoff.terminal
            assert world.told <= world.handoff.settled, "forgotten while somebody may hold memory"
            yield msgspec.structs.replace(world, num_forgets=world.num_forgets + 1)
        case _:
            yield world


def store(world: World, effect: fx.StoreRecord, *, outages: bool) -> Iterator[World]:
    """The bucket: compare-and-set, and in an outage no answer, whether or not the write arrived."""
    held = None if world.key is None else world.key[1]
    if held != effect.last:
        found = None if world.key is None else world.key[0]
        lost = ev.RecordConflict(at_ns=0, write=effect.write, found=found, revision=held or 0)
        yield msgspec.structs.replace(world, pending=world.pending | {lost})
        return
    revision = world.revision + 1
    outcomes: frozenset[ev.Event] = frozenset({ev.RecordStored(at_ns=0, write=effect.write, revision=revision)})
    if outages:
        silent: ev.Event = ev.RecordUnwritten(at_ns=0, write=effect.write, error=OUTAGE)
        yield msgspec.structs.replace(world, pending=world.pending | {silent})
        itself = ev.RecordConflict(at_ns=0, write=effect.write, found=effect.record, revision=revision)
        outcomes |= {silent, itself}
    key = (effect.record, revision)
    yield msgspec.structs.replace(world, key=key, revision=revision, pending=world.pending | outcomes)


def deliver(world: World, event: ev.Event, offer: Offer, *, outages: bool) -> list[World]:
    """One event reaches the handoff; it stays possible, so it may come again."""
    handoff, effects = step(world.handoff, event)
    if handoff == world.handoff and not effects:
        return []
    freed = world.freed
    if isinstance(event, ev.WorkerEnded):
        freed |= world.told & {world.handoff.ending_role}
    before = world.handoff
    worlds = list(react(msgspec.structs.replace(world, handoff=handoff, freed=freed), effects, offer, outages=outages))
    for after in worlds:
        check(before, after)
    return worlds


def check(before: Handoff, world: World) -> None:
    """What holds after every step."""
    handoff = world.handoff
    assert world.told == handoff.told
    assert handoff.terminal or not handoff.forgotten, "made way for nobody"
    assert handoff.ledger is None or not handoff.forgotten, "what is over keeps no ledger"
    assert world.num_router_answers <= 1
    assert world.num_submit_answers <= 1
    assert world.num_forgets <= 1
    if before.terminal:
        assert handoff.state is before.state, "a terminal state changed"
    if handoff.terminal:
        assert world.told <= world.released | world.freed, "somebody still holds memory"
        assert world.num_submit_answers == 1
        failed = handoff.state is not HandoffState.FINISHED
        accepted = bool(world.told) or handoff.stored is not None
        if not failed:
            assert world.num_router_answers == 0
        elif accepted and world.told:
            assert world.num_router_answers == 1, "the router waits for ever"


def rival_cancels(world: World) -> World:
    """Another broker wins a compare-and-set on the same key."""
    assert world.key is not None
    record, revision = world.key
    error = ErrorInfo(code=ErrorCode.CANCELLED, message="the other broker was first")
    record = msgspec.structs.replace(record, state=HandoffState.CANCELLED, error=error)
    return msgspec.structs.replace(world, key=(record, revision + 1), revision=revision + 1)


def explore(
    worlds: list[World], offer: Offer, *, outages: bool = False, rival: bool = False, limit: int
) -> tuple[int, set[HandoffState]]:
    """Visit every world that can be reached; in each, let the deadline pass, too. Returns how many, and the ends seen."""
    seen = set(worlds)
    queue = deque(worlds)
    ends: set[HandoffState] = set()
    deadline = ev.DeadlinePassed(at_ns=2_000_000_000)
    while queue:
        world = queue.popleft()
        for late in deliver(world, deadline, offer, outages=outages):
            assert late.handoff.terminal, "alive after its deadline"
        if world.handoff.terminal:
            ends.add(world.handoff.state)
        if rival and world.key is not None and not world.key[0].state.terminal:
            lost = rival_cancels(world)
            if lost not in seen:
                seen.add(lost)
                queue.append(lost)
        for event in world.pending:
            for after in deliver(world, event, offer, outages=outages):
                if after not in seen:
                    seen.add(after)
                    queue.append(after)
        assert len(seen) <= limit, "the space has grown: bound the scenario"
    return len(seen), ends


def honest(effect: fx.Effect) -> tuple[ev.Event, ...]:
    """What well-behaved workers answer."""
    match effect:
        case fx.AskReserve():
            grant = Grant(worker_id="d0", incarnation="id", generation=1, block_ids=(0,), slot=0)
            answer = Reserved(handoff_id=HANDOFF, grant=grant, num_cached_tokens=0, prepare_ms=1.0)
            return (ev.DecodeReserved(at_ns=0, answer=answer, rpc_ms=1.0),)
        case fx.AskRun(role=WorkerRole.PREFILL):
            done = PrefillFinished(handoff_id=HANDOFF, incarnation="ip", first_token=5)
            reports = tuple(ev.PartsReported(at_ns=0, report=each) for each in REPORTS)
            return (ev.RunAccepted(at_ns=0, rpc_ms=1.0), *reports, ev.PrefillEnded(at_ns=0, message=done))
        case fx.AskRun():
            return (ev.RunAccepted(at_ns=0, rpc_ms=1.0), ended("im"))
        case fx.AskCommit():
            over = TakenOver(
                handoff_id=HANDOFF, incarnation="id", prepare_ms=0, enqueue_ms=0, total_ms=0, first_step_ns=0
            )
            return (
                ev.CommitAccepted(at_ns=0, rpc_ms=1.0),
                ev.DecodeTookOver(at_ns=0, message=over),
                ended("id"),
            )
        case fx.AskRelease(role=role):
            return (ev.ReleaseSettled(at_ns=0, role=role, acknowledged=True),)
        case fx.CheckParts():
            return (ev.PartsOverdue(at_ns=0),)
        case _:
            return ()


def ended(incarnation: str, error: ErrorInfo | None = None) -> ev.WorkerEnded:
    """The last word of a decode or mixed worker."""
    reason = FinishReason.LENGTH if error is None else None
    return ev.WorkerEnded(
        at_ns=0,
        message=RequestEnded(
            handoff_id=HANDOFF, incarnation=incarnation, num_tokens=3, finish_reason=reason, error=error
        ),
    )


def refusing(effect: fx.Effect) -> tuple[ev.Event, ...]:
    """Workers that may also refuse, or fail after they have accepted."""
    match effect:
        case fx.AskReserve():
            bad: tuple[ev.Event, ...] = (ev.AskRefused(at_ns=0, ask=ev.Ask.RESERVE, error=TROUBLE),)
        case fx.AskRun(role=WorkerRole.PREFILL):
            failed = PrefillFinished(handoff_id=HANDOFF, incarnation="ip", error=TROUBLE)
            bad = (
                ev.AskRefused(at_ns=0, ask=ev.Ask.RUN, error=TROUBLE),
                ev.PrefillEnded(at_ns=0, message=failed),
                ev.PartsReported(at_ns=0, report=WRONG_REPORT),
            )
        case fx.AskRun():
            bad = (ev.AskRefused(at_ns=0, ask=ev.Ask.RUN, error=TROUBLE), ended("im", TROUBLE))
        case fx.AskCommit():
            bad = (ev.AskRefused(at_ns=0, ask=ev.Ask.COMMIT, error=TROUBLE), ended("id", TROUBLE))
        case _:
            bad = ()
    return (*honest(effect), *bad)


def short(effect: fx.Effect) -> tuple[ev.Event, ...]:
    """A prefill whose first token is the last one."""
    answers = honest(effect)
    if isinstance(effect, fx.AskRun):
        done = PrefillFinished(handoff_id=HANDOFF, incarnation="ip", first_token=5, finish_reason=FinishReason.STOP)
        answers = (*answers[:-1], ev.PrefillEnded(at_ns=0, message=done))
    return answers


CANCEL = ev.CancelRequested(at_ns=0, reason="the client left")
STOPPED = ev.CancelRequested(at_ns=0, reason="a stop string was met", num_tokens=3, finish_reason=FinishReason.STOP)
GONE = (ev.WorkerGone(at_ns=0, worker=PREFILL), ev.WorkerGone(at_ns=0, worker=DECODE))
ALL_ENDS = {HandoffState.FINISHED, HandoffState.CANCELLED, HandoffState.FAILED}


def unasked(effect: fx.Effect) -> tuple[ev.Event, ...]:
    """Honest workers, and no clock that asks for parts again."""
    return () if isinstance(effect, fx.CheckParts) else honest(effect)


def test_every_order_of_an_honest_handoff_with_cancel() -> None:
    """Duplicates, reordering, loss, cancel and deadline at every point: all invariants hold."""
    count, ends = explore(start(honest, (CANCEL,)), honest, limit=10_000)
    assert ends == {HandoffState.FINISHED, HandoffState.CANCELLED}
    assert count > 1_000


def test_every_order_with_a_stop_that_the_router_saw() -> None:
    """The same when the router has all that it wants: finished after the commit, cancelled before; all memory is back."""
    _, ends = explore(start(honest, (STOPPED,)), honest, limit=10_000)
    assert ends == {HandoffState.FINISHED, HandoffState.CANCELLED}


def test_every_order_with_refusals_and_lost_workers() -> None:
    """The same with workers that refuse, fail, report nonsense, or die."""
    _, ends = explore(start(refusing, GONE), refusing, limit=10_000)
    assert ends == {HandoffState.FINISHED, HandoffState.FAILED}


def test_every_order_with_outages_of_the_bucket() -> None:
    """The same with writes whose outcome is unknown, whether or not they arrived."""
    _, ends = explore(start(unasked, (CANCEL,), outages=True), unasked, outages=True, limit=20_000)
    assert ends == ALL_ENDS


def test_every_order_with_a_rival_that_cancels() -> None:
    """Commit against cancel is a compare-and-set on one key: whoever loses obeys, and no memory stays behind."""
    _, ends = explore(start(unasked, ()), unasked, rival=True, limit=20_000)
    assert ends == {HandoffState.FINISHED, HandoffState.CANCELLED}


def test_every_order_of_a_request_that_ends_with_its_first_token() -> None:
    """No commit, both sides released, and no answer from the broker."""
    worlds = start(short, ())
    _, ends = explore(worlds, short, limit=5_000)
    assert ends == {HandoffState.FINISHED}


def test_every_order_of_a_mixed_request() -> None:
    """One worker, no transfer: the same machine holds the same invariants."""
    always = (CANCEL, ev.WorkerGone(at_ns=0, worker=MIXED))
    _, ends = explore(start(refusing, always, mixed=True), refusing, limit=5_000)
    assert ends == ALL_ENDS


def test_the_explorer_sees_a_ledger_that_counts_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: with a ledger that is always closed, the exploration goes red."""
    monkeypatch.setattr(Ledger, "closed", property(lambda _ledger: True))
    with pytest.raises(AssertionError, match="open ledger"):
        explore(start(honest, ()), honest, limit=10_000)


def test_the_explorer_sees_a_release_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: without releases, the exploration goes red."""
    monkeypatch.setattr(Turn, "release", lambda _turn, _role, _reason: None)
    with pytest.raises(AssertionError, match="holds memory"):
        explore(start(honest, (CANCEL,)), honest, limit=10_000)


def test_the_explorer_sees_a_commit_ahead_of_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a commit that does not wait for the bucket goes red."""
    original = progress.prefill_ended

    def hasty(turn: Turn, message: PrefillFinished) -> None:
        original(turn, message)
        if turn.handoff.commit_ready:
            turn.amend(first_token=message.first_token)
            turn.ask_commit()

    monkeypatch.setattr(progress, "prefill_ended", hasty)
    with pytest.raises(AssertionError, match="before the bucket took it"):
        explore(start(honest, ()), honest, limit=10_000)
