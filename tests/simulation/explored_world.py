"""Two requests on a prefill and a decode worker, as pure machines and a bag of messages between them.

The broker's `step` runs once for each request; decode's memory is the real pool, what is over is in the real table. Transfers
land when the bag gives them. Everything that is on its way may come in any order; once something comes twice, and once decode
dies. No message is lost for ever: at the end, when the bag is empty, everything must be over and given back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, cast

import msgspec

from common.worker.core.admission import refuse_command
from common.worker.core.blocks import BlockPool, MemoryNeed, Reservation
from common.worker.core.sequence import Sequence
from common.worker.core.table import HandoffTable
from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import (
    CommitHandoff,
    Grant,
    PartDone,
    PartsReport,
    PrefillFinished,
    RequestEnded,
    Reserved,
    ReserveDecode,
    RunPrefill,
    TakenOver,
)
from contracts.manifest import Namespace, PlannedPart, Role
from contracts.requests import DisaggregatedRoute, FinishReason, SamplingParams, SubmitRequest, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from services.broker.core.handoff import Handoff, Policy
from services.broker.core.step import begin, step

NUM_TOKENS: Final = 4
PREFILL: Final = WorkerRef(worker_id="p0", incarnation="ip")
DECODE: Final = WorkerRef(worker_id="d0", incarnation="id")
FOREVER: Final = 1e9


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is explored. `cancels`: the client of the first request leaves at some moment. Without `checks` stale writes land."""

    num_requests: int
    num_ranks: int
    num_blocks: int
    may_crash: bool = False
    may_repeat: bool = False
    cancels: bool = False
    checks: bool = True

    @property
    def planned(self) -> tuple[PlannedPart, ...]:
        """Every source rank owes every destination rank one part."""
        return tuple(
            PlannedPart(namespace=Namespace.TARGET, role=Role.KEY, layer=0, src_rank=source, dst_rank=destination)
            for source in range(self.num_ranks)
            for destination in range(self.num_ranks)
        )


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """The broker asks a worker for something: an effect on its way."""

    number: int
    effect: fx.AskReserve | fx.AskRun | fx.AskCommit | fx.AskRelease


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Something happens to a request at the broker: an event on its way."""

    number: int
    event: ev.Event


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """What one source rank writes into one destination rank, under a grant."""

    number: int
    source: int
    destination: int
    grant: Grant


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """Decode has computed the last token of a request that it had taken over."""

    number: int


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """Decode dies, and a new start of it comes."""


Item = Command | Told | Write | Decoded | Crash


class Catalogue:
    """Handoffs and what is on its way, by number: worlds hold numbers, which are cheap to compare, and no step is taken twice."""

    def __init__(self) -> None:
        self._numbers: dict[Handoff | Item, int] = {}
        self._things: list[Handoff | Item] = []
        self._steps: dict[tuple[int, ev.Event], tuple[int, tuple[fx.Effect, ...]]] = {}

    def number(self, thing: Handoff | Item) -> int:
        """The number of a thing, the same one for equal things."""
        number = self._numbers.setdefault(thing, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number

    def item(self, number: int) -> Item:
        """What is on its way."""
        return cast("Item", self._things[number])

    def handoff(self, number: int) -> Handoff:
        """A handoff at the broker."""
        return cast("Handoff", self._things[number])

    def step(self, handoff: int, event: ev.Event) -> tuple[int, tuple[fx.Effect, ...]]:
        """What follows from an event."""
        key = (handoff, event)
        if key not in self._steps:
            after, effects = step(self.handoff(handoff), event)
            self._steps[key] = (self.number(after), effects)
        return self._steps[key]


@dataclass
class DecodeModel:
    """A start of decode: real pool and table, and which parts lie in which block, by whom."""

    incarnation: str
    pool: BlockPool
    table: HandoffTable = field(default_factory=HandoffTable)
    memory: dict[str, Reservation] = field(default_factory=dict)
    started: frozenset[str] = frozenset()
    content: frozenset[tuple[int, int, int, str]] = frozenset()
    """(block, source rank, destination rank, handoff id)."""

    def copy(self) -> DecodeModel:
        """One of its own, to be changed."""
        pool, table = copy.copy(self.pool), copy.copy(self.table)
        for name in ("_free_blocks", "_free_slots", "_held", "_quarantined"):
            setattr(pool, name, copy.copy(getattr(pool, name)))
        for name in ("_by_handoff", "_by_seq", "_tombstones"):
            setattr(table, name, copy.copy(getattr(table, name)))
        return DecodeModel(self.incarnation, pool, table, dict(self.memory), self.started, self.content)

    def key(self) -> tuple[object, ...]:
        """What makes two of them the same."""
        held = tuple(sorted((name, each.generation, each.block_ids, each.slot) for name, each in self.memory.items()))
        pool = (self.pool.num_free_blocks, self.pool.num_free_slots, self.pool.held, self.pool._generation)
        buried = tuple(name for name in ("r0-0", "r1-0") if self.table.is_buried(name))
        return (self.incarnation, held, pool, buried, self.started, self.content)


@dataclass
class World:
    """Everything at one moment. `stopped` are requests whose prefill has been released."""

    scenario: Scenario
    catalogue: Catalogue
    handoffs: tuple[int, ...]
    bag: frozenset[int]
    decode: DecodeModel
    revisions: tuple[int, ...]
    running: frozenset[int] = frozenset()
    stopped: frozenset[int] = frozenset()
    landed: frozenset[tuple[int, int, int]] = frozenset()
    committed: frozenset[int] = frozenset()
    may_repeat: bool = False

    def key(self) -> tuple[object, ...]:
        """What makes two of them the same."""
        rest = (self.running, self.stopped, self.landed, self.committed, self.may_repeat, self.revisions)
        return (self.handoffs, self.bag, self.decode.key(), rest)

    def copy(self) -> World:
        """One of its own, to be changed."""
        return World(**{**self.__dict__, "decode": self.decode.copy()})


def id_of(number: int) -> str:
    """The handoff of a request."""
    return f"r{number}-0"


def first_world(scenario: Scenario) -> World:
    """All requests have just been submitted."""
    num_blocks = scenario.num_blocks
    pool = BlockPool(num_blocks=num_blocks, num_slots=num_blocks, block_size=NUM_TOKENS * 2)
    outcomes = [begin(_submitted(number, scenario), Policy()) for number in range(scenario.num_requests)]
    catalogue = Catalogue()
    bag: set[Item] = set()
    if scenario.may_crash:
        bag.add(Crash())
    if scenario.cancels:
        bag.add(Told(number=0, event=ev.CancelRequested(at_ns=0, reason="the client left")))
    world = World(
        scenario=scenario,
        catalogue=catalogue,
        handoffs=tuple(catalogue.number(handoff) for handoff, _ in outcomes),
        bag=frozenset(catalogue.number(item) for item in bag),
        decode=DecodeModel("id", pool),
        revisions=(0,) * scenario.num_requests,
        may_repeat=scenario.may_repeat,
    )
    for number, (_, effects) in enumerate(outcomes):
        _perform(world, number, effects)
    return world


def successors(world: World) -> Iterator[World]:
    """Every world that can be next: something in the bag comes, and may come again once."""
    for number in world.bag:
        item = world.catalogue.item(number)
        after = world.copy()
        after.bag -= {number}
        yield _happen(after, item)
        if world.may_repeat and not isinstance(item, Crash | Decoded):
            again = world.copy()
            again.may_repeat = False
            yield _happen(again, item)


def check_end(world: World) -> None:
    """What holds when nothing is on its way any more."""
    for number in world.handoffs:
        handoff = world.catalogue.handoff(number)
        assert handoff.terminal, f"I5: {handoff.handoff_id} is {handoff.state} for ever"
        assert handoff.forgotten, f"I6: somebody may hold memory of {handoff.handoff_id}"
    assert not world.decode.memory, "I6: decode holds memory"
    assert world.decode.pool.num_free_blocks == world.decode.pool.num_blocks, "I6: blocks are missing"
    assert world.running <= world.stopped, "I6: prefill holds memory"


def _happen(world: World, item: Item) -> World:
    match item:
        case Told(number=number, event=event):
            _step(world, number, event)
        case Command(number=number, effect=effect):
            _obey(world, number, effect)
        case Write():
            _land(world, item)
        case Decoded(number=number):
            _end(world, number)
        case Crash():
            _crash(world)
    world.decode.pool.check_integrity()
    return world


def _step(world: World, number: int, event: ev.Event) -> None:
    handoff, effects = world.catalogue.step(world.handoffs[number], event)
    world.handoffs = _replaced(world.handoffs, number, handoff)
    _perform(world, number, effects)


def _perform(world: World, number: int, effects: tuple[fx.Effect, ...]) -> None:
    written: list[ev.Event] = []
    for effect in effects:
        match effect:
            case fx.StoreRecord():
                before = world.revisions[number]
                assert effect.last == (before or None), "a write that cannot win"
                world.revisions = _replaced(world.revisions, number, before + 1)
                # At once: how late it may be, and what else may become of it, is explored for one handoff alone.
                written.append(ev.RecordStored(at_ns=0, write=effect.write, revision=before + 1))
            case fx.AskReserve() | fx.AskRun() | fx.AskCommit() | fx.AskRelease():
                if isinstance(effect, fx.AskCommit):
                    assert number not in world.committed, "I3: two commits"
                    world.committed |= {number}
                _put(world, Command(number=number, effect=effect))
            case _:
                pass  # for people, for the router, or only to hurry
    for event in written:
        _step(world, number, event)


def _obey(world: World, number: int, effect: fx.Effect) -> None:
    match effect:
        case fx.AskReserve(message=reserve):
            _reserve(world, number, reserve)
        case fx.AskRun(message=run):
            assert isinstance(run, RunPrefill)
            _run(world, number, run)
        case fx.AskCommit(message=commit):
            _commit(world, number, commit)
        case fx.AskRelease(role=role):
            if role is WorkerRole.DECODE:
                _free(world, number)
            else:
                world.stopped |= {number}
            _tell(world, number, ev.ReleaseSettled(at_ns=0, role=role, acknowledged=True))
        case _:
            raise AssertionError(effect)


def _reserve(world: World, number: int, command: ReserveDecode) -> None:
    decode = world.decode
    error = refuse_command(command, incarnation=decode.incarnation, table=decode.table)
    if error is None and id_of(number) not in decode.memory:
        memory = decode.pool.reserve(MemoryNeed(num_tokens=2 * NUM_TOKENS, limit_tokens=2 * NUM_TOKENS))
        if memory is None:
            error = ErrorInfo(code=ErrorCode.OVERLOADED, message="no room")
        else:
            owned = {block for each in decode.memory.values() for block in each.block_ids}
            assert not owned & set(memory.block_ids), "I1: a block has two owners"
            decode.memory[id_of(number)] = memory
            decode.table.add(_sequence(decode.table, command))
    if error is not None:
        _tell(world, number, ev.AskRefused(at_ns=0, ask=ev.Ask.RESERVE, error=error))
        return
    memory = decode.memory[id_of(number)]
    grant = Grant(
        worker_id="d0",
        incarnation=decode.incarnation,
        generation=memory.generation,
        block_ids=memory.block_ids,
        slot=memory.slot,
    )
    answer = Reserved(handoff_id=id_of(number), grant=grant, num_cached_tokens=0, prepare_ms=0.0)
    _tell(world, number, ev.DecodeReserved(at_ns=0, answer=answer, rpc_ms=0.0))


def _run(world: World, number: int, command: RunPrefill) -> None:
    if number in world.stopped:
        error = ErrorInfo(code=ErrorCode.CANCELLED, message="released already")
        _tell(world, number, ev.AskRefused(at_ns=0, ask=ev.Ask.RUN, error=error))
        return
    _tell(world, number, ev.RunAccepted(at_ns=0, rpc_ms=0.0))
    if number in world.running:
        return
    world.running |= {number}
    done = PrefillFinished(handoff_id=id_of(number), incarnation=PREFILL.incarnation, first_token=5)
    _tell(world, number, ev.PrefillEnded(at_ns=0, message=done))
    for source in range(world.scenario.num_ranks):
        for destination in range(world.scenario.num_ranks):
            _put(world, Write(number=number, source=source, destination=destination, grant=command.grant))


def _land(world: World, write: Write) -> None:
    """Bytes land if the cells still hold the grant's generation; whoever owns them must be whom they were granted to."""
    decode, name = world.decode, id_of(write.number)
    held = decode.memory.get(name)
    is_good = (
        held is not None and write.grant.incarnation == decode.incarnation and held.generation == write.grant.generation
    )
    if world.scenario.checks and not is_good:
        if write.number not in world.stopped:
            error = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message="stale generation")
            failed = PrefillFinished(handoff_id=name, incarnation=PREFILL.incarnation, error=error)
            _tell(world, write.number, ev.PrefillEnded(at_ns=0, message=failed))
        return
    owners = {other for other, each in decode.memory.items() if set(each.block_ids) & set(write.grant.block_ids)}
    assert owners == {name}, f"I2: {name} wrote into memory of {sorted(owners) or 'nobody'}"
    block = write.grant.block_ids[0]
    decode.content |= {(block, write.source, write.destination, name)}
    world.landed |= {(write.number, write.source, write.destination)}
    if write.number in world.stopped:
        return
    done = sorted(to for number, source, to in world.landed if (number, source) == (write.number, write.source))
    report = PartsReport(
        handoff_id=name,
        incarnation=PREFILL.incarnation,
        source_rank=write.source,
        revision=len(done),
        parts=tuple(
            PartDone(namespace=Namespace.TARGET, role=Role.KEY, layer=0, destination_rank=to, ranges=((0, NUM_TOKENS),))
            for to in done
        ),
        num_bytes=0,
        push_ms=0.0,
    )
    _tell(world, write.number, ev.PartsReported(at_ns=0, report=report))


