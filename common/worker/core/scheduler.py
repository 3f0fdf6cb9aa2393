"""What the next step computes: continuous batching with chunked prefill under one token budget. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from common.worker.core.blocks import BlockPool
from common.worker.core.sequence import Sequence, SequenceState
from contracts.rank import SampledToken, StepItem, StepPlan


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one step: tokens in all, tokens of one prompt, and whether prompts and decoding share a step."""

    max_step_tokens: int
    prefill_chunk_tokens: int
    mix_batch: bool = True


class Produced(msgspec.Struct, frozen=True, kw_only=True):
    """A token that a step gave a sequence."""

    seq: int
    token_id: int


class Scheduler:
    """The sequences that wait for memory, and those that take part in steps.

    Sequences get memory in the order of arrival. A step holds one token of every decoding sequence, then as much of the
    running prompts, oldest first, as the budget leaves. Without `mix_batch` prompts and decoding take turns.
    """

    def __init__(self, pool: BlockPool, limits: StepLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
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
    def num_prompt_tokens_left(self) -> int:
        """Prompt tokens that are still to be computed, also those of the step under way whose sequence has left since.

        A step cannot be taken back: what it computes for nobody comes before new work as well.
        """
        left = sum(sequence.num_prompt_left for sequence in (*self._waiting, *self._running.values()))
        return left + sum(size for seq, size in self._under_way.items() if seq not in self._running)

    def enqueue(self, sequence: Sequence) -> None:
        """Let a sequence wait for memory. `admit` gives it."""
        self._waiting.append(sequence)

    def admit(self) -> Sequence | None:
        """Give the oldest waiting sequence its memory and return it, or None if none waits or there is no room.

        A prompt takes blocks for itself alone when it will be pushed away, else for its output too. The caller binds the
        sequence on the ranks, then calls `start`.
        """
        if not self._waiting:
            return None
        sequence = self._waiting[0]
        num_tokens = sequence.num_prompt_tokens
        if sequence.push is None:
            num_tokens += sequence.sampling.max_tokens
        sequence.memory = self._pool.reserve(num_tokens)
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
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed. Each plan must be answered by `apply` or `fail`."""
        decoding = [sequence for sequence in self._running.values() if sequence.pending_token is not None]
        prompts = [sequence for sequence in self._running.values() if sequence.num_prompt_left > 0]
        if not self._limits.mix_batch and decoding and prompts:
            decoding, prompts = (decoding, []) if self._decode_turn else ([], prompts)
            self._decode_turn = not self._decode_turn
        items = [_decode_item(sequence) for sequence in decoding[: self._limits.max_step_tokens]]
        budget = self._limits.max_step_tokens - len(items)
        for sequence in prompts:
            size = min(sequence.num_prompt_left, self._limits.prefill_chunk_tokens, budget)
            if size < 1:
                break
            items.append(_prefill_item(sequence, size))
            self._under_way[sequence.seq] = size
            budget -= size
        if not items:
            return None
        self._step += 1
        return StepPlan(step=self._step, items=tuple(items))

    def fail(self, plan: StepPlan) -> tuple[Sequence, ...]:
        """Take every sequence of a plan that could not be computed out of the running ones, and return them."""
        self._under_way.clear()
        failed = [sequence for item in plan.items if (sequence := self._running.get(item.seq)) is not None]
        for sequence in failed:
            self.hold(sequence)
        return tuple(failed)

    def apply(self, plan: StepPlan, tokens: Iterable[SampledToken]) -> tuple[Produced, ...]:
        """Record that a plan was computed; returns the tokens of sequences that still run, in the plan's order."""
        self._under_way.clear()
        sampled = {token.seq: token.token_id for token in tokens}
        produced: list[Produced] = []
        for item in plan.items:
            sequence = self._running.get(item.seq)
            if sequence is None:
                continue
            sequence.num_computed = item.start + item.num_tokens
            sequence.pending_token = None
            if item.sample:
                token = sampled[item.seq]
                sequence.pending_token = token
                sequence.pending_is_sampled = True
                sequence.output_ids.append(token)
                produced.append(Produced(seq=item.seq, token_id=token))
        return tuple(produced)


def _decode_item(sequence: Sequence) -> StepItem:
    token = sequence.pending_token
    if token is None:
        raise AssertionError("a decoding sequence has a pending token")
    given = () if sequence.pending_is_sampled else (token,)
    return StepItem(seq=sequence.seq, start=sequence.num_computed, num_tokens=1, token_ids=given, sample=True)


def _prefill_item(sequence: Sequence, size: int) -> StepItem:
    start = sequence.num_computed
    last = size == sequence.num_prompt_left
    ids = sequence.prompt_ids[start : start + size]
    return StepItem(seq=sequence.seq, start=start, num_tokens=size, token_ids=ids, sample=last, last_chunk=last)
