"""Requests on one replica with a tiny pool: the engine loop as it is, one turn at a time, over an engine that checks its memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, cast

import msgspec

from common.engine.fake.tokens import fake_accepted, fake_token
from common.engine.port import Engine, StepResult
from common.worker.core.blocks import BlockPool, Reservation
from common.worker.core.growth import Growth
from common.worker.core.scheduler import Scheduler, StepLimits
from common.worker.core.sequence import Sequence, SequenceState
from common.worker.engine_loop import EngineLoop, StepOutcome
from contracts.errors import ErrorInfo
from contracts.rank import BindSequence, ExtendSequences, SampledToken, StepPlan
from contracts.requests import SamplingParams
from contracts.workers import WorkerRole

COMMIT_LAG = 2
"""Turns from a reservation until its prompt has been computed elsewhere."""
RELEASE_LAG = 1
"""Turns from the end of a request until its memory is released."""
DEFERRED_LOOKS = 2
"""How often a deferred release is asked about before its writer has stopped."""
LOOK_EVERY = 3
_KINDS = ((1, 1), (2, 2), (1, 3), (1, 6))
_NO_EOS: frozenset[int] = frozenset()


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A pool, and requests as (tokens of the prompt, tokens to generate, turns after the one before)."""

    role: WorkerRole
    num_blocks: int
    num_slots: int
    block_size: int
    dcp: int = 1
    depth: int = 0
    reserve_output_tokens: int
    deferred_release: int
    requests: tuple[tuple[int, int, int], ...]


