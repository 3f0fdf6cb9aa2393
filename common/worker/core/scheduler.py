"""What the next step computes: continuous batching with chunked prefill under one token budget. Pure.

Where sequences get less memory than they may need, those that decode ask for more: `next_victim` says who gives memory back
until there is enough, then `grow` takes it. Age is the order of arrival, and older ones take from younger ones: so the oldest
always goes on, and whoever waits becomes the oldest in the end.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from common.worker.core.blocks import BlockPool
from common.worker.core.growth import Growth
from common.worker.core.sequence import Sequence, SequenceState
from contracts.rank import Extension, SampledToken, StepItem, StepPlan


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one step: tokens in all, tokens of one prompt, and whether prompts and decoding share a step.

    Without `chunked` a prompt is computed whole: in one step, of which only `max_step_tokens` bounds it. Up to
    `num_speculative_tokens` guesses of a decoding sequence are verified beside its token.
    """

    max_step_tokens: int
    prefill_chunk_tokens: int
    mix_batch: bool = True
    chunked: bool = True
    num_speculative_tokens: int = 0


class Produced(msgspec.Struct, frozen=True, kw_only=True):
    """What a step gave a sequence: tokens, in order. `num_output_tokens` it had before."""

    seq: int
    token_ids: tuple[int, ...]
    num_output_tokens: int


