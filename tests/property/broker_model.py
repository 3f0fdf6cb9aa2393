"""A handoff with everything around it that may happen: what the exploration of its state machine visits.

What a worker or the bucket may say is an event that stays possible: it may come again and again, or never. A broker that crashes
loses the answers to what it has asked, and another one goes on from the record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import (
    Grant,
    HandoffRecord,
    HandoffState,
    PartDigest,
    PartDone,
    PartsReport,
)
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.pull import Transfer
from contracts.requests import DisaggregatedRoute, MixedRoute, SamplingParams, SubmitRequest, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff, Policy
from services.broker.core.step import adopt, begin, step

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


def report(
    source: int, revision: int, *parts: tuple[Role, int, int, int], transfer: Transfer = Transfer.PUSH
) -> PartsReport:
    """What one source rank has done, or decode of it: role, layer, start, end."""
    done = tuple(
        PartDone(namespace=Namespace.TARGET, role=role, layer=layer, destination_rank=0, ranges=((start, end),))
        for role, layer, start, end in parts
    )
    return PartsReport(
        handoff_id=HANDOFF,
        incarnation=(DECODE if transfer is Transfer.PULL else PREFILL).incarnation,
        source_rank=source,
        revision=revision,
        parts=done,
        num_bytes=8,
        push_ms=1.0,
        transfer=transfer,
    )


_MOST_SILENT = 5
"""So many writes of a handoff may have no answer: what is asked for again is written again, without end in an outage without end."""

REPORTS = (
    report(0, 1, (Role.KEY, 0, 0, 2)),
    report(0, 2, (Role.KEY, 0, 0, 4)),
    report(1, 1, (Role.KEY, 0, 0, 4), (Role.SSM, 1, 0, 1)),
)
PUSHED_BESIDE_A_PULL = (REPORTS[1], report(1, 1, (Role.KEY, 0, 0, 4)))
PULLED = report(1, 1, (Role.SSM, 1, 0, 1), transfer=Transfer.PULL)
DIGEST = PartDigest(namespace=Namespace.TARGET, role=Role.KEY, layer=0, destination_rank=0, digest="0" * 16)
SOURCE = Grant(worker_id="p0", incarnation="ip", generation=2, block_ids=(1,), slot=1)
COMPLETE = {(Transfer.PUSH, 0, 2), (Transfer.PUSH, 1, 1)}
"""The reports, by transfer, source rank and revision, without which there is no commit; with a pull also its own."""
COMPLETE_PULL = COMPLETE | {(Transfer.PULL, 1, 1)}
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
    older: tuple[HandoffRecord, int] | None = None
    crashed_in: HandoffState | None = None
    revision: int = 0
    told: frozenset[WorkerRole] = frozenset()
    released: frozenset[WorkerRole] = frozenset()
    freed: frozenset[WorkerRole] = frozenset()
    num_commits: int = 0
    num_pulls: int = 0
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
        case fx.StoreRecord(record=record):
            over = record.state.terminal or record.state in {HandoffState.COMMITTED, HandoffState.DECODING}
            assert record.lock is None or not over, "a lock that nobody frees"
            yield from store(world, effect, outages=outages)
        case fx.AskReserve() | fx.AskRun() | fx.AskPull() | fx.AskCommit():
            role = effect.role if isinstance(effect, fx.AskRun) else WorkerRole.DECODE
            assert role not in world.released, "asked after its release"
            assert not world.handoff.terminal, "asked after the end"
            assert world.handoff.verdict is None, "asked after the verdict"
            commits = world.num_commits + isinstance(effect, fx.AskCommit)
            assert commits <= 1, "two commits"
            if isinstance(effect, fx.AskCommit):
                check_commit(world)
            pulls = world.num_pulls + isinstance(effect, fx.AskPull)
            assert pulls <= 1, "two pulls"
            if isinstance(effect, fx.AskPull):
                lock = world.handoff.record.lock
                assert lock is not None, "a pull without the lock"
                assert (lock.number, lock.holder) == (effect.message.lock, DECODE), "a pull under another lock"
                assert world.handoff.finished is not None, "a pull of what is not there yet"
            roles = {role, WorkerRole.PREFILL} if isinstance(effect, fx.AskReserve) else {role}  # it has the prompt
            yield msgspec.structs.replace(world, told=world.told | roles, num_commits=commits, num_pulls=pulls)
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
            if world.handoff.record.fence <= world.handoff.policy.fence:  # else it is another broker's
                assert world.handoff.terminal
                assert world.told <= world.handoff.settled, "forgotten while somebody may hold memory"
            yield msgspec.structs.replace(world, num_forgets=world.num_forgets + 1)
        case _:
            yield world


def check_commit(world: World) -> None:
    """What must be there when decode is given the request."""
    handoff = world.handoff
    assert handoff.stored is not None
    assert handoff.stored.state is HandoffState.COMMITTED, "committed before the bucket took it"
    assert handoff.record.lock is None, "committed under the lock"
    if world.crashed_in is HandoffState.COMMITTED:
        return  # the broker that wrote it had its ledger
    ledger = handoff.ledger
    told = set() if ledger is None else {(each.transfer, each.source_rank, each.revision) for each in ledger.reports}
    assert told == (COMPLETE_PULL if handoff.record.pulled else COMPLETE), "committed with an open ledger"
    assert handoff.finished is not None, "committed before prefill finished"
    assert not handoff.record.pulled or handoff.pull_ended is not None, "committed while decode was reading"


def store(world: World, effect: fx.StoreRecord, *, outages: bool) -> Iterator[World]:
    """The bucket: compare-and-set, and in an outage no answer, whether or not the write arrived."""
    held = None if world.key is None else world.key[1]
    if held != effect.last:
        found = None if world.key is None else world.key[0]
        lost = ev.RecordConflict(at_ns=0, write=effect.write, found=found, revision=held or 0)
        yield msgspec.structs.replace(world, pending=world.pending | {lost})
        return
    assert world.key is None or world.key[0].fence <= effect.record.fence, "wrote over a later term"
    before = {HandoffState.RESERVING, HandoffState.PREFILLING}
    assert world.key is None or world.key[0].state in before or effect.record.state not in before, "took hands back"
    revision = world.revision + 1
    outcomes: frozenset[ev.Event] = frozenset({ev.RecordStored(at_ns=0, write=effect.write, revision=revision)})
    if outages and effect.write <= _MOST_SILENT:
        silent: ev.Event = ev.RecordUnwritten(at_ns=0, write=effect.write, error=OUTAGE)
        yield msgspec.structs.replace(world, pending=world.pending | {silent})
        itself = ev.RecordConflict(at_ns=0, write=effect.write, found=effect.record, revision=revision)
        outcomes |= {silent, itself}
    key = (effect.record, revision)
    yield msgspec.structs.replace(world, key=key, older=world.key, revision=revision, pending=world.pending | outcomes)


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
    made_way = handoff.record.fence > handoff.policy.fence
    assert handoff.terminal or not handoff.forgotten or made_way, "made way for nobody"
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


_OUTLIVE_A_BROKER = (ev.PartsReported, ev.PrefillEnded, ev.PullOver, ev.DecodeTookOver, ev.WorkerEnded)
"""What workers say of themselves is heard by the next broker, too; answers to what the last one asked are lost."""


def crash(world: World, offer: Offer, always: tuple[ev.Event, ...]) -> Iterator[World]:
    """The broker dies, and another one goes on from the bucket: the write under way has arrived or not; a commit also right after."""
    keys = {(world.key, world.key)}
    if world.handoff.writing is not None:
        keys.add((world.older, world.older))
        if world.key is not None and world.key[0].state is HandoffState.COMMITTED:
            keys.add((world.older, world.key))
    for read, key in keys:
        if read is None or key is None:
            continue
        event = ev.Adopted(at_ns=0, record=read[0], revision=read[1], deadline_ns=1_000_000_000, begun_ns=0)
        handoff, effects = adopt(event, Policy(fence=2))
        after = World(
            handoff=handoff,
            pending=frozenset(each for each in world.pending if isinstance(each, _OUTLIVE_A_BROKER)) | set(always),
            key=key,
            crashed_in=key[0].state,
            revision=key[1],
            told=handoff.told,
            num_submit_answers=1,
        )
        yield from react(after, effects, offer, outages=False)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What an exploration has seen: how many worlds, how handoffs ended, and how, by where a broker had crashed."""

    num_worlds: int
    ends: set[HandoffState]
    ends_after_crash: set[tuple[HandoffState, HandoffState]]


