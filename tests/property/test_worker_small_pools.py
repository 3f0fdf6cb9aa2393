"""Sequences that grow in small pools: whatever fits into an empty pool ends, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from common.worker.core.blocks import MemoryNeed
from common.worker.core.growth import Growth
from common.worker.core.scheduler import Scheduler
from common.worker.core.sequence import Sequence
from contracts.workers import WorkerRole
from tests.property.small_pools import Case, SmallPool, all_cases, larger_cases

ROLES = (WorkerRole.MIXED, WorkerRole.DECODE)
CASES = {role: (*all_cases(role), *larger_cases(role)) for role in ROLES}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: f"{role} {len(CASES[role])} cases")
def test_every_request_ends_and_the_pool_is_whole_again(role: WorkerRole) -> None:
    """No deadlock and no livelock, each token once and the right one, no memory shared or lost; with growth and without."""
    num_preemptions = 0
    for case in CASES[role]:
        pool = SmallPool(case)
        try:
            pool.run()
        except AssertionError as error:
            raise AssertionError(case) from error
        num_preemptions += pool.num_preemptions
        assert case.reserve_output_tokens or not pool.num_preemptions, "who has all of its memory never gives way"
    assert num_preemptions > 100, "the cases must be tight enough"


class OldestFirst(Scheduler):
    """A planted mistake: who has waited longest, and lost most, gives way."""

    def next_victim(self, num_coming_blocks: int) -> Sequence | None:
        """The oldest."""
        victim = super().next_victim(num_coming_blocks)
        return victim if victim is None or victim not in self.running else min(self.running, key=lambda each: each.seq)


class NobodyGivesWay(Scheduler):
    """A planted mistake: all wait for each other."""

    def next_victim(self, num_coming_blocks: int) -> Sequence | None:
        """Nobody."""
        del num_coming_blocks
        return None


class Impatient(Scheduler):
    """A planted mistake: what is on its way back does not count."""

    def next_victim(self, num_coming_blocks: int) -> Sequence | None:
        """Another one."""
        del num_coming_blocks
        return super().next_victim(0)


class BackAtOnce(Growth, frozen=True, kw_only=True):
    """A planted mistake: who was preempted comes back as soon as there is room for what it has."""

    def need(self, sequence: Sequence, block_tokens: int) -> MemoryNeed:
        """Nothing more."""
        need = super().need(sequence, block_tokens)
        if not sequence.num_preemptions:
            return need
        num_tokens = sequence.num_prompt_tokens + len(sequence.output_ids)
        return MemoryNeed(num_tokens=num_tokens, limit_tokens=need.limit_tokens)


@pytest.mark.parametrize(
    ("role", "plant", "problem"),
    [
        (WorkerRole.MIXED, lambda case: SmallPool(case, scheduler=OldestFirst), "the oldest gave way"),
        (WorkerRole.DECODE, lambda case: SmallPool(case, scheduler=OldestFirst), "the oldest gave way"),
        (WorkerRole.MIXED, lambda case: SmallPool(case, scheduler=NobodyGivesWay), "no end after"),
        (WorkerRole.DECODE, lambda case: SmallPool(case, scheduler=NobodyGivesWay), "no end after"),
        (WorkerRole.MIXED, lambda case: SmallPool(case, scheduler=Impatient), "on its way back"),
        (WorkerRole.MIXED, lambda case: SmallPool(case, growth=BackAtOnce), "it was let in for"),
    ],
    ids=["oldest-mixed", "oldest-decode", "nobody-mixed", "nobody-decode", "impatient", "back-at-once"],
)
def test_a_planted_mistake_is_seen(role: WorkerRole, plant: Callable[[Case], SmallPool], problem: str) -> None:
    """The same cases go red for each of them."""

    def run_all() -> None:
        for case in reversed(CASES[role]):
            plant(case).run()

    with pytest.raises(AssertionError, match=problem):
        run_all()


@pytest.mark.parametrize("role", ROLES)
def test_ranks_that_share_a_sequence_make_a_pool_larger_and_change_nothing_else(role: WorkerRole) -> None:
    """Blocks of one token on each of two ranks go as far as blocks of two tokens on one: the same course, preemptions included."""
    for case in tuple(larger_cases(role))[::5]:
        alone, shared = SmallPool(case), SmallPool(msgspec.structs.replace(case, block_size=1, dcp=2))
        alone.run()
        shared.run()
        assert shared.num_preemptions == alone.num_preemptions


@pytest.mark.parametrize("role", ROLES)
def test_guesses_never_leave_a_sequences_memory_and_lose_nothing(role: WorkerRole) -> None:
    """The same requests with up to three guesses a step: each ends with its tokens, and every guess has a place of its own."""
    num_drafts = num_preemptions = 0
    for case in CASES[role][::5]:
        pool = SmallPool(msgspec.structs.replace(case, depth=3))
        try:
            pool.run()
        except AssertionError as error:
            raise AssertionError(pool.case) from error
        num_drafts += pool.engine.num_drafts
        num_preemptions += pool.num_preemptions
    assert num_drafts > 1000
    assert num_preemptions > 20, "the cases must be tight enough"


class Boundless(Scheduler):
    """A planted mistake: guesses need no place."""

    def _num_places(self, sequence: Sequence) -> int:
        """As many as anybody could want."""
        return super()._num_places(sequence) + 3


def test_a_guess_without_a_place_is_seen() -> None:
    """The same cases go red when guesses are not counted."""

    def run_all() -> None:
        for case in reversed(CASES[WorkerRole.MIXED]):
            SmallPool(msgspec.structs.replace(case, depth=3), scheduler=Boundless).run()

    with pytest.raises(AssertionError):
        run_all()
