"""The scheduler: what a step holds, and what becomes of its tokens."""

from common.worker.core.blocks import BlockPool
from common.worker.core.growth import Growth
from common.worker.core.scheduler import Scheduler, StepLimits
from common.worker.core.sequence import Sequence, SequenceState
from contracts.handoff import Grant
from contracts.rank import PushTarget, SampledToken, StepItem, StepPlan
from contracts.requests import FinishReason, SamplingParams


def _sequence(seq: int, num_prompt: int, max_tokens: int = 8, **sampling: object) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=1, **sampling)  # type: ignore[arg-type]  # test values of any field
    return Sequence(
        seq=seq,
        handoff_id=f"h{seq}",
        request_id=f"r{seq}",
        attempt=0,
        router_id="router-0",
        num_prompt_tokens=num_prompt,
        sampling=params,
        prompt_ids=tuple(range(100, 100 + num_prompt)),
    )


def _scheduler(
    num_blocks: int = 64, *, mix_batch: bool = True, budget: int = 32, chunk: int = 16, growth: Growth | None = None
) -> Scheduler:
    pool = BlockPool(num_blocks=num_blocks, num_slots=8, block_size=16)
    limits = StepLimits(max_step_tokens=budget, prefill_chunk_tokens=chunk, mix_batch=mix_batch)
    return Scheduler(pool, limits, growth)


def _admit_all(scheduler: Scheduler) -> list[int]:
    admitted = []
    while (sequence := scheduler.admit()) is not None:
        scheduler.start(sequence)
        admitted.append(sequence.seq)
    return admitted


def _run(scheduler: Scheduler, plan: StepPlan, token: int = 7) -> list[int]:
    tokens = [SampledToken(seq=i.seq, position=i.start + i.num_tokens, token_id=token) for i in plan.items if i.sample]
    return [produced.seq for produced in scheduler.apply(plan, tokens)]


def _plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def test_a_prompt_is_computed_in_chunks_and_sampled_once_at_its_end() -> None:
    """Chunks follow each other without gap or overlap; only the last one samples and is marked as the last."""
    scheduler = _scheduler()
    scheduler.enqueue(_sequence(1, 40))
    assert _admit_all(scheduler) == [1]
    seen: list[StepItem] = []
    while True:
        plan = _plan(scheduler)
        if _run(scheduler, plan):
            seen += plan.items
            break
        seen += plan.items
    assert [(item.start, item.num_tokens, item.sample, item.last_chunk) for item in seen] == [
        (0, 16, False, False),
        (16, 16, False, False),
        (32, 8, True, True),
    ]
    assert [token for item in seen for token in item.token_ids] == list(range(100, 140))


def test_decoding_comes_first_and_prompts_fill_the_budget() -> None:
    """A step holds a token of every decoding sequence, then prompts in order of arrival, to the budget."""
    scheduler = _scheduler(budget=20, chunk=16)
    scheduler.enqueue(_sequence(1, 4))
    _admit_all(scheduler)
    assert _run(scheduler, _plan(scheduler)) == [1]
    scheduler.enqueue(_sequence(2, 30))
    scheduler.enqueue(_sequence(3, 30))
    _admit_all(scheduler)
    plan = _plan(scheduler)
    assert [(item.seq, item.start, item.num_tokens) for item in plan.items] == [(1, 4, 1), (2, 0, 16), (3, 0, 3)]
    assert plan.items[0].token_ids == ()


def test_without_mixed_batches_prompts_and_decoding_take_turns() -> None:
    """No step holds both, and neither starves."""
    scheduler = _scheduler(mix_batch=False)
    scheduler.enqueue(_sequence(1, 4))
    _admit_all(scheduler)
    _run(scheduler, _plan(scheduler))
    scheduler.enqueue(_sequence(2, 64))
    _admit_all(scheduler)
    kinds = []
    for _ in range(4):
        plan = _plan(scheduler)
        kinds.append([item.seq for item in plan.items])
        _run(scheduler, plan)
    assert kinds == [[1], [2], [1], [2]]