class Scheduler:
    """The sequences that wait for memory, and those that take part in steps.

    Sequences get memory in the order of arrival. A step holds one token of every decoding sequence, then as much of the
    running prompts, oldest first, as the budget leaves; guesses have up to half of that. Without `mix_batch` prompts and decoding
    take turns, and so they do while a prompt that must be whole does not fit beside them.
    """

    def __init__(self, pool: BlockPool, limits: StepLimits, growth: Growth | None = None) -> None:
        self._pool = pool
        self._limits = limits
        self._growth = growth or Growth()
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._leaving: dict[int, Sequence] = {}
        self._under_way: dict[int, int] = {}
        self._step = 0
        self._decode_turn = True

    @property
    def num_waiting(self) -> int:
        """Sequences without memory."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that take part in steps."""
        return tuple(self._running.values())

    @property
    def num_prompt_tokens_left(self) -> int:
        """Prompt tokens that are still to be computed, also those of the step under way whose sequence has left since.

        A step cannot be taken back: what it computes for nobody comes before new work as well.
        """
        left = sum(sequence.num_prompt_left for sequence in (*self._waiting, *self._running.values()))
        return left + sum(size for seq, size in self._under_way.items() if seq not in self._running)

    @property
    def prompts_under_way(self) -> frozenset[int]:
        """Sequences of the step under way that compute what is known already: their prompt, or again what they had."""
        return frozenset(self._under_way)

    def enqueue(self, sequence: Sequence) -> None:
        """Let a sequence wait for memory. `admit` gives it."""
        self._waiting.append(sequence)

    def admit(self) -> Sequence | None:
        """Give the oldest waiting sequence its memory and return it, or None if none waits or there is no room.

        How much that is says `Growth.need`. The caller binds the sequence on the ranks, then calls `start`.
        """
        if not self._waiting:
            return None
        sequence = self._waiting[0]
        sequence.memory = self._pool.reserve(self._growth.need(sequence, self._pool.block_tokens))
        if sequence.memory is None:
            return None
        return self._waiting.popleft()

    def start(self, sequence: Sequence) -> None:
        """Let a sequence that has memory take part in steps."""
        sequence.state = SequenceState.RUNNING
        self._running[sequence.seq] = sequence

    def hold(self, sequence: Sequence) -> None:
        """Take a sequence out of every queue; its memory stays with it. Unknown sequences are no error."""
        sequence.state = SequenceState.HELD
        self._running.pop(sequence.seq, None)
        self._leaving.pop(sequence.seq, None)
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Hold a sequence that has ended: who is short of memory may have its memory even before it is released."""
        self.hold(sequence)
        if sequence.memory is not None:
            self._leaving[sequence.seq] = sequence

    def next_victim(self, num_coming_blocks: int) -> Sequence | None:
        """Who is to give its memory back, so that each decoding sequence has room for its next token; None if nobody is.

        One that has ended, else the youngest that runs, whoever it is that needs memory; the caller passes it to `preempt`. Nobody
        is preempted while `num_coming_blocks`, memory on its way back, are enough: those that are short sit steps out until then.
        """
        # One more block is enough for each.
        num_missing = len(self._oldest(self._is_short)) - self._pool.num_free_blocks
        if num_missing <= 0:
            return None
        if self._leaving:
            return next(iter(self._leaving.values()))
        if num_missing <= num_coming_blocks:
            return None
        # What is pushed into granted memory as it is computed cannot be taken back.
        candidates = [sequence for sequence in self._running.values() if sequence.push is None]
        return max(candidates, key=lambda sequence: sequence.seq)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence out of the steps for good, or until `requeue` where it can be computed again.

        Its state is then WAITING. The caller takes its memory back.
        """
        ended = sequence.seq in self._leaving
        self.hold(sequence)
        if not ended:
            sequence.rewind()
            if sequence.can_recompute:
                sequence.state = SequenceState.WAITING

    def requeue(self, sequence: Sequence) -> None:
        """Let a preempted sequence wait for memory where it belongs by its age: before those that never had any."""
        insort(self._waiting, sequence, key=lambda waiting: waiting.seq)

    def grow(self) -> tuple[Extension, ...]:
        """Give more memory to decoding sequences that have none for their next token, oldest first, as far as it goes.

        Of what is kept for nobody then, those get some that have room for the token, and not for the guesses beside it. The caller
        extends all of them on the ranks before the next step.
        """
        found = [self._extension(sequence, self._growth.step_blocks) for sequence in self._oldest(self._is_short)]
        for sequence in self._oldest(self._is_cramped):
            num_spare = self._pool.num_free_blocks - self._pool.num_kept_blocks
            found.append(self._extension(sequence, min(self._growth.step_blocks, num_spare)))
        return tuple(extension for extension in found if extension is not None)

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed. Each plan must be answered by `apply` or `fail`."""
        decoding = [
            sequence
            for sequence in self._running.values()
            if sequence.pending_token is not None and not self._is_short(sequence)
        ]
        prompts = sorted(
            (sequence for sequence in self._running.values() if sequence.num_prompt_left > 0),
            key=lambda sequence: sequence.seq,
        )
        if decoding and prompts and not self._may_share(decoding, prompts[0]):
            decoding, prompts = (decoding, []) if self._decode_turn else ([], prompts)
            self._decode_turn = not self._decode_turn
        decoding = decoding[: self._limits.max_step_tokens]
        budget = self._limits.max_step_tokens - len(decoding)
        kept = self._num_kept_for_guesses(decoding, budget)
        budget -= kept
        computed = []
        for sequence in prompts:
            size = self._size_of(sequence, budget)
            if size < 1:
                break
            computed.append(_prefill_item(sequence, size))
            self._under_way[sequence.seq] = size
            budget -= size
        items = []
        budget += kept
        for sequence in decoding:
            num_guesses = self._num_guesses(sequence, budget)
            items.append(_decode_item(sequence, num_guesses))
            budget -= num_guesses
        items += computed
        if not items:
            return None
        self._step += 1
        return StepPlan(step=self._step, items=tuple(items))

    def fail(self, seqs: Iterable[int]) -> tuple[Sequence, ...]:
        """Take sequences whose step or extension failed out of the running ones, and return those that still ran."""
        self._under_way.clear()
        failed = [sequence for seq in seqs if (sequence := self._running.get(seq)) is not None]
        for sequence in failed:
            self.hold(sequence)
        return tuple(failed)

    def apply(self, plan: StepPlan, tokens: Iterable[SampledToken]) -> tuple[Produced, ...]:
        """Record that a plan was computed; returns the tokens of sequences that still run, in the plan's order.

        Who got none where one was due has been taken out with `fail` before.
        """
        self._under_way.clear()
        sampled: dict[int, list[int]] = {}
        for token in tokens:
            sampled.setdefault(token.seq, []).append(token.token_id)
        produced: list[Produced] = []
        for item in plan.items:
            sequence = self._running.get(item.seq)
            if sequence is None:
                continue
            sequence.num_computed = item.start + item.num_tokens
            sequence.pending_token = None
            if item.sample:
                found = sampled[item.seq]
                if not item.token_ids or item.bootstrap:
                    # Of guesses the right ones count: a token came behind each of them.
                    sequence.num_computed = item.start + len(found)
                sequence.bootstrap = False
                sequence.pending_token = found[-1]
                sequence.pending_is_sampled = True
                produced.append(
                    Produced(seq=item.seq, token_ids=tuple(found), num_output_tokens=len(sequence.output_ids))
                )
                sequence.output_ids.extend(found)
        return tuple(produced)

    def _may_share(self, decoding: list[Sequence], prompt: Sequence) -> bool:
        """Whether a step of those that decode goes on with this prompt, the oldest."""
        budget = self._limits.max_step_tokens - len(decoding)
        return self._limits.mix_batch and (self._limits.chunked or self._size_of(prompt, budget) > 0)

    def _size_of(self, prompt: Sequence, budget: int) -> int:
        """How many tokens of a prompt a step computes that has room for `budget`; 0 for one that has to wait."""
        left = prompt.num_prompt_left
        if self._limits.chunked:
            return min(left, self._limits.prefill_chunk_tokens, budget)
        return left if left <= budget else 0

    def _num_wanted(self, sequence: Sequence) -> int:
        """Guesses that could help a decoding sequence beside its token: none where nobody guesses, and none beyond its last token."""
        if not sequence.is_guessed or not (sequence.pending_is_sampled or sequence.bootstrap):
            return 0
        return min(self._limits.num_speculative_tokens, sequence.sampling.max_tokens - len(sequence.output_ids) - 1)

    def _num_guesses(self, sequence: Sequence, budget: int) -> int:
        """Guesses that are verified beside the token of a decoding sequence: not more than can be kept, or could help."""
        return max(0, min(self._num_wanted(sequence), self._num_places(sequence) - 1, budget))

    def _num_kept_for_guesses(self, decoding: list[Sequence], budget: int) -> int:
        """How much of what a step has beside its decoding tokens prompts leave to guesses: what these can use, and half at most.

        Guesses cost little beside a prompt, and spare whole steps. None where a prompt needs a step in one piece.
        """
        wanted = sum(self._num_guesses(sequence, budget) for sequence in decoding)
        return min(wanted, budget // 2) if self._limits.chunked else 0

    def _num_places(self, sequence: Sequence) -> int:
        """Tokens behind those that have cache for which a sequence has room."""
        memory = sequence.memory
        return 0 if memory is None else len(memory.block_ids) * self._pool.block_tokens - sequence.num_computed

    def _is_short(self, sequence: Sequence) -> bool:
        """Whether there is no room for the token that a decoding sequence computes next."""
        return (
            sequence.pending_token is not None
            and sequence.push is None
            and sequence.memory is not None
            and self._num_places(sequence) < 1
        )

    def _is_cramped(self, sequence: Sequence) -> bool:
        """Whether there is room for that token, and none for all the guesses that could help, though there may be more."""
        memory = sequence.memory
        return (
            sequence.pending_token is not None
            and memory is not None
            and memory.may_grow
            and 1 <= self._num_places(sequence) <= self._num_wanted(sequence)
        )

    def _extension(self, sequence: Sequence, most: int) -> Extension | None:
        """Let a sequence grow by up to `most` blocks; None when it does not."""
        memory = sequence.memory
        grown = None if memory is None else self._pool.grow(memory, most)
        if memory is None or grown is None:
            return None
        sequence.memory = grown
        return Extension(seq=sequence.seq, block_ids=grown.block_ids[len(memory.block_ids) :])

    def _oldest(self, which: Callable[[Sequence], bool]) -> list[Sequence]:
        """Those of the running sequences, oldest first."""
        return sorted(filter(which, self._running.values()), key=lambda sequence: sequence.seq)


def _decode_item(sequence: Sequence, num_guesses: int) -> StepItem:
    token = sequence.pending_token
    if token is None:
        raise AssertionError("a decoding sequence has a pending token")
    given = () if sequence.pending_is_sampled else (token,)
    return StepItem(
        seq=sequence.seq,
        start=sequence.num_computed,
        num_tokens=1 + num_guesses,
        token_ids=given,
        sample=True,
        bootstrap=sequence.bootstrap,
    )


def _prefill_item(sequence: Sequence, size: int) -> StepItem:
    start = sequence.num_computed
    last = size == sequence.num_prompt_left
    return StepItem(
        seq=sequence.seq,
        start=start,
        num_tokens=size,
        token_ids=sequence.known_ids(start, size),
        sample=last,
        last_chunk=last,
    )
