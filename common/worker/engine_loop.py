"""Drives the engine: gives sequences their memory, computes step after step, and takes memory back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from common.engine.port import Engine, EngineError, StepResult
from common.runtime.trace import within
from common.worker.core.blocks import BlockPool, Reservation
from common.worker.core.scheduler import Produced, Scheduler
from common.worker.core.sequence import Sequence, SequenceState
from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import PartDigest
from contracts.rank import BindSequence, ExtendSequences, Extension, PeerSide, StepItem, StepPlan

_BAD_LOGITS: Final = ErrorInfo(
    code=ErrorCode.WORKER_FAILED, message="the logits of the sequence are not finite, so that no token can be chosen"
)
_MAX_LOOKS: Final = 4
"""How often quarantined memory is looked after before nobody counts on it any more."""


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was computed. `prompts` are the sequences that computed what was known already, also those that have left since."""

    plan: StepPlan
    result: StepResult
    produced: tuple[Produced, ...]
    prompts: frozenset[int]

    @property
    def prompt_items(self) -> tuple[StepItem, ...]:
        """The items of `prompts`."""
        return tuple(item for item in self.plan.items if item.seq in self.prompts)

    @property
    def num_drafts(self) -> dict[int, int]:
        """Guesses that were verified, by sequence."""
        return {item.seq: count for item, count in self._counted}

    @property
    def num_computed(self) -> tuple[int, ...]:
        """Tokens that were computed for each item: of guesses the plan says only how many there may be."""
        return tuple(
            item.num_tokens if item.token_ids and not item.bootstrap else 1 + count for item, count in self._counted
        )

    @property
    def _counted(self) -> zip[tuple[StepItem, int]]:
        return zip(self.plan.items, self.result.num_drafts or (0,) * len(self.plan.items), strict=True)


class StepObserver(Protocol):
    """What a role does when something has been computed. Called in the loop: it never waits for a peer."""

    async def bound(self, sequence: Sequence) -> None:
        """A waiting sequence has got its memory; its first step comes next."""
        ...

    async def stepped(self, outcome: StepOutcome) -> None:
        """A step is done."""
        ...

    async def failed(self, sequences: tuple[Sequence, ...], error: ErrorInfo) -> None:
        """Binding or computing these sequences failed, on all ranks alike. They take part in nothing any more."""
        ...

    async def preempted(self, sequence: Sequence) -> None:
        """A sequence had to give its memory to older ones. One that is WAITING will be computed again here; others are over."""
        ...

    def released(self, *, quarantined: bool) -> None:
        """Memory was taken back; or cannot be given to anybody yet, because a writer may still touch it."""
        ...

    def quarantined(self, sequence: Sequence, memory: Reservation) -> None:
        """A sequence's memory went to quarantine."""
        ...

    def quarantine_ended(self, handoff_id: str, memory: Reservation) -> None:
        """What a handoff had left in quarantine is free."""
        ...

    def release_failed(self, sequence: Sequence, error: ErrorInfo) -> None:
        """Some rank could not say whether a sequence's memory is free: it goes to quarantine, and is asked for again."""
        ...


@dataclass(slots=True, kw_only=True)
class _Quarantined:
    """Memory that some writer may still touch, after so many looks; who waits for its end, to be computed again."""

    handoff_id: str
    memory: Reservation
    preempted: Sequence | None = None
    num_looks: int = 0