def _commit(world: World, number: int, command: CommitHandoff) -> None:
    decode, name = world.decode, id_of(number)
    error = refuse_command(command, incarnation=decode.incarnation, table=decode.table)
    memory = decode.memory.get(name)
    if error is None and memory is None:
        error = ErrorInfo(code=ErrorCode.UNKNOWN_HANDOFF, message="never reserved")
    if error is not None or memory is None:
        assert error is not None
        _tell(world, number, ev.AskRefused(at_ns=0, ask=ev.Ask.COMMIT, error=error))
        return
    _tell(world, number, ev.CommitAccepted(at_ns=0, rpc_ms=0.0))
    if name in decode.started:
        return
    planned = world.scenario.planned
    wanted = {(memory.block_ids[0], part.src_rank, part.dst_rank, name) for part in planned}
    assert wanted <= decode.content, "I3: decode begins with a part missing"
    decode.started |= {name}
    over = TakenOver(
        handoff_id=name, incarnation=decode.incarnation, prepare_ms=0, enqueue_ms=0, total_ms=0, first_step_ns=0
    )
    _tell(world, number, ev.DecodeTookOver(at_ns=0, message=over))
    _put(world, Decoded(number=number))


def _end(world: World, number: int) -> None:
    """Decode gives the memory back by itself, then says that it has ended; unless it was released before."""
    decode, name = world.decode, id_of(number)
    if name not in decode.memory or name not in decode.started:
        return
    _free(world, number)
    ended = RequestEnded(
        handoff_id=name, incarnation=decode.incarnation, num_tokens=3, finish_reason=FinishReason.LENGTH
    )
    _tell(world, number, ev.WorkerEnded(at_ns=0, message=ended))


