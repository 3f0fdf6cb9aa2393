"""Sequences that get memory as they grow: what they ask for, who gives way, and what becomes of those who did."""

from __future__ import annotations

import pytest

from common.worker.core.blocks import BlockPool, MemoryNeed
from common.worker.core.growth import Growth
from common.worker.core.scheduler import Scheduler, StepLimits
from common.worker.core.sequence import Sequence, SequenceState
from contracts.handoff import Grant
from contracts.rank import Extension, PushTarget, SampledToken, StepPlan
from contracts.requests import SamplingParams

BLOCK = 4


class Line:
    """A scheduler over a pool of so many blocks of four tokens, and the token 7 for everybody."""

    def __init__(self, num_blocks: int, *, reserve: int = 1, step_blocks: int = 1, dcp: int = 1) -> None:
        self.pool = BlockPool(num_blocks=num_blocks, num_slots=4, block_size=BLOCK, dcp=dcp)
        limits = StepLimits(max_step_tokens=64, prefill_chunk_tokens=64)
        growth = Growth(reserve_output_tokens=reserve, step_blocks=step_blocks)
        self.scheduler = Scheduler(self.pool, limits, growth)

    def add(self, seq: int, num_prompt: int = 4, max_tokens: int = 20) -> Sequence:
        """Let a sequence wait."""
        sequence = Sequence(
            seq=seq,
            handoff_id=f"h{seq}",
            request_id=f"r{seq}",
            attempt=0,
            router_id="router-0",
            num_prompt_tokens=num_prompt,
            sampling=SamplingParams(max_tokens=max_tokens, seed=1),
            prompt_ids=tuple(range(100, 100 + num_prompt)),
        )
        self.scheduler.enqueue(sequence)
        return sequence

    def admit(self) -> list[int]:
        """Give memory to all who can have it."""
        admitted = []
        while (sequence := self.scheduler.admit()) is not None:
            self.scheduler.start(sequence)
            admitted.append(sequence.seq)
        return admitted

    def step(self) -> StepPlan | None:
        """Compute a step."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.scheduler.apply(
                plan,
                [
                    SampledToken(seq=item.seq, position=item.start + item.num_tokens, token_id=7)
                    for item in plan.items
                    if item.sample
                ],
            )
        return plan

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's memory, as the loop does."""
        self.scheduler.preempt(sequence)
        memory, sequence.memory = sequence.memory, None
        assert memory is not None
        self.pool.release(memory)

    def short(self) -> tuple[Sequence, Sequence]:
        """An older and a younger sequence, each with two full blocks and no room for its next token."""
        first, second = self.add(1), self.add(2)
        assert self.admit() == [1, 2]
        for _ in range(5):
            self.step()
        return first, second


@pytest.mark.parametrize(
    ("reserve", "max_tokens", "expected"), [(0, 20, 24), (1, 20, 5), (8, 20, 12), (20, 20, 24), (50, 20, 24)]
)
def test_a_sequence_asks_for_its_prompt_and_a_part_of_its_output(reserve: int, max_tokens: int, expected: int) -> None:
    """Never for more than it may generate; 0 is all of it. What it may grow to is always all of it."""
    need = Growth(reserve_output_tokens=reserve).first_need(4, max_tokens)
    assert need == MemoryNeed(num_tokens=expected, limit_tokens=4 + max_tokens)


def test_one_that_was_preempted_asks_for_what_it_has_and_a_step_more() -> None:
    """Else it would lose its memory again before it was worth computing; its limit stays."""
    line = Line(8, reserve=1, step_blocks=2)
    sequence = line.add(1)
    line.admit()
    line.step()
    line.preempt(sequence)
    growth = Growth(reserve_output_tokens=1, step_blocks=2)
    assert growth.need(sequence, BLOCK) == MemoryNeed(num_tokens=4 + 1 + 8, limit_tokens=24)
    sequence.output_ids += [7] * 17
    assert growth.need(sequence, BLOCK) == MemoryNeed(num_tokens=24, limit_tokens=24)


def test_a_prompt_that_is_pushed_never_grows_and_never_gives_way() -> None:
    """Its peers write nothing here, but what it writes there has been granted once."""
    line = Line(2)
    sequence = line.add(1)
    grant = Grant(worker_id="decode-0", incarnation="i1", generation=1, block_ids=(0, 1), slot=0)
    sequence.push = PushTarget(grant=grant, num_cached_tokens=0)
    line.admit()
    assert sequence.memory is not None
    assert not sequence.memory.may_grow
    line.step()
    assert line.scheduler.next_victim(0) is None


def test_who_is_short_grows_by_a_step_in_the_order_of_age() -> None:
    """The older one gets what it asks for, the younger what is left of it; both go on."""
    line = Line(7, step_blocks=2)
    first, second = line.short()
    assert line.pool.num_free_blocks == 3
    assert line.step() is None, "nobody computes where it has no room"
    assert line.scheduler.next_victim(0) is None
    assert line.scheduler.grow() == (Extension(seq=1, block_ids=(4, 5)), Extension(seq=2, block_ids=(6,)))
    assert line.scheduler.grow() == ()
    plan = line.step()
    assert plan is not None
    assert [(item.seq, item.start) for item in plan.items] == [(1, 8), (2, 8)]
    assert first.memory is not None
    assert second.memory is not None
    assert (len(first.memory.block_ids), len(second.memory.block_ids)) == (4, 3)