def test_memory_goes_to_the_oldest_and_nobody_overtakes() -> None:
    """A large sequence at the head of the line is not starved by small ones behind it."""
    scheduler = _scheduler(num_blocks=5)
    scheduler.enqueue(_sequence(1, 40, max_tokens=8))
    scheduler.enqueue(_sequence(2, 60, max_tokens=8))
    scheduler.enqueue(_sequence(3, 1, max_tokens=8))
    assert _admit_all(scheduler) == [1]
    assert scheduler.num_waiting == 2


def test_a_pushed_prompt_takes_memory_for_itself_alone() -> None:
    """On a prefill worker the output never lives, so its blocks are not reserved."""
    scheduler = _scheduler(num_blocks=2)
    sequence = _sequence(1, 32, max_tokens=1000)
    grant = Grant(worker_id="decode-0", incarnation="i1", generation=1, block_ids=(0, 1), slot=0)
    sequence.push = PushTarget(grant=grant, num_cached_tokens=0)
    scheduler.enqueue(sequence)
    assert _admit_all(scheduler) == [1]


def test_a_held_sequence_gets_no_tokens_of_the_step_under_way() -> None:
    """A cancel during a step: its result is not applied, its memory stays."""
    scheduler = _scheduler()
    sequence = _sequence(1, 4)
    scheduler.enqueue(sequence)
    _admit_all(scheduler)
    plan = _plan(scheduler)
    scheduler.hold(sequence)
    assert _run(scheduler, plan) == []
    assert (sequence.state, sequence.output_ids, sequence.memory is not None) == (SequenceState.HELD, [], True)
    assert scheduler.plan() is None


def test_a_failed_step_stops_its_sequences_and_no_others() -> None:
    """Every sequence of the plan is out; the rest goes on."""
    scheduler = _scheduler(budget=8)
    for seq in (1, 2):
        scheduler.enqueue(_sequence(seq, 8))
    _admit_all(scheduler)
    assert [sequence.seq for sequence in scheduler.fail(item.seq for item in _plan(scheduler).items)] == [1]
    assert [item.seq for item in _plan(scheduler).items] == [2]


def test_a_sequence_that_was_taken_over_starts_with_the_given_token() -> None:
    """The first decode step carries the token that prefill sampled; later ones refer to the step before."""
    scheduler = _scheduler()
    sequence = _sequence(1, 20)
    sequence.num_computed, sequence.pending_token = 20, 42
    sequence.output_ids.append(42)
    scheduler.start(sequence)
    first = _plan(scheduler)
    assert first.items == (StepItem(seq=1, start=20, num_tokens=1, token_ids=(42,), sample=True),)
    _run(scheduler, first, token=43)
    assert _plan(scheduler).items == (StepItem(seq=1, start=21, num_tokens=1, token_ids=(), sample=True),)


def test_finish_reasons() -> None:
    """Eos stops unless it is ignored or comes before min_tokens; max_tokens ends with length; eos as the last token stops."""
    eos = frozenset({0})

    def reason(outputs: list[int], **sampling: object) -> FinishReason | None:
        sequence = _sequence(1, 1, max_tokens=3, **sampling)
        sequence.output_ids = outputs
        return sequence.finish_reason(outputs[-1], len(outputs), eos)

    assert reason([5]) is None
    assert reason([0]) is FinishReason.STOP
    assert reason([5, 5, 5]) is FinishReason.LENGTH
    assert reason([5, 5, 0]) is FinishReason.STOP
    assert reason([0], ignore_eos=True) is None
    assert reason([0], min_tokens=1) is None
    assert reason([5, 0], min_tokens=1) is FinishReason.STOP


def test_a_step_under_way_counts_as_work_left_also_for_a_sequence_that_has_gone() -> None:
    """A step cannot be taken back: until it ends, its prompt tokens come before new work, and are counted once."""
    scheduler = _scheduler()
    sequence = _sequence(1, 40)
    scheduler.enqueue(sequence)
    _admit_all(scheduler)
    plan = _plan(scheduler)
    assert scheduler.num_prompt_tokens_left == 40
    scheduler.hold(sequence)
    assert scheduler.num_prompt_tokens_left == 16
    assert _run(scheduler, plan) == []
    assert scheduler.num_prompt_tokens_left == 0