def _free(world: World, number: int) -> None:
    decode, name = world.decode, id_of(number)
    memory = decode.memory.pop(name, None)
    decode.table.remove(name, until=FOREVER)
    if memory is not None:
        decode.pool.next_generation()
        decode.pool.release(memory)
        decode.content = frozenset(each for each in decode.content if each[3] != name)


def _crash(world: World) -> None:
    old = world.decode.pool
    pool = BlockPool(num_blocks=old.num_blocks, num_slots=old.num_slots, block_size=old.block_tokens)
    world.decode = DecodeModel("id2", pool)
    for number in range(world.scenario.num_requests):
        _tell(world, number, ev.WorkerGone(at_ns=0, worker=DECODE))


def _tell(world: World, number: int, event: ev.Event) -> None:
    _put(world, Told(number=number, event=event))


def _put(world: World, item: Item) -> None:
    if isinstance(item, Told) and _says_nothing(world, item):
        return  # whenever it comes, it changes nothing: one order of it is enough
    world.bag |= {world.catalogue.number(item)}


def _sequence(table: HandoffTable, command: ReserveDecode) -> Sequence:
    return Sequence(
        seq=table.next_seq(),
        handoff_id=command.handoff_id,
        request_id=command.request_id,
        attempt=command.attempt,
        router_id=command.router_id,
        num_prompt_tokens=command.num_prompt_tokens,
        sampling=command.sampling,
    )


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _submitted(number: int, scenario: Scenario) -> ev.Submitted:
    submit = SubmitRequest(
        handoff_id=id_of(number),
        request_id=f"r{number}",
        attempt=0,
        router_id="router-0",
        route=DisaggregatedRoute(prefill=PREFILL, decode=DECODE),
        num_prompt_tokens=NUM_TOKENS,
        prompt_hash="h",
        sampling=SamplingParams(max_tokens=3, seed=number),
        timeout_ms=1000,
    )
    return ev.Submitted(
        at_ns=0,
        submit=submit,
        deadline_ns=1_000_000_000,
        deadline_at="2030-01-01T00:00:00+00:00",
        planned=scenario.planned,
        block_size=2 * NUM_TOKENS,
    )


def _says_nothing(world: World, told: Told) -> bool:
    """Whether a request has ended for good, and an event asks for nothing more."""
    handoff = world.handoffs[told.number]
    after, effects = world.catalogue.step(handoff, told.event)
    return world.catalogue.handoff(handoff).forgotten and after == handoff and not effects
