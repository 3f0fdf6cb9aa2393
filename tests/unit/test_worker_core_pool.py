"""Memory with its staging rows, steps by their numbers, and prompts at the edges of what their buffer takes."""

from __future__ import annotations

import base64
import hashlib
from array import array

import pytest

from common.worker.core.blocks import BlockPool, MemoryNeed, Reservation
from common.worker.core.prompts import PromptBuffer
from common.worker.core.scheduler import Scheduler, StepLimits
from common.worker.core.sequence import Sequence
from contracts.errors import InvalidValueError
from contracts.rank import SampledToken
from contracts.requests import PromptFrame, SamplingParams

ONE_BLOCK = MemoryNeed(num_tokens=16, limit_tokens=16)


def staged() -> BlockPool:
    """Three blocks and slots, two staging rows."""
    return BlockPool(num_blocks=3, num_slots=3, block_size=16, num_staging_rows=2)


def taken(pool: BlockPool) -> Reservation:
    """One block of it."""
    reservation = pool.reserve(ONE_BLOCK)
    assert reservation is not None
    return reservation


def test_a_staging_row_comes_and_goes_with_the_slot() -> None:
    """The lowest free one first; without a free row nobody begins, though there are blocks and slots; without any, nobody has one."""
    pool = staged()
    first, second = taken(pool), taken(pool)
    assert (first.staging_row, second.staging_row) == (0, 1)
    assert (pool.num_free_slots, pool.num_free_places) == (1, 0)
    assert pool.reserve(ONE_BLOCK) is None
    pool.release(first)
    assert taken(pool).staging_row == 0
    pool.check_integrity()
    assert taken(BlockPool(num_blocks=1, num_slots=1, block_size=16)).staging_row is None


def test_memory_is_quarantined_once_and_only_from_its_owner() -> None:
    """A second time, or after a release, changes nothing; its row comes back with it."""
    pool = staged()
    first, second = taken(pool), taken(pool)
    pool.quarantine(first)
    pool.quarantine(first)
    pool.release(second)
    pool.quarantine(second)
    assert (pool.num_quarantined_blocks, pool.num_free_places) == (1, 1)
    pool.end_quarantine([first.generation])
    assert pool.num_free_places == 2
    pool.check_integrity()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        ("_free_blocks", "a block or slot has no place, or two"),
        ("_free_slots", "a block or slot has no place, or two"),
        ("_free_rows", "a staging row has no place, or two"),
    ],
)
def test_a_pool_that_has_lost_something_says_so(spoil: str, text: str) -> None:
    """Nothing is given to two, nothing to nobody."""
    for spoiled in ([1, 1], [0], []):
        pool = staged()
        taken(pool)
        setattr(pool, spoil, spoiled)
        with pytest.raises(AssertionError) as caught:
            pool.check_integrity()
        assert str(caught.value) == text


def test_generations_rise_by_the_number_of_replicas() -> None:
    """No two replicas give the same one: cells that are raised to one belong to nobody else."""
    alone = BlockPool(num_blocks=1, num_slots=1, block_size=16)
    assert [alone.next_generation() for _ in range(3)] == [1, 2, 3]
    third = BlockPool(num_blocks=1, num_slots=1, block_size=16, dp_rank=2, dp=4)
    assert [third.next_generation() for _ in range(3)] == [6, 10, 14]


@pytest.mark.parametrize("field", ["num_blocks", "num_slots", "block_size", "dcp"])
def test_a_pool_of_nothing_is_refused_by_field_value_and_rule(field: str) -> None:
    """One of each is enough."""
    counts = {"num_blocks": 1, "num_slots": 1, "block_size": 1, "dcp": 1}
    assert BlockPool(**counts).num_free_blocks == 1
    with pytest.raises(InvalidValueError) as caught:
        BlockPool(**(counts | {field: 0}))
    assert str(caught.value) == f"{field}: 0 is not allowed; the rule is: 1 or more"


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


def running(*sequences: Sequence, num_blocks: int = 8) -> Scheduler:
    """A scheduler in which all of them run."""
    pool = BlockPool(num_blocks=num_blocks, num_slots=8, block_size=16)
    scheduler = Scheduler(pool, StepLimits(max_step_tokens=32, prefill_chunk_tokens=3))
    for each in sequences:
        scheduler.enqueue(each)
    while (admitted := scheduler.admit()) is not None:
        scheduler.start(admitted)
    return scheduler


