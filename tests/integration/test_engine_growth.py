"""Bound sequences that get more blocks on real ranks: what they may be given, and that they compute the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from common.engine.port import EngineError
from common.engine.ranks.group import RankGroup
from contracts.rank import DrafterKind, ExtendSequences, Extension, StepItem, StepPlan
from tests.integration.engine_world import binding, engine, starts, thread_launcher
from tests.integration.stored_reference import load_reference

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "tiny"
PROMPT = load_reference("tiny").prompts[14]
"""65 tokens: four blocks, and the first token of a fifth."""
TP = 2

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RankGroup]:
    """An engine of two ranks."""
    messages = starts(SHIPPED, tmp_path_factory.mktemp("s"), TP)
    async with engine(messages, thread_launcher(TP)) as (group, _):
        yield group


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guessing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RankGroup]:
    """One that guesses with the draft head, on one rank."""
    messages = starts(
        SHIPPED, tmp_path_factory.mktemp("s"), 1, worker_id="w2", drafter=DrafterKind.MTP, num_speculative_tokens=3
    )
    async with engine(messages, thread_launcher(1)) as (group, _):
        yield group


async def decode(group: RankGroup, seq: int, start: int, count: int) -> list[int]:
    """Decode some tokens, each sampled from the one before."""
    tokens = []
    for position in range(start, start + count):
        item = StepItem(seq=seq, start=position, num_tokens=1, sample=True)
        tokens += [token.token_id for token in (await group.step(StepPlan(step=position, items=(item,)))).tokens]
    return tokens


async def test_a_sequence_that_grows_computes_what_one_does_that_had_everything(ranks: RankGroup) -> None:
    """Without more blocks a step is refused on all ranks alike; with them it goes on where it was."""
    length = len(PROMPT.token_ids)
    await ranks.bind(binding(0, length, block_ids=(90, 7, 41, 12, 60)))
    first = StepItem(seq=0, start=0, num_tokens=length, token_ids=PROMPT.token_ids, sample=True, last_chunk=True)
    result = await ranks.step(StepPlan(step=0, items=(first,)))
    tokens = [token.token_id for token in result.tokens] + await decode(ranks, 0, length, 15)
    with pytest.raises(EngineError, match="blocks of a sequence"):
        await decode(ranks, 0, 80, 1)
    await ranks.extend(ExtendSequences(generation=10, extensions=(Extension(seq=0, block_ids=(3, 99)),)))
    tokens += await decode(ranks, 0, 80, 32)
    assert tokens == list(PROMPT.output_ids[: len(tokens)])
    with pytest.raises(EngineError, match="blocks of a sequence"):
        await decode(ranks, 0, 112, 1)
    assert await ranks.release((0,), 11, 100) == frozenset()


async def test_a_guessing_sequence_may_fill_its_memory_before_it_grows(guessing: RankGroup) -> None:
    """The last place holds a token; the draft's pair behind it, whose place is in the next block, waits, and guesses go on after that."""
    length = len(PROMPT.token_ids)
    await guessing.bind(binding(0, length, block_ids=(90, 7, 41, 12, 60)))
    first = StepItem(seq=0, start=0, num_tokens=length, token_ids=PROMPT.token_ids, sample=True, last_chunk=True)
    result = await guessing.step(StepPlan(step=0, items=(first,)))
    tokens = [token.token_id for token in result.tokens] + await decode(guessing, 0, length, 15)
    await guessing.extend(ExtendSequences(generation=10, extensions=(Extension(seq=0, block_ids=(3, 99)),)))
    lengths = []
    while len(tokens) < 40:
        item = StepItem(seq=0, start=length + len(tokens) - 1, num_tokens=4, sample=True)
        found = (await guessing.step(StepPlan(step=0, items=(item,)))).tokens
        tokens += [token.token_id for token in found]
        lengths.append(len(found))
    assert tokens == list(PROMPT.output_ids[: len(tokens)])
    assert lengths[0] == 1
    assert sum(lengths) > 2 * len(lengths)


async def test_a_wrong_growth_is_refused_and_gives_nobody_anything(ranks: RankGroup) -> None:
    """All ranks give the same verdict; the blocks that were right in it can be given to somebody afterwards."""
    for seq, block in ((1, 28), (2, 29), (3, 61)):
        await ranks.bind(binding(seq, 4, block_ids=(block,), generation=12 + seq))
    await ranks.release((3,), 16, 100)
    for generation, extensions, problem in (
        (20, ((1, (50,)), (9, (51,))), "seq: 9"),
        (20, ((1, (50,)), (2, (28,))), "none held by sequence 1"),
        (20, ((1, (50,)), (2, (50,))), "each block once"),
        (20, ((1, (128,)),), "0 to 127"),
        (15, ((1, (50, 61)),), "generations only rise"),
    ):
        asked = tuple(Extension(seq=seq, block_ids=blocks) for seq, blocks in extensions)
        with pytest.raises(EngineError, match=problem):
            await ranks.extend(ExtendSequences(generation=generation, extensions=asked))
    await ranks.extend(ExtendSequences(generation=30, extensions=(Extension(seq=2, block_ids=(50, 51, 61)),)))
    assert await ranks.release((1, 2), 31, 100) == frozenset()
