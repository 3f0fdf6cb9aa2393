"""Sequences that leave a step, lose their memory, or are next to be asked for it."""

from __future__ import annotations

import pytest

from common.worker.core.blocks import BlockPool
from common.worker.core.scheduler import Produced, Scheduler, StepLimits, _decode_item
from common.worker.core.sequence import Sequence, SequenceState
from contracts.rank import SampledToken, StepPlan
from contracts.requests import SamplingParams


def sequence(seq: int, num_prompt_tokens: int = 4) -> Sequence:
    """A request whose prompt is known here."""
    return Sequence(
        seq=seq,
        handoff_id=f"h{seq}",
        request_id=f"r{seq}",
        attempt=0,
        router_id="router-0",
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(max_tokens=8, seed=1),
        prompt_ids=tuple(range(100, 100 + num_prompt_tokens)),
    )


def started(*sequences: Sequence, num_blocks: int = 8) -> Scheduler:
    """A scheduler in which all of them run."""
    pool = BlockPool(num_blocks=num_blocks, num_slots=8, block_size=16)
    scheduler = Scheduler(pool, StepLimits(max_step_tokens=32, prefill_chunk_tokens=16))
    for each in sequences:
        scheduler.enqueue(each)
    while (admitted := scheduler.admit()) is not None:
        scheduler.start(admitted)
    return scheduler


def planned(scheduler: Scheduler) -> StepPlan:
    """The next step."""
    plan = scheduler.plan()
    assert plan is not None
    return plan


def test_each_sequence_of_a_step_gets_its_own_token_and_those_that_left_none() -> None:
    """Whoever was held meanwhile is passed over; the others behind it are not."""
    one, two, three = sequence(1), sequence(2), sequence(3)
    scheduler = started(one, two, three)
    plan = planned(scheduler)
    scheduler.hold(two)
    sampled = [SampledToken(seq=seq, position=4, token_id=50 + seq) for seq in (1, 2, 3)]
    assert scheduler.apply(plan, sampled) == (
        Produced(seq=1, token_ids=(51,), num_output_tokens=0),
        Produced(seq=3, token_ids=(53,), num_output_tokens=0),
    )
    assert (one.output_ids, two.output_ids, three.output_ids) == ([51], [], [53])
    assert (two.state, two.num_computed) == (SequenceState.HELD, 0)
    assert [(each.num_computed, each.pending_token, each.pending_is_sampled) for each in (one, three)] == [
        (4, 51, True),
        (4, 53, True),
    ]


def test_a_sequence_that_is_rewound_computes_prompt_and_output_again() -> None:
    """Each time it is counted, and nothing of it is pending."""
    each = sequence(1)
    each.num_computed, each.pending_token, each.pending_is_sampled = 6, 9, True
    each.output_ids += [7, 8, 9]
    for count in (1, 2):
        each.rewind()
        assert (each.num_preemptions, each.num_computed, each.num_recomputed_tokens) == (count, 0, 3)
        assert repr((each.pending_token, each.pending_is_sampled, each.num_prompt_left)) == "(None, False, 7)"


def test_nobody_gives_memory_back_while_there_is_enough() -> None:
    """Nobody is short, and no block is free: one that has ended keeps its memory until it is released."""
    one, two = sequence(1, 16), sequence(2, 16)
    scheduler = started(one, two, num_blocks=4)
    assert [each.memory is not None and len(each.memory.block_ids) for each in (one, two)] == [2, 2]
    scheduler.leave(two)
    assert scheduler.next_victim(0) is None
    scheduler.hold(two)
    assert scheduler.next_victim(0) is None


def test_a_decoding_sequence_without_a_token_is_a_fault_with_a_name() -> None:
    """It would compute nothing for ever."""
    with pytest.raises(AssertionError, match=r"^a decoding sequence has a pending token$"):
        _decode_item(sequence(1, 0), 0)
