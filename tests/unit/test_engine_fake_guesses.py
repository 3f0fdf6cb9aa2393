"""The fake engine guesses too: made up like its tokens, so that whoever continues a sequence finds the same ones right."""

from __future__ import annotations

import asyncio

import pytest

from common.engine.fake.engine import FakeEngine
from common.engine.fake.tokens import fake_accepted, fake_token
from common.engine.port import EngineError, StepResult
from common.runtime.clock import SystemClock
from contracts.handoff import Grant
from contracts.manifest import Namespace, Role
from contracts.rank import BindSequence, DrafterKind, PartPushed, PushTarget, StepItem, StepPlan
from contracts.requests import SamplingParams, WorkerRef
from contracts.workers import WorkerDescription

SEED = 11


def engine(name: str = "w", *, depth: int = 3) -> FakeEngine:
    """An engine that keeps a draft head's cache, and guesses so many tokens."""
    return FakeEngine(
        SystemClock(),
        worker_id=name,
        incarnation="i1",
        block_size=4,
        drafter=DrafterKind.MTP,
        num_speculative_tokens=depth,
    )


async def bind(fake: FakeEngine, num_prompt_tokens: int, push: PushTarget | None = None) -> None:
    """Sequence 1 with memory for everything."""
    sampling = SamplingParams(max_tokens=16, seed=SEED)
    await fake.bind(
        BindSequence(
            seq=1,
            handoff_id="r1-0",
            generation=1,
            block_ids=tuple(range(16)),
            slot=0,
            num_prompt_tokens=num_prompt_tokens,
            sampling=sampling,
            push=push,
        )
    )


def step(fake: FakeEngine, item: StepItem) -> StepResult:
    """One item alone."""

    async def run() -> StepResult:
        await bind(fake, 5)
        return await fake.step(StepPlan(step=1, items=(item,)))

    return asyncio.run(run())


@pytest.mark.parametrize("given", [(), (7,)])
def test_a_step_gives_a_token_and_one_more_for_each_guess_that_is_right(given: tuple[int, ...]) -> None:
    """Behind a token of its own as behind one that was handed over; the tokens are those of an engine that guesses nothing."""
    item = StepItem(seq=1, start=5, num_tokens=4, token_ids=given, sample=True, bootstrap=bool(given))
    result = step(engine(), item)
    count = 1 + fake_accepted(SEED, 6, 3)
    assert [(token.position, token.token_id) for token in result.tokens] == [
        (6 + at, fake_token(SEED, 6 + at)) for at in range(count)
    ]
    assert result.num_drafts == (3,)


def test_all_numbers_of_right_guesses_occur() -> None:
    """From none to all of them."""
    assert {fake_accepted(SEED, position, 3) for position in range(64)} == {0, 1, 2, 3}


def test_what_is_planned_is_no_guess_and_too_many_are_refused() -> None:
    """A chunk of a prompt gives one token; a rank has rows of states for its depth, and no more."""
    result = step(engine(), StepItem(seq=1, start=0, num_tokens=5, token_ids=(1, 2, 3, 4, 5), sample=True))
    assert [token.position for token in result.tokens] == [5]
    assert result.num_drafts == ()
    with pytest.raises(EngineError, match="num_tokens: 5 is not allowed; the rule is: 1 to 4"):
        step(engine(), StepItem(seq=1, start=5, num_tokens=5, sample=True))


@pytest.mark.parametrize(("num_tokens", "owed"), [(1, None), (2, (1, 2)), (5, (1, 5))])
def test_a_prompts_draft_cache_begins_with_its_second_token(num_tokens: int, owed: tuple[int, int] | None) -> None:
    """One token has no pair: only what the head goes on from is pushed then."""

    async def run() -> list[PartPushed]:
        ours, theirs = engine("p", depth=0), engine("d")
        ranks = [
            WorkerDescription(worker_id="d", incarnation="i1", num_ranks=1, manifest=rank.manifest, region=None)
            for rank in (await theirs.start()).ranks
        ]
        await ours.link(WorkerRef(worker_id="d", incarnation="i1"), tuple(ranks))
        grant = Grant(worker_id="d", incarnation="i1", generation=9, block_ids=(0, 1), slot=0)
        await bind(ours, num_tokens, PushTarget(grant=grant, num_cached_tokens=0))
        item = StepItem(
            seq=1, start=0, num_tokens=num_tokens, token_ids=(1,) * num_tokens, sample=True, last_chunk=True
        )
        await ours.step(StepPlan(step=1, items=(item,)))
        found = []
        while not ours._pushes.empty():
            found.append(await ours.next_push())
        return [push for push in found if push.namespace is Namespace.DRAFT]

    pushed = {push.role: (push.start, push.end) for push in asyncio.run(run())}
    paged = {} if owed is None else {Role.KEY: owed, Role.VALUE: owed}
    assert pushed == {Role.BOOTSTRAP: (0, 1), **paged}