class EngineLoop:
    """The only caller of the engine's commands. One lock orders steps, bindings and releases.

    The lock is of the engine, never of a request: it is held for one command, and commands are short.
    """

    def __init__(
        self, engine: Engine, pool: BlockPool, scheduler: Scheduler, observer: StepObserver, *, release_timeout_ms: int
    ) -> None:
        self.engine = engine
        self._pool = pool
        self._scheduler = scheduler
        self._observer = observer
        self._release_timeout_ms = release_timeout_ms
        self._lock = asyncio.Lock()
        self._work = asyncio.Event()
        self._quarantined: dict[int, _Quarantined] = {}

    @property
    def lock(self) -> asyncio.Lock:
        """Holds off every other command to the engine."""
        return self._lock

    def wake(self) -> None:
        """Say that there may be something to compute."""
        self._work.set()

    async def run(self) -> None:
        """Compute for ever. Ends with `EngineDeadError` when the engine is lost."""
        while True:
            self._work.clear()
            if not await self.advance():
                await self._work.wait()

    async def advance(self) -> bool:
        """Let in those who have room, and compute one step; False when there is nothing that could be computed."""
        await self._admit()
        preempted = await self._make_room()
        return await self._step() or preempted

    async def bind(self, sequence: Sequence) -> None:
        """Give a sequence that has memory its place on the ranks. Raises `EngineError`; the memory is then back."""
        async with self._lock:
            await self._bind(sequence)

    async def digest(self, sequence: Sequence, side: PeerSide, start: int) -> tuple[PartDigest, ...]:
        """Digest the cache of a prompt from token `start` on: see `Engine.digest`. Raises `EngineError`."""
        async with self._lock:
            return await self.engine.digest(sequence.seq, side, start, sequence.num_prompt_tokens)

    async def release(self, sequence: Sequence) -> None:
        """Stop a sequence, wherever it is, and take its memory back. Twice is fine.

        Memory that some writer may still touch, as far as every rank can tell, goes to quarantine; `retry_quarantine` looks after it.
        """
        self._scheduler.hold(sequence)
        async with self._lock:
            self._scheduler.hold(sequence)
            clean = await self._take_back(sequence)
            if clean is None:
                return
            self._observer.released(quarantined=not clean)
        self.wake()

    def has_quarantined(self, handoff_id: str) -> bool:
        """Whether memory of a handoff is in quarantine."""
        return any(entry.handoff_id == handoff_id for entry in self._quarantined.values())

    async def retry_quarantine(self) -> None:
        """Ask again whether the writers of quarantined memory have stopped, and return what is free.

        It only asks, and never waits: a peer that stays frozen must not hold up every step of this engine.
        """
        for seq, entry in tuple(self._quarantined.items()):
            async with self._lock:
                entry.num_looks += 1
                try:
                    clean = await self._release(seq, 0)
                except EngineError:  # told when it first failed
                    continue
                if clean:
                    del self._quarantined[seq]
                    self._pool.end_quarantine([entry.memory.generation])
                    self._observer.quarantine_ended(entry.handoff_id, entry.memory)
                    if entry.preempted is not None:
                        self._requeue(entry.preempted)
        self.wake()

    async def _admit(self) -> None:
        while True:
            async with self._lock:
                sequence = self._scheduler.admit()
                if sequence is None:
                    return
                try:
                    await self._bind(sequence)
                except EngineError as error:
                    self._scheduler.hold(sequence)
                    await self._observer.failed((sequence,), error.info)
                    continue
                if sequence.state is SequenceState.WAITING:
                    self._scheduler.start(sequence)
            with within(sequence.trace):
                await self._observer.bound(sequence)

    async def _make_room(self) -> bool:
        """Give every decoding sequence room for its next token, at the cost of others if need be; whether it cost any."""
        preempted: list[Sequence] = []
        results: list[bool] = []
        failed: tuple[Sequence, ...] = ()
        error: ErrorInfo | None = None
        async with self._lock:
            while (victim := self._scheduler.next_victim(self._num_coming_blocks)) is not None:
                if victim.state is SequenceState.RUNNING:
                    preempted.append(victim)
                self._scheduler.preempt(victim)
                clean = await self._take_back(victim)
                if clean:
                    self._requeue(victim)
                results += [] if clean is None else [clean]
            extensions = self._scheduler.grow()
            try:
                await self._extend(extensions)
            except EngineError as problem:
                failed, error = self._scheduler.fail(each.seq for each in extensions), problem.info
            # Only now may others have what came back: those who are short come first.
            for clean in results:
                self._observer.released(quarantined=not clean)
        for sequence in preempted:
            with within(sequence.trace):
                await self._observer.preempted(sequence)
        if error is not None:
            await self._observer.failed(failed, error)
        return bool(preempted)

    async def _extend(self, extensions: tuple[Extension, ...]) -> None:
        if extensions:
            await self.engine.extend(ExtendSequences(generation=self._pool.next_generation(), extensions=extensions))

    @property
    def _num_coming_blocks(self) -> int:
        """Blocks in quarantine that may be expected back soon."""
        return sum(len(entry.memory.block_ids) for entry in self._quarantined.values() if entry.num_looks < _MAX_LOOKS)

    def _requeue(self, sequence: Sequence) -> None:
        """Let a preempted sequence be computed again, unless it has been stopped since or cannot be."""
        if sequence.state is SequenceState.WAITING:
            self._scheduler.requeue(sequence)

    async def _take_back(self, sequence: Sequence) -> bool | None:
        """Take the memory of a sequence that takes part in nothing: True when it is free, False when it is in quarantine.

        None when it had none. A preempted one in quarantine waits for its end: until then the ranks know its number.
        """
        memory, sequence.memory = sequence.memory, None
        if memory is None:
            return None
        try:
            clean = await self._release(sequence.seq, self._release_timeout_ms)
        except EngineError as error:
            # The sequence has ended all the same; and its memory must not be lost, nor given to anybody.
            clean = False
            self._observer.release_failed(sequence, error.info)
        if clean:
            self._pool.release(memory)
        else:
            self._pool.quarantine(memory)
            waits = sequence.state is SequenceState.WAITING
            self._quarantined[sequence.seq] = _Quarantined(
                handoff_id=sequence.handoff_id, memory=memory, preempted=sequence if waits else None
            )
            self._observer.quarantined(sequence, memory)
        return clean

    async def _step(self) -> bool:
        async with self._lock:
            plan = self._scheduler.plan()
            if plan is None:
                return False
            prompts = self._scheduler.prompts_under_way
            try:
                result = await self.engine.step(plan)
            except EngineError as error:
                failed = self._scheduler.fail(item.seq for item in plan.items)
                await self._observer.failed(failed, error.info)
                return True
            failed = self._scheduler.fail(result.failed)
            produced = self._scheduler.apply(plan, result.tokens)
        if failed:
            await self._observer.failed(failed, _BAD_LOGITS)
        await self._observer.stepped(StepOutcome(plan=plan, result=result, produced=produced, prompts=prompts))
        return True

    async def _bind(self, sequence: Sequence) -> None:
        memory = sequence.memory
        if memory is None:
            raise AssertionError("a sequence is bound after it got memory")
        try:
            await self.engine.bind(
                BindSequence(
                    seq=sequence.seq,
                    handoff_id=sequence.handoff_id,
                    generation=memory.generation,
                    block_ids=memory.block_ids,
                    slot=memory.slot,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    sampling=sequence.sampling,
                    push=sequence.push,
                    secret=sequence.secret,
                    staging_row=memory.staging_row,
                )
            )
        except EngineError:
            sequence.memory = None
            self._pool.release(memory)
            raise

    async def _release(self, seq: int, timeout_ms: int) -> bool:
        indeterminate = await self.engine.release((seq,), self._pool.next_generation(), timeout_ms)
        return seq not in indeterminate