def test_steps_are_numbered_from_one_and_the_last_token_of_a_prompt_is_computed() -> None:
    """A piece of three tokens, one of one, then what was generated: each step has the next number, an empty one none."""
    scheduler = running(sequence(1))
    steps = []
    for _ in range(4):
        plan = scheduler.plan()
        assert plan is not None
        steps.append((plan.step, [(item.start, item.num_tokens, item.sample) for item in plan.items]))
        sampled = [SampledToken(seq=1, position=0, token_id=7) for item in plan.items if item.sample]
        scheduler.apply(plan, sampled)
    assert steps == [(1, [(0, 3, False)]), (2, [(3, 1, True)]), (3, [(4, 1, True)]), (4, [(5, 1, True)])]
    empty = running()
    assert empty.plan() is None
    empty.start(sequence(2))
    plan = empty.plan()
    assert plan is not None
    assert plan.step == 1


def test_a_sequence_that_is_held_after_it_left_is_nobodys_victim() -> None:
    """It keeps its memory: somebody else has to give some."""
    one, two = sequence(1, 32), sequence(2, 16)
    scheduler = running(one, two, num_blocks=5)
    two.num_computed, two.pending_token = 32, 9
    one.num_computed, one.pending_token = 48, 9
    scheduler.leave(two)
    assert scheduler.next_victim(0) is two
    scheduler.hold(two)
    assert scheduler.next_victim(0) is one


@pytest.mark.parametrize(
    ("start", "num_tokens", "ids"),
    [
        (0, 4, (100, 101, 102, 103)),
        (0, 2, (100, 101)),
        (2, 3, (102, 103, 7)),
        (4, 1, (7,)),
        (5, 2, (8, 9)),
        (4, 2, (7, 8)),
        (1, 1, (101,)),
    ],
)
def test_known_tokens_are_those_of_prompt_and_output_in_a_row(
    start: int, num_tokens: int, ids: tuple[int, ...]
) -> None:
    """Exactly as many as are asked for, wherever the prompt ends."""
    each = sequence(1)
    each.output_ids += [7, 8, 9]
    assert each.known_ids(start, num_tokens) == ids


def frame(ids: list[int], timeout_ms: int = 1000) -> PromptFrame:
    """A prompt in one frame."""
    data = array("I", ids).tobytes()
    return PromptFrame(
        handoff_id="r1-0",
        index=0,
        num_frames=1,
        num_prompt_tokens=len(ids),
        prompt_hash=hashlib.sha256(data).hexdigest(),
        timeout_ms=timeout_ms,
        ids_b64=base64.b64encode(data).decode(),
    )


def test_token_ids_use_all_of_their_bits() -> None:
    """One above two billion is a large number, not a negative one; and it is refused as what it is."""
    buffer = PromptBuffer(max_tokens=8, vocab_size=1000)
    one = frame([1, 3_000_000_000])
    buffer.add(one, now=0.0)
    with pytest.raises(InvalidValueError) as caught:
        buffer.take("r1-0", one.prompt_hash)
    assert str(caught.value) == "prompt: 3000000000 is not allowed; the rule is: token ids below 1000"
    assert len(buffer) == 0


def test_a_prompt_that_waits_long_expires_to_the_millisecond() -> None:
    """Not a thousandth too early."""
    buffer = PromptBuffer(max_tokens=8, vocab_size=1000)
    buffer.add(frame([1], timeout_ms=1_000_000), now=0.0)
    buffer.expire(now=999.9)
    assert len(buffer) == 1
    buffer.expire(now=1000.0)
    assert len(buffer) == 0


def test_bytes_that_are_too_many_are_counted_with_those_that_came_before() -> None:
    """All frames of a prompt count together."""
    buffer = PromptBuffer(max_tokens=8, vocab_size=1000)
    whole = frame([1, 2])
    halves = [
        PromptFrame(
            handoff_id="r1-0",
            index=index,
            num_frames=2,
            num_prompt_tokens=2,
            prompt_hash=whole.prompt_hash,
            timeout_ms=1000,
            ids_b64=whole.ids_b64,
        )
        for index in range(2)
    ]
    buffer.add(halves[0], now=0.0)
    with pytest.raises(InvalidValueError) as caught:
        buffer.add(halves[1], now=0.0)
    assert str(caught.value).startswith("ids_b64: '16 bytes' is not allowed")


def test_a_prompt_of_one_token_shares_the_last_place_of_a_step() -> None:
    """Computed whole, beside three that decode in steps of four."""
    pool = BlockPool(num_blocks=8, num_slots=8, block_size=16)
    scheduler = Scheduler(pool, StepLimits(max_step_tokens=4, prefill_chunk_tokens=1, chunked=False))
    decoding = [sequence(seq) for seq in (1, 2, 3)]
    for each in decoding:
        each.num_computed, each.pending_token = 4, 9
    for each in (*decoding, sequence(4, 1)):
        scheduler.enqueue(each)
        admitted = scheduler.admit()
        assert admitted is not None
        scheduler.start(admitted)
    plan = scheduler.plan()
    assert plan is not None
    assert [(item.seq, item.num_tokens) for item in plan.items] == [(1, 1), (2, 1), (3, 1), (4, 1)]
