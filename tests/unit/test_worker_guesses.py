"""Guesses in the scheduler: how many are verified in a step, and where a sequence stands afterwards."""

from __future__ import annotations

import pytest

from common.worker.core.blocks import BlockPool
from common.worker.core.growth import Growth
from common.worker.core.scheduler import Produced, Scheduler, StepLimits
from common.worker.core.sequence import Sequence
from contracts.rank import SampledToken, StepPlan
from contracts.requests import SamplingParams


def prompt(seq: int, *, max_tokens: int) -> Sequence:
    """A request of five tokens."""
    return Sequence(
        seq=seq,
        handoff_id=f"h{seq}",
        request_id=f"r{seq}",
        attempt=1,
        router_id="r",
        num_prompt_tokens=5,
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
        prompt_ids=(1, 2, 3, 4, 5),
    )


def decoding(
    *,
    depth: int = 3,
    max_tokens: int = 20,
    budget: int = 32,
    count: int = 1,
    num_blocks: int = 128,
    growth: Growth | None = None,
    chunked: bool = True,
) -> tuple[Scheduler, list[Sequence]]:
    """Sequences of five prompt tokens that have their first token, in a pool of blocks of eight."""
    pool = BlockPool(num_blocks=num_blocks, num_slots=8, block_size=8)
    limits = StepLimits(max_step_tokens=budget, prefill_chunk_tokens=16, num_speculative_tokens=depth, chunked=chunked)
    scheduler = Scheduler(pool, limits, growth)
    sequences = []
    for seq in range(count):
        sequence = prompt(seq, max_tokens=max_tokens)
        scheduler.enqueue(sequence)
        admitted = scheduler.admit()
        assert admitted is sequence
        scheduler.start(sequence)
        sequences.append(sequence)
        while sequence.pending_token is None:
            apply(scheduler, plan_of(scheduler), {})
    return scheduler, sequences


def plan_of(scheduler: Scheduler) -> StepPlan:
    """The next step, which there is."""
    plan = scheduler.plan()
    assert plan is not None
    return plan


def apply(scheduler: Scheduler, plan: StepPlan, tokens: dict[int, list[int]]) -> tuple[Produced, ...]:
    """Let a step give sequences these tokens."""
    sampled = []
    for item in plan.items:
        found = tokens.get(item.seq, [7])
        first = item.start + (item.num_tokens if item.token_ids else 1)
        sampled += [SampledToken(seq=item.seq, position=first + i, token_id=token) for i, token in enumerate(found)]
    return scheduler.apply(plan, sampled)


@pytest.mark.parametrize("found", [[8], [8, 9], [8, 9, 10, 11]])
def test_a_sequence_goes_on_behind_the_guesses_that_were_right(found: list[int]) -> None:
    """Of four tokens that a step may compute those count behind which a token came; the last one is computed next."""
    scheduler, (sequence,) = decoding()
    plan = plan_of(scheduler)
    assert [(item.start, item.num_tokens, item.token_ids) for item in plan.items] == [(5, 4, ())]
    assert apply(scheduler, plan, {0: found}) == (Produced(seq=0, token_ids=tuple(found), num_output_tokens=1),)
    assert (sequence.num_computed, sequence.pending_token) == (5 + len(found), found[-1])
    assert sequence.output_ids == [7, *found]
    assert plan_of(scheduler).items[0].start == 5 + len(found)


def test_no_more_is_guessed_than_is_wanted() -> None:
    """With three tokens missing two guesses can help; with one missing none can."""
    scheduler, _ = decoding(max_tokens=4)
    plan = plan_of(scheduler)
    assert plan.items[0].num_tokens == 3
    apply(scheduler, plan, {0: [8, 9]})
    assert plan_of(scheduler).items[0].num_tokens == 1


def test_a_given_token_comes_alone() -> None:
    """Behind a handoff nothing has been guessed yet: the step names its token."""
    scheduler, (sequence,) = decoding()
    sequence.pending_is_sampled = False
    (item,) = plan_of(scheduler).items
    assert (item.num_tokens, item.token_ids) == (1, (7,))


@pytest.mark.parametrize("found", [[8], [8, 9, 10]])
def test_behind_what_a_draft_has_left_the_given_token_is_guessed_for(found: list[int]) -> None:
    """The step names its token, and guesses behind it; the next one is like any other."""
    scheduler, (sequence,) = decoding()
    sequence.pending_is_sampled, sequence.bootstrap = False, True
    plan = plan_of(scheduler)
    (item,) = plan.items
    assert (item.bootstrap, item.num_tokens, item.token_ids) == (True, 4, (7,))
    tokens = [SampledToken(seq=0, position=6 + at, token_id=token) for at, token in enumerate(found)]
    assert scheduler.apply(plan, tokens)[0].token_ids == tuple(found)
    assert (sequence.num_computed, sequence.pending_token) == (5 + len(found), found[-1])
    (item,) = plan_of(scheduler).items
    assert (item.bootstrap, item.start, item.num_tokens, item.token_ids) == (False, 5 + len(found), 4, ())


def test_one_that_nobody_guesses_for_has_a_token_a_step() -> None:
    """Whatever the depth, and though it lives beside others that are guessed for."""
    scheduler, (first, _) = decoding(count=2)
    first.is_guessed = False
    assert [item.num_tokens for item in plan_of(scheduler).items] == [1, 4]


@pytest.mark.parametrize(("num_blocks", "extended", "num_tokens"), [(3, ((1,),), 4), (2, (), 3)])
def test_memory_for_guesses_comes_before_it_is_short(
    num_blocks: int, extended: tuple[tuple[int, ...], ...], num_tokens: int
) -> None:
    """Room for the token and two of three guesses: one more block, if nobody has that one kept for its next token."""
    growth = Growth(reserve_output_tokens=1, step_blocks=1)
    scheduler, _ = decoding(num_blocks=num_blocks, growth=growth)
    assert scheduler.next_victim(0) is None
    assert tuple(extension.block_ids for extension in scheduler.grow()) == extended
    assert scheduler.grow() == ()
    assert plan_of(scheduler).items[0].num_tokens == num_tokens


def test_guesses_take_no_place_of_other_sequences() -> None:
    """A step of five tokens for four sequences: everybody has a token, the first one guess."""
    scheduler, _ = decoding(budget=5, count=4, max_tokens=100)
    assert [item.num_tokens for item in plan_of(scheduler).items] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("budget", "chunked", "sizes"),
    [(3, True, [1, 1, 1]), (6, True, [3, 1, 2]), (12, True, [4, 3, 5]), (17, True, [4, 4, 5]), (8, False, [2, 1, 5])],
)
def test_prompts_and_guesses_share_what_decoding_leaves(budget: int, sizes: list[int], *, chunked: bool) -> None:
    """Guesses that could help have up to half of it, and what prompts do not need; a prompt that must be computed whole comes first."""
    scheduler, _ = decoding(budget=budget, count=2, max_tokens=100, chunked=chunked)
    late = prompt(9, max_tokens=100)
    scheduler.enqueue(late)
    assert scheduler.admit() is late
    scheduler.start(late)
    assert [item.num_tokens for item in plan_of(scheduler).items] == sizes