def rival_leads(world: World) -> World:
    """A broker of a later term has found the record, and goes on with it."""
    assert world.key is not None
    record, revision = world.key
    record = msgspec.structs.replace(record, fence=record.fence + 1)
    return msgspec.structs.replace(world, key=(record, revision + 1), revision=revision + 1)


def explore(
    worlds: list[World],
    offer: Offer,
    *,
    outages: bool = False,
    rival: Callable[[World], World] | None = None,
    crashes: Callable[[World], bool] = lambda _world: False,
    always: tuple[ev.Event, ...] = (),
    limit: int,
) -> Found:
    """Visit every world that can be reached; in each, let the deadline pass, too."""
    seen = set(worlds)
    queue = deque(worlds)
    ends: set[HandoffState] = set()
    ends_after_crash: set[tuple[HandoffState, HandoffState]] = set()
    deadline = ev.DeadlinePassed(at_ns=2_000_000_000)
    while queue:
        world = queue.popleft()
        for late in deliver(world, deadline, offer, outages=outages):
            assert late.handoff.terminal, "alive after its deadline"
        if world.handoff.terminal:
            ends.add(world.handoff.state)
            if world.crashed_in is not None:
                ends_after_crash.add((world.crashed_in, world.handoff.state))
        if world.crashed_in is None and crashes(world):
            for adopted in crash(world, offer, always):
                if adopted not in seen:
                    seen.add(adopted)
                    queue.append(adopted)
        if rival is not None and world.key is not None and not world.key[0].state.terminal and world.key[0].fence == 1:
            lost = rival(world)
            if lost not in seen:
                seen.add(lost)
                queue.append(lost)
        for event in world.pending:
            for after in deliver(world, event, offer, outages=outages):
                if after not in seen:
                    seen.add(after)
                    queue.append(after)
        assert len(seen) <= limit, "the space has grown: bound the scenario"
    return Found(num_worlds=len(seen), ends=ends, ends_after_crash=ends_after_crash)


def anywhere(_world: World) -> bool:
    """A broker may crash at every point."""
    return True


def under_the_lock(world: World) -> bool:
    """A broker may crash after the bucket has heard that decode pulls, while no byte of it has arrived."""
    locked = world.key is not None and world.key[0].lock is not None
    ledger = world.handoff.ledger
    return locked and ledger is not None and ledger.open_by(Transfer.PULL)


def committed(world: World) -> bool:
    """A broker may crash once the bucket says that decode has the request."""
    return world.key is not None and world.key[0].state is HandoffState.COMMITTED
