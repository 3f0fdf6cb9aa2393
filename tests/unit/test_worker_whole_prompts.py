"""Prompts that are computed whole: without chunks each is in one step, and none waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.worker.core.blocks import BlockPool
from common.worker.core.effective import EffectiveSwitches
from common.worker.core.scheduler import Scheduler, StepLimits
from common.worker.core.sequence import Sequence
from common.worker.core.step_mode import StepMode, mode_of, modes_of
from contracts.rank import SampledToken, StepItem, StepPlan
from contracts.requests import SamplingParams
from contracts.workers import WorkerRole

BUDGET = 16


def line(*prompts: int, chunked: bool = False, mix_batch: bool = True, max_tokens: int = 4) -> Scheduler:
    """A scheduler of steps of 16 tokens, pieces of 4, and prompts of these lengths."""
    limits = StepLimits(max_step_tokens=BUDGET, prefill_chunk_tokens=4, mix_batch=mix_batch, chunked=chunked)
    scheduler = Scheduler(BlockPool(num_blocks=256, num_slots=BUDGET, block_size=4), limits)
    for seq, num_prompt in enumerate(prompts, 1):
        scheduler.enqueue(
            Sequence(
                seq=seq,
                handoff_id=f"h{seq}",
                request_id=f"r{seq}",
                attempt=0,
                router_id="router-0",
                num_prompt_tokens=num_prompt,
                sampling=SamplingParams(max_tokens=max_tokens, seed=1),
                prompt_ids=tuple(range(num_prompt)),
            )
        )
    return scheduler


def admit(scheduler: Scheduler) -> None:
    """Let in who has room."""
    while (sequence := scheduler.admit()) is not None:
        scheduler.start(sequence)


def compute(scheduler: Scheduler) -> list[tuple[int, int]]:
    """One step: its sequences and how many tokens of each. Who has all of its tokens leaves."""
    plan = scheduler.plan()
    assert plan is not None
    tokens = [SampledToken(seq=i.seq, position=i.start + i.num_tokens, token_id=7) for i in plan.items if i.sample]
    scheduler.apply(plan, tokens)
    for sequence in scheduler.running:
        if len(sequence.output_ids) >= sequence.sampling.max_tokens:
            scheduler.hold(sequence)
    return [(item.seq, item.num_tokens) for item in plan.items]


def test_whole_prompts_share_a_step_as_far_as_they_fit() -> None:
    """The size of pieces means nothing; who does not fit waits, and nobody younger passes."""
    scheduler = line(9, 7, 6, 1)
    admit(scheduler)
    assert compute(scheduler) == [(1, 9), (2, 7)]
    assert compute(scheduler) == [(1, 1), (2, 1), (3, 6), (4, 1)]


def test_a_prompt_that_fits_beside_nobody_takes_turns_with_those_that_decode() -> None:
    """It would wait for ever for a step that is empty; with room beside them it shares theirs."""
    scheduler = line(2, 16)
    admit(scheduler)
    assert compute(scheduler) == [(1, 2)]
    assert compute(scheduler) == [(1, 1)]
    assert compute(scheduler) == [(2, 16)]
    assert compute(scheduler) == [(1, 1), (2, 1)]


def test_with_chunks_the_same_prompts_are_cut() -> None:
    """The switch is what makes the difference."""
    scheduler = line(9, 7, chunked=True)
    admit(scheduler)
    assert compute(scheduler) == [(1, 4), (2, 4)]


@given(
    prompts=st.lists(st.integers(1, BUDGET), min_size=1, max_size=BUDGET),
    mix_batch=st.booleans(),
    chunked=st.booleans(),
)
def test_every_prompt_ends_and_only_possible_modes_are_built(
    prompts: list[int], *, mix_batch: bool, chunked: bool
) -> None:
    """Whatever comes, in as many steps as one after the other would take; without chunks each prompt is in one piece."""
    scheduler = line(*prompts, chunked=chunked, mix_batch=mix_batch)
    effective = EffectiveSwitches(
        chunked_prefill=chunked, mix_batch=mix_batch, max_prompt_tokens=None, num_staging_rows=0, dcp_interleave=4
    )
    possible = modes_of(effective, WorkerRole.MIXED)
    admit(scheduler)
    sequences = {sequence.seq: sequence for sequence in scheduler.running}
    num_steps = 0
    while scheduler.num_running:
        before = {seq: sequence.num_prompt_left for seq, sequence in sequences.items()}
        plan = scheduler.plan()
        assert plan is not None
        in_prompt = [item for item in plan.items if before[item.seq]]
        assert scheduler.prompts_under_way == {item.seq for item in in_prompt}
        assert mode_of(in_prompt, num_items=len(plan.items)) in possible
        assert chunked or all(item.num_tokens == before[item.seq] == prompts[item.seq - 1] for item in in_prompt)
        assert sum(item.num_tokens for item in plan.items) <= BUDGET
        _apply(scheduler, plan)
        num_steps += 1
        assert num_steps <= sum(-(-size // 4) + 4 for size in prompts)
    assert all(len(sequence.output_ids) == 4 for sequence in sequences.values())


def _apply(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.apply(
        plan, [SampledToken(seq=i.seq, position=i.start + i.num_tokens, token_id=7) for i in plan.items if i.sample]
    )
    for sequence in scheduler.running:
        if len(sequence.output_ids) >= sequence.sampling.max_tokens:
            scheduler.hold(sequence)


@pytest.mark.parametrize(
    ("prompts", "num_items", "mode"),
    [
        ([], 3, StepMode.DECODE),
        ([(0, True)], 2, StepMode.MIXED),
        ([(0, True), (0, True)], 2, StepMode.PREFILL),
        ([(0, True), (0, False)], 2, StepMode.CHUNK),
        ([(8, True)], 1, StepMode.CHUNK),
        ([(8, False)], 2, StepMode.MIXED),
    ],
)
def test_the_mode_of_a_step(prompts: list[tuple[int, bool]], num_items: int, mode: StepMode) -> None:
    """By what it holds: the last piece of a prompt is a piece, too."""
    items = [StepItem(seq=1, start=start, num_tokens=4, last_chunk=last) for start, last in prompts]
    assert mode_of(items, num_items=num_items) is mode


@pytest.mark.parametrize(
    ("role", "chunked", "mix_batch", "modes"),
    [
        (WorkerRole.PREFILL, True, True, {"prefill", "chunk"}),
        (WorkerRole.PREFILL, False, True, {"prefill"}),
        (WorkerRole.DECODE, False, True, {"decode"}),
        (WorkerRole.MIXED, True, True, {"prefill", "chunk", "decode", "mixed"}),
        (WorkerRole.MIXED, True, False, {"prefill", "chunk", "decode"}),
        (WorkerRole.MIXED, False, False, {"prefill", "decode"}),
    ],
)
def test_modes_that_switches_rule_out_are_not_counted(
    role: WorkerRole, *, chunked: bool, mix_batch: bool, modes: set[str]
) -> None:
    """What a worker shows says what it can do."""
    effective = EffectiveSwitches(
        chunked_prefill=chunked, mix_batch=mix_batch, max_prompt_tokens=None, num_staging_rows=0, dcp_interleave=4
    )
    assert set(modes_of(effective, role)) == modes