def all_cases(role: WorkerRole) -> Iterator[Case]:
    """Every pool of up to 4 blocks and 3 slots with every mix of up to 3 requests that it cannot hold at once, in every order."""
    for num_blocks, num_slots, block_size in product(range(1, 5), range(1, 4), (1, 2)):
        fitting = [kind for kind in _KINDS if sum(kind) <= num_blocks * block_size]
        for count in (1, 2, 3):
            for kinds in product(fitting, repeat=count):
                if count <= num_slots and sum(-(-sum(kind) // block_size) for kind in kinds) <= num_blocks:
                    continue  # there is room for all of them: nobody waits for anything
                for gaps in product((0, 2), repeat=count - 1):
                    # Everything at once, with nothing to release late; a little at first; a little, and the first return is late.
                    for reserve, deferred in ((0, 0), (1, 0), (1, 1)):
                        yield Case(
                            role=role,
                            num_blocks=num_blocks,
                            num_slots=num_slots,
                            block_size=block_size,
                            reserve_output_tokens=reserve,
                            deferred_release=deferred,
                            requests=tuple((*kind, gap) for kind, gap in zip(kinds, (0, *gaps), strict=True)),
                        )


def larger_cases(role: WorkerRole) -> Iterator[Case]:
    """Some pools in which three requests are preempted more than once, and come back beside others."""
    for num_blocks, deferred in product((5, 6, 7), (0, 1)):
        for kinds in product(((1, 7), (2, 9), (3, 4)), repeat=3):
            for gaps in product((0, 4), repeat=2):
                yield Case(
                    role=role,
                    num_blocks=num_blocks,
                    num_slots=3,
                    block_size=2,
                    reserve_output_tokens=1,
                    deferred_release=deferred,
                    requests=tuple((*kind, gap) for kind, gap in zip(kinds, (0, *gaps), strict=True)),
                )


def now(work: Coroutine[Any, Any, Any]) -> Any:
    """Run what has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise AssertionError("it waits for something")


class CheckedEngine:
    """Draws made-up tokens, and raises when a sequence computes or is given what is not its own."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._bound: dict[int, tuple[int, ...]] = {}
        self._seeds: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._cells = [0] * case.num_blocks
        self._releases = 0
        self._looks: dict[int, int] = {}
        self.num_drafts = 0

    async def bind(self, binding: BindSequence) -> None:
        """Take memory that nobody has."""
        assert binding.seq not in self._bound
        assert binding.slot not in self._slots.values()
        self._give(binding.seq, binding.block_ids, binding.generation)
        self._slots[binding.seq] = binding.slot
        self._seeds[binding.seq] = binding.sampling.seed

    async def extend(self, command: ExtendSequences) -> None:
        """Take more of it."""
        for extension in command.extensions:
            assert extension.seq in self._bound
            self._give(extension.seq, extension.block_ids, command.generation)

    async def release(self, seqs: tuple[int, ...], generation: int, timeout_ms: int) -> frozenset[int]:
        """Take memory back; of the release that is deferred nobody can tell, until it was asked about often enough."""
        (seq,) = seqs
        if timeout_ms:
            self._releases += 1
            if self._releases == self._case.deferred_release:
                self._looks[seq] = DEFERRED_LOOKS
        for block in self._bound.get(seq, ()):
            self._cells[block] = generation
        if self._looks.get(seq):
            self._looks[seq] -= 1
            return frozenset(seqs)
        self._bound.pop(seq, None)
        self._slots.pop(seq, None)
        return frozenset()

    async def step(self, plan: StepPlan) -> StepResult:
        """Draw for each item that wants it, one token behind each guess that is right; every position has its place, guesses too."""
        tokens = []
        for item in plan.items:
            end = item.start + item.num_tokens
            assert end <= len(self._bound[item.seq]) * self._case.block_size * self._case.dcp
            if item.sample:
                num_drafts = 0 if item.token_ids else item.num_tokens - 1
                self.num_drafts += num_drafts
                seed, first = self._seeds[item.seq], end - num_drafts
                tokens += [
                    SampledToken(seq=item.seq, position=position, token_id=fake_token(seed, position))
                    for position in range(first, first + 1 + fake_accepted(seed, first, num_drafts))
                ]
        return StepResult(step=plan.step, tokens=tuple(tokens), started_ns=0, ended_ns=0, layer_started_ns=())

    def _give(self, seq: int, block_ids: tuple[int, ...], generation: int) -> None:
        for block in block_ids:
            assert all(block not in blocks for blocks in self._bound.values())
            assert self._cells[block] < generation
            self._cells[block] = generation
        self._bound[seq] = (*self._bound.get(seq, ()), *block_ids)


@dataclass(slots=True, kw_only=True)
class Asked:
    """One request: what is left of it, and what has reached its client."""

    seed: int
    prompt: tuple[int, ...]
    max_tokens: int
    told: list[int] = field(default_factory=list)
    ended: bool = False


class SmallPool:
    """One case, and what has come of it. It is the observer of the loop, and the rest of a worker and a mesh around it."""

    def __init__(self, case: Case, *, scheduler: type[Scheduler] = Scheduler, growth: type[Growth] = Growth) -> None:
        self.case = case
        self.num_preemptions = 0
        self._growth = growth(reserve_output_tokens=case.reserve_output_tokens, step_blocks=1)
        self._pool = BlockPool(
            num_blocks=case.num_blocks, num_slots=case.num_slots, block_size=case.block_size, dcp=case.dcp
        )
        limits = StepLimits(max_step_tokens=32, prefill_chunk_tokens=32, num_speculative_tokens=case.depth)
        self._scheduler = scheduler(self._pool, limits, self._growth)
        self.engine = CheckedEngine(case)
        engine = cast("Engine", self.engine)
        self._loop = EngineLoop(engine, self._pool, self._scheduler, self, release_timeout_ms=1)
        self._turn = self._num_coming = self._num_running = 0
        self._last_seq = 0
        self._arrivals: deque[tuple[int, Asked]] = deque()
        self._line: deque[Asked] = deque()
        self._commits: deque[tuple[int, Sequence]] = deque()
        self._releases: deque[tuple[int, Sequence]] = deque()
        self._asked: dict[int, Asked] = {}
        self._told_before: dict[int, int] = {}
        turn = 0
        for seed, (num_prompt, max_tokens, gap) in enumerate(case.requests, 1):
            turn += gap
            prompt = tuple(range(100, 100 + num_prompt))
            self._arrivals.append((turn, Asked(seed=seed, prompt=prompt, max_tokens=max_tokens)))
        self.requests = [asked for _, asked in self._arrivals]

    @property
    def most_turns(self) -> int:
        """Turns that are enough for all requests one after the other, each token in an attempt of its own, and a late release."""
        attempts = sum(asked.max_tokens for asked in self.requests)
        return (
            4 + sum(gap for *_, gap in self.case.requests) + attempts * (COMMIT_LAG + RELEASE_LAG + 2) + 6 * LOOK_EVERY
        )

    def run(self) -> None:
        """Run to the end. Raises `AssertionError` when a request does not end, or gets anything but its tokens."""
        most = self.most_turns
        while not all(asked.ended for asked in self.requests) or self._releases or self._pool.num_quarantined_slots:
            assert self._turn < most, f"no end after {most} turns"
            self._take_turn()
        for asked in self.requests:
            first = len(asked.prompt)
            assert asked.told == [fake_token(asked.seed, first + index) for index in range(asked.max_tokens)]
        self._pool.check_integrity()
        assert (self._pool.num_free_blocks, self._pool.num_free_slots) == (self.case.num_blocks, self.case.num_slots)

    def _take_turn(self) -> None:
        self._turn += 1
        while self._arrivals and self._arrivals[0][0] < self._turn:
            self._arrive(self._arrivals.popleft()[1])
        while self._releases and self._releases[0][0] <= self._turn:
            now(self._loop.release(self._releases.popleft()[1]))
        if self._turn % LOOK_EVERY == 0:
            now(self._loop.retry_quarantine())
        while self._line and (memory := self._pool.reserve(self._growth.first_need(*_size(self._line[0])))):
            sequence = self._sequence(self._line.popleft())
            sequence.memory, sequence.state = memory, SequenceState.HELD
            now(self._loop.bind(sequence))
            self._commits.append((self._turn + COMMIT_LAG, sequence))
        while self._commits and self._commits[0][0] <= self._turn:
            self._commit(self._commits.popleft()[1])
        self._num_coming, self._num_running = self._pool.num_quarantined_blocks, len(self._scheduler.running)
        now(self._loop.advance())
        self._pool.check_integrity()

    def _arrive(self, asked: Asked) -> None:
        if self.case.role is WorkerRole.DECODE:
            self._line.append(asked)
        else:
            sequence = self._sequence(asked)
            sequence.prompt_ids = asked.prompt
            self._scheduler.enqueue(sequence)

    def _sequence(self, asked: Asked) -> Sequence:
        """An attempt: the prompt ends with what the client has."""
        self._last_seq += 1
        num_prompt, max_tokens = _size(asked)
        self._asked[self._last_seq] = asked
        self._told_before[self._last_seq] = len(asked.told)
        return Sequence(
            seq=self._last_seq,
            handoff_id=f"h{self._last_seq}",
            request_id=f"r{asked.seed}",
            attempt=0,
            router_id="router-0",
            num_prompt_tokens=num_prompt,
            sampling=SamplingParams(max_tokens=max_tokens, seed=asked.seed),
        )

    def _commit(self, sequence: Sequence) -> None:
        first = fake_token(self._asked[sequence.seq].seed, sequence.num_prompt_tokens)
        sequence.num_computed, sequence.pending_token = sequence.num_prompt_tokens, first
        sequence.output_ids.append(first)
        self._scheduler.start(sequence)
        self._tell(sequence, 0, (first,))

    def _tell(self, sequence: Sequence, num_output_tokens: int, token_ids: tuple[int, ...]) -> None:
        asked = self._asked[sequence.seq]
        for count, token in enumerate(token_ids, num_output_tokens + 1):
            asked.told.append(token)
            if sequence.finish_reason(token, count, _NO_EOS) is not None:
                asked.ended = True
                self._leave(sequence)
                return

    def _leave(self, sequence: Sequence) -> None:
        self._scheduler.leave(sequence)
        self._releases.append((self._turn + RELEASE_LAG, sequence))

    async def bound(self, sequence: Sequence) -> None:
        """See `StepObserver.bound`."""
        self._told_before[sequence.seq] = len(self._asked[sequence.seq].told)

    async def stepped(self, outcome: StepOutcome) -> None:
        """See `StepObserver.stepped`."""
        for produced in outcome.produced:
            self._tell(self._running(produced.seq), produced.num_output_tokens, produced.token_ids)

    async def preempted(self, sequence: Sequence) -> None:
        """See `StepObserver.preempted`. It is never the oldest of several, and it was worth letting it in."""
        self.num_preemptions += 1
        assert self._num_coming < self._num_running, "memory was on its way back"
        older = [each for each in self._scheduler.running if each.seq < sequence.seq]
        assert older or not self._scheduler.running, "the oldest gave way to a younger one"
        asked = self._asked[sequence.seq]
        num_told = len(asked.told) - self._told_before[sequence.seq]
        enough = self._pool.block_tokens if sequence.num_preemptions > 1 else 1
        assert num_told >= enough, f"it was let in for {num_told} tokens"
        if not sequence.can_recompute:
            self._leave(sequence)
            self._line.append(asked)

    async def failed(self, sequences: tuple[Sequence, ...], error: ErrorInfo) -> None:
        """See `StepObserver.failed`. Nothing fails here."""
        raise AssertionError(error.message, sequences)

    def released(self, *, quarantined: bool) -> None:
        """See `StepObserver.released`."""

    def quarantined(self, sequence: Sequence, memory: Reservation) -> None:
        """See `StepObserver.quarantined`."""

    def quarantine_ended(self, handoff_id: str, memory: Reservation) -> None:
        """See `StepObserver.quarantine_ended`."""

    def release_failed(self, sequence: Sequence, error: ErrorInfo) -> None:
        """See `StepObserver.release_failed`. Nothing fails here."""
        raise AssertionError(error.message, sequence)

    def _running(self, seq: int) -> Sequence:
        return next(sequence for sequence in self._scheduler.running if sequence.seq == seq)


def _size(asked: Asked) -> tuple[int, int]:
    """Tokens of the prompt of a request's next attempt, and tokens that it may generate."""
    return len(asked.prompt) + len(asked.told), asked.max_tokens - len(asked.told)
