"""Looking up what stood before, on engines: the same tokens as without, and more of them a step where texts repeat themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from contracts.rank import DrafterKind, StepItem, StepPlan
from contracts.requests import SamplingParams
from tests.integration.byte_session import ByteSession
from tests.integration.cache_bytes import Memories
from tests.integration.engine_world import engine, starts, thread_launcher
from tests.integration.handoff_pairs import link, start_worker
from tests.integration.speculation_session import FOLDER, NUM_TOKENS, Run, generate, prompts

DEPTH = 4
REPEATED = tuple(range(300, 310)) * 12


async def decode(
    tmp_path: Path, depth: int, *, tp: int, temperature: float, texts: list[tuple[int, ...]], dcp: int = 1
) -> Run:
    """A run of an engine of its own."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=11, temperature=temperature, ignore_eos=True)
    messages = starts(
        FOLDER,
        tmp_path,
        tp,
        drafter=DrafterKind.NGRAM if depth else DrafterKind.NONE,
        num_speculative_tokens=depth,
        worker_id=f"w{depth}-{tp}",
        num_blocks=160,
        dcp=dcp,
    )
    async with asyncio.timeout(300), engine(messages, thread_launcher(tp)) as (group, _):
        return await generate(group, texts, depth, sampling)


@pytest.mark.parametrize(("temperature", "tp"), [(0.0, 2), (0.8, 1)])
async def test_looked_up_guesses_change_nothing_but_the_number_of_steps(
    tmp_path: Path, temperature: float, tp: int
) -> None:
    """Greedy and sampled, on one rank and on two: the tokens of depth 0."""
    texts = [*prompts(), REPEATED]
    plain = await decode(tmp_path, 0, tp=1, temperature=temperature, texts=texts)
    run = await decode(tmp_path, DEPTH, tp=tp, temperature=temperature, texts=texts)
    assert run.outputs == plain.outputs
    assert run.num_steps < plain.num_steps


async def test_ranks_that_share_a_sequence_look_up_the_same(tmp_path: Path) -> None:
    """Two and two of four ranks keep its blocks in turn, and all of them all of its tokens."""
    texts = [REPEATED]
    plain, run = [await decode(tmp_path, depth, tp=4, dcp=2, temperature=0.0, texts=texts) for depth in (0, DEPTH)]
    assert run.outputs == plain.outputs
    assert run.num_steps < plain.num_steps


async def test_texts_that_repeat_themselves_are_guessed_better(tmp_path: Path) -> None:
    """A list that is recited takes fewer steps than other texts of the same length."""
    others = await decode(tmp_path, DEPTH, tp=1, temperature=0.0, texts=[prompts()[3]])
    repeated = await decode(tmp_path, DEPTH, tp=1, temperature=0.0, texts=[REPEATED])
    assert repeated.num_steps < others.num_steps


async def test_a_rank_that_has_not_seen_the_prompt_looks_in_the_answer(tmp_path: Path) -> None:
    """Behind a handoff nothing can be guessed at first; then the answer repeats itself, and the tokens are those of depth 0."""
    (tmp_path / "s").mkdir()
    plain = await decode(tmp_path, 0, tp=1, temperature=0.0, texts=[REPEATED])
    memories = Memories()
    source = await start_worker("p", FOLDER, tmp_path / "s", 2, memories=memories)
    destination = await start_worker(
        "d", FOLDER, tmp_path / "s", 1, memories=memories, drafter=DrafterKind.NGRAM, num_speculative_tokens=DEPTH
    )
    try:
        await link(source, destination)
        session = ByteSession(
            source=source, destination=destination, memories=memories, num_decoded=NUM_TOKENS + DEPTH + 1
        )
        each = await session.reserve(REPEATED)
        await session.prefill(each)
        await session.arrived(each)
        assert each.first_token is not None
        tokens = [each.first_token]
        drafted: list[int] = []
        while len(tokens) < NUM_TOKENS:
            given = (each.first_token,) if len(tokens) == 1 else ()
            item = StepItem(
                seq=each.seq,
                start=len(REPEATED) + len(tokens) - 1,
                num_tokens=len(given) or 1 + DEPTH,
                token_ids=given,
                sample=True,
            )
            done = await destination.group.step(StepPlan(step=len(drafted) + 1, items=(item,)))
            tokens += [token.token_id for token in done.tokens]
            drafted.append(sum(done.num_drafts))
        await session.end()
    finally:
        await source.group.stop()
        await destination.group.stop()
    assert tokens[:NUM_TOKENS] == plain.outputs[0]
    assert drafted[0] == 0 < max(drafted)
    assert len(drafted) < NUM_TOKENS - 1
