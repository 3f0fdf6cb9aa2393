"""Decode as a pure machine: the real pool and table, and the answers to what comes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Final

import msgspec

from common.worker.core.admission import refuse_command
from common.worker.core.blocks import BlockPool, MemoryNeed, Reservation
from common.worker.core.sequence import Sequence
from common.worker.core.table import HandoffTable
from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import CommitHandoff, Grant, RequestEnded, Reserved, ReserveDecode, TakenOver
from contracts.requests import FinishReason, SamplingParams
from contracts.workers import WorkerRole
from services.broker.core import effects as fx
from services.broker.core import events as ev
from tests.simulation.explored_items import HANDOFF, Command, Decoded, Item, Told, Write

NUM_TOKENS: Final = 4
_FOREVER: Final = 1e9
_MAX_REQUESTS: Final = 2


def name_of(request: int) -> str:
    """What decode calls the handoff of a request."""
    return f"r{request}-0"


@dataclass
class DecodeModel:
    """One start of decode. What lies in a request's memory its life knows: a request has memory once at most."""

    incarnation: str
    pool: BlockPool
    table: HandoffTable = field(default_factory=HandoffTable)
    memory: dict[str, Reservation] = field(default_factory=dict)
    quarantined: dict[str, Reservation] = field(default_factory=dict)
    started: frozenset[str] = frozenset()

    @classmethod
    def start(cls, incarnation: str, num_blocks: int) -> DecodeModel:
        """A new one, with room for one request in each block."""
        pool = BlockPool(num_blocks=num_blocks, num_slots=num_blocks, block_size=2 * NUM_TOKENS)
        return cls(incarnation, pool)

    def copy(self) -> DecodeModel:
        """One of its own, to be changed."""
        pool, table = copy.copy(self.pool), copy.copy(self.table)
        for name in ("_free_blocks", "_free_slots", "_held", "_quarantined"):
            setattr(pool, name, copy.copy(getattr(pool, name)))
        for name in ("_by_handoff", "_by_seq", "_tombstones"):
            setattr(table, name, copy.copy(getattr(table, name)))
        return DecodeModel(self.incarnation, pool, table, dict(self.memory), dict(self.quarantined), self.started)

    def key(self) -> tuple[object, ...]:
        """What makes two of them the same."""
        held, kept = _told_apart(self.memory), _told_apart(self.quarantined)
        pool = (tuple(self.pool._free_blocks), tuple(self.pool._free_slots), self.pool.held, self.pool._generation)
        buried = tuple(name for name in map(name_of, range(_MAX_REQUESTS)) if self.table.is_buried(name))
        return (self.incarnation, held, kept, pool, buried, self.started)

    def swapped(self) -> DecodeModel:
        """The same with the two requests in each other's place."""
        there = {name_of(0): name_of(1), name_of(1): name_of(0)}
        after = self.copy()
        after.memory = {there[name]: each for name, each in self.memory.items()}
        after.quarantined = {there[name]: each for name, each in self.quarantined.items()}
        after.started = frozenset(map(there.__getitem__, self.started))
        after.table = HandoffTable()
        for name in self.memory:
            after.table.add(_sequence(after.table, there[name]))
        for name, other in there.items():
            if self.table.is_buried(name):
                after.table.remove(other, until=_FOREVER)
        return after

    # What comes. Each changes this model, and returns what goes on its way for the request.

    def obey(self, request: int, item: Item, *, is_whole: bool, is_written: bool) -> tuple[Item, ...]:
        """A command, or the end of a request's decoding.

        `is_whole`: every part of its cache has landed; `is_written`: somebody has been let into its memory, and has not landed yet.
        """
        name = name_of(request)
        match item:
            case Command(effect=fx.AskReserve(message=reserve)):
                return self._reserve(name, reserve)
            case Command(effect=fx.AskCommit(message=commit)):
                return self._commit(name, commit, is_whole=is_whole)
            case Command(effect=fx.AskRelease()):
                self._free(name, is_written=is_written)
                return (Told(event=ev.ReleaseSettled(at_ns=0, role=WorkerRole.DECODE, acknowledged=True)),)
            case Decoded():
                return self._end(name, is_written=is_written)
            case _:
                raise AssertionError(item)

    def lets_in(self, request: int, write: Write, *, checks: bool) -> bool:
        """Whether the cells still hold the grant's generation: from then on the write goes on, whatever becomes of the grant."""
        return not (checks and self.is_stale(request, write))

    def land(self, request: int, write: Write, *, is_written: bool) -> None:
        """Bytes land in memory that must be whose they are, or in quarantine. The last one of those who were let in ends that."""
        name, grant = name_of(request), write.grant
        if grant.incarnation != self.incarnation:
            return  # memory of a start that has died: nobody has it
        everyone = [*self.memory.items(), *self.quarantined.items()]
        owners = {other for other, each in everyone if set(each.block_ids) & set(grant.block_ids)}
        assert owners == {name}, f"I2: {name} wrote into memory of {sorted(owners) or 'nobody'}"
        if not is_written and name in self.quarantined:
            self.pool.end_quarantine((self.quarantined.pop(name).generation,))

    def is_stale(self, request: int, write: Write) -> bool:
        """Whether a write is under a grant that is over: nothing makes it good again."""
        held = self.memory.get(name_of(request))
        grant = write.grant
        return held is None or (grant.incarnation, grant.generation) != (self.incarnation, held.generation)

    def _reserve(self, name: str, command: ReserveDecode) -> tuple[Item, ...]:
        mine = msgspec.structs.replace(command, handoff_id=name)
        error = refuse_command(mine, incarnation=self.incarnation, table=self.table)
        if error is None and name not in self.memory:
            memory = self.pool.reserve(MemoryNeed(num_tokens=2 * NUM_TOKENS, limit_tokens=2 * NUM_TOKENS))
            if memory is None:
                error = ErrorInfo(code=ErrorCode.OVERLOADED, message="no room")
            else:
                owned = {block for each in self.memory.values() for block in each.block_ids}
                assert not owned & set(memory.block_ids), "I1: a block has two owners"
                self.memory[name] = memory
                self.table.add(_sequence(self.table, name))
        if error is not None:
            told = msgspec.structs.replace(error, message=str(error.code))  # the same of every request
            return (Told(event=ev.AskRefused(at_ns=0, ask=ev.Ask.RESERVE, error=told)),)
        memory = self.memory[name]
        grant = Grant(
            worker_id="d0",
            incarnation=self.incarnation,
            generation=memory.generation,
            block_ids=memory.block_ids,
            slot=memory.slot,
        )
        answer = Reserved(handoff_id=HANDOFF, grant=grant, num_cached_tokens=0, prepare_ms=0.0)
        return (Told(event=ev.DecodeReserved(at_ns=0, answer=answer, rpc_ms=0.0)),)

    def _commit(self, name: str, command: CommitHandoff, *, is_whole: bool) -> tuple[Item, ...]:
        mine = msgspec.structs.replace(command, handoff_id=name)
        error = refuse_command(mine, incarnation=self.incarnation, table=self.table)
        memory = self.memory.get(name)
        if error is None and memory is None:
            error = ErrorInfo(code=ErrorCode.UNKNOWN_HANDOFF, message="never reserved")
        if error is not None or memory is None:
            assert error is not None
            told = msgspec.structs.replace(error, message=str(error.code))
            return (Told(event=ev.AskRefused(at_ns=0, ask=ev.Ask.COMMIT, error=told)),)
        accepted = Told(event=ev.CommitAccepted(at_ns=0, rpc_ms=0.0))
        if name in self.started:
            return (accepted,)
        assert is_whole, "I3: decode begins with a part missing"
        self.started |= {name}
        over = TakenOver(
            handoff_id=HANDOFF, incarnation=self.incarnation, prepare_ms=0, enqueue_ms=0, total_ms=0, first_step_ns=0
        )
        return (accepted, Told(event=ev.DecodeTookOver(at_ns=0, message=over)), Decoded())

    def _end(self, name: str, *, is_written: bool) -> tuple[Item, ...]:
        """Decode gives the memory back by itself, then says that it has ended; unless it was released before."""
        if name not in self.memory or name not in self.started:
            return ()
        self._free(name, is_written=is_written)
        ended = RequestEnded(
            handoff_id=HANDOFF, incarnation=self.incarnation, num_tokens=3, finish_reason=FinishReason.LENGTH
        )
        return (Told(event=ev.WorkerEnded(at_ns=0, message=ended)),)

    def _free(self, name: str, *, is_written: bool) -> None:
        memory = self.memory.pop(name, None)
        self.table.remove(name, until=_FOREVER)
        if memory is not None:
            self.pool.next_generation()
            if is_written:
                self.pool.quarantine(memory)
                self.quarantined[name] = memory
            else:
                self.pool.release(memory)


def _told_apart(memory: dict[str, Reservation]) -> tuple[object, ...]:
    return tuple(sorted((name, each.generation, each.block_ids, each.slot) for name, each in memory.items()))


def _sequence(table: HandoffTable, name: str) -> Sequence:
    return Sequence(
        seq=table.next_seq(),
        handoff_id=name,
        request_id=name.partition("-")[0],
        attempt=0,
        router_id="router-0",
        num_prompt_tokens=NUM_TOKENS,
        sampling=SamplingParams(max_tokens=3, seed=1),
    )