def test_one_that_has_ended_gives_way_before_any_that_runs() -> None:
    """Its memory would come back anyway; nobody has to be computed again for it."""
    line = Line(6)
    ended = line.add(0, num_prompt=1, max_tokens=1)
    assert line.admit() == [0]
    line.step()
    line.short()
    line.scheduler.leave(ended)
    assert line.scheduler.next_victim(0) is ended
    line.preempt(ended)
    assert (ended.state, ended.num_preemptions) == (SequenceState.HELD, 0)
    assert line.scheduler.next_victim(0) is None


def test_nobody_gives_way_while_enough_is_coming_back() -> None:
    """A slow release is waited for, as long as it is enough; else the youngest goes, be it the one that is short."""
    line = Line(5)
    first, second = line.short()
    assert line.scheduler.next_victim(1) is None
    assert line.scheduler.next_victim(0) is second
    line.preempt(second)
    assert line.scheduler.next_victim(0) is None
    assert line.scheduler.grow() == (Extension(seq=1, block_ids=(2,)),)
    assert line.pool.reserve(MemoryNeed(num_tokens=1, limit_tokens=1)) is not None, "of a handoff that has not begun"
    for _ in range(2 * BLOCK):
        line.step()
        line.scheduler.grow()
    assert line.scheduler.next_victim(0) is first


def test_a_preempted_sequence_is_computed_again_with_its_output_and_goes_on_behind_it() -> None:
    """Prompt and output are one prompt, sampled once at its end; no token of it comes twice."""
    line = Line(8)
    sequence = line.add(1)
    line.admit()
    for _ in range(3):
        line.step()
    sequence.output_ids[:] = [11, 12, 13]
    line.preempt(sequence)
    assert (sequence.state, sequence.num_preemptions) == (SequenceState.WAITING, 1)
    line.scheduler.requeue(sequence)
    assert line.scheduler.num_prompt_tokens_left == 7
    assert line.admit() == [1]
    plan = line.step()
    assert plan is not None
    (item,) = plan.items
    assert (item.start, item.num_tokens, item.sample, item.last_chunk) == (0, 7, True, True)
    assert item.token_ids == (100, 101, 102, 103, 11, 12, 13)
    assert sequence.output_ids == [11, 12, 13, 7]
    plan = line.step()
    assert plan is not None
    assert (plan.items[0].start, plan.items[0].token_ids) == (7, ())


def test_the_preempted_come_before_those_that_never_had_memory_in_the_order_of_age() -> None:
    """They have waited longest, whichever of them lost its memory last."""
    line = Line(5)
    first, second = line.short()
    third = line.add(3)
    for sequence in (first, second):
        line.preempt(sequence)
    line.scheduler.requeue(second)
    line.scheduler.requeue(first)
    assert line.scheduler.num_waiting == 3
    assert line.admit() == [1], "the second would find no room to grow"
    for sequence in (first, second, third):
        line.scheduler.hold(sequence)
    assert (line.scheduler.num_waiting, line.scheduler.num_running) == (0, 0)


def test_a_sequence_without_its_prompt_is_over_when_it_gives_way() -> None:
    """On a decode worker: whoever has the prompt lets it go on elsewhere."""
    line = Line(4)
    sequence = line.add(1)
    line.admit()
    sequence.prompt_ids = ()
    line.preempt(sequence)
    assert (sequence.state, line.scheduler.num_running) == (SequenceState.HELD, 0)


def test_a_failed_growth_stops_its_sequences_and_no_others() -> None:
    """As a failed step does."""
    line = Line(6)
    first, second = line.short()
    extensions = line.scheduler.grow()
    assert line.scheduler.fail(each.seq for each in extensions[:1]) == (first,)
    assert line.scheduler.running == (second,)


def test_with_dcp_a_sequence_grows_only_once_the_blocks_of_all_ranks_are_full() -> None:
    """An id is good for a block on each rank: a sequence is short at their sum, and what comes back after a preemption counts so, too."""
    line = Line(6, dcp=2)
    sequence = line.add(1, num_prompt=4, max_tokens=40)
    assert line.admit() == [1]
    assert sequence.memory is not None
    assert sequence.memory.block_ids == (0,)
    while len(sequence.output_ids) < 5:  # the fifth is still to be computed, behind the 8 that there is room for
        line.step()
    assert line.step() is None
    (extension,) = line.scheduler.grow()
    assert extension.block_ids == (1,)
    assert line.step() is not None
    growth = Growth(reserve_output_tokens=1, step_blocks=2)
    sequence.rewind()
    assert growth.need(sequence, line.pool.block_tokens) == MemoryNeed(num_tokens=4 + 6 + 2 * 8, limit_tokens=44)
