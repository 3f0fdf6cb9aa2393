"""Ranks that share the blocks of a sequence: what arrives there, pushed and pulled, and the reference's tokens."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from common.engine.model.attention_metadata import AttentionGeometry, Ints
from common.engine.model.context_group import ContextGroup
from common.engine.port import EngineDeadError, EngineError
from common.worker.core.verification import differences
from contracts.manifest import PagedPlace, Role
from contracts.rank import PeerSide, StepItem, StepPlan
from tests.integration.cache_bytes import differing
from tests.integration.context_parallel_world import BATCH, BY_LENGTH, WIDE, Cut, World, decode_batch, generate
from tests.integration.engine_world import binding, engine, starts, thread_launcher
from tests.integration.handoff_pairs import hand_over
from tests.integration.make_reference import hash_weights
from tests.integration.reference_prompts import MIN_MARGIN, NUM_OUTPUT_TOKENS, wide_model
from tests.integration.stored_reference import StoredPrompt

DECODE: tuple[Cut, ...] = ((4, 1), (4, 2), (8, 2), (8, 4))
"""Two KV heads: 2 ranks of 4, or 4 of 8, hold the same one."""
PREFILL = (1, 2, 4)
PAIRS = [(prefill, decode) for prefill in PREFILL for decode in DECODE]
EDGES = [BY_LENGTH[length] for length in (1, 33, 65, 200)]
"""Less than a block, one token more than two ranks take in turn, one more than four do, and two chunks."""
FEW = [BY_LENGTH[length] for length in (15, 64, 129)]
NUM_FEW = 5

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """The wide checkpoint, of which the stored outputs are."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    model = wide_model()
    assert hash_weights(model) == WIDE.weights_sha256
    model.save_pretrained(folder)
    world = World(folder=folder, sockets=tmp_path_factory.mktemp("s"))
    try:
        yield world
    finally:
        await world.stop()


async def test_the_prompts_end_at_every_edge() -> None:
    """Around a block, and around what two and four ranks take in turn; no step of any prompt is close to call."""
    for span in (16, 32, 64, 128):
        assert {span - 1, span, span + 1} <= BY_LENGTH.keys()
    assert min(margin for prompt in WIDE.prompts for margin in prompt.margins) >= MIN_MARGIN


@pytest.mark.parametrize(("prefill", "decode"), [(1, (8, 4)), (4, (4, 2))])
async def test_what_is_pushed_arrives_to_the_byte_and_is_decoded_from(world: World, prefill: int, decode: Cut) -> None:
    """Each rank gets its own blocks alone; both sides' digests agree; a batch goes on with the reference's tokens."""
    async with world.push_session(prefill, decode) as session:
        batch = [await session.reserve(prompt.token_ids) for prompt in EDGES]
        await session.prefill(*batch)
        await session.arrived(*batch)
        assert [differing(session.received(each), session.sent(each)) for each in batch] == [[]] * len(batch)
        assert session.nothing_else_written()
        for each in batch:
            sent = await session.source.group.digest(each.seq, PeerSide.SOURCE, 0, len(each.prompt))
            held = await session.destination.group.digest(each.seq, PeerSide.DESTINATION, 0, len(each.prompt))
            assert sent == held
        outputs = await decode_batch(session.destination, batch, NUM_FEW)
    assert outputs == [prompt.output_ids[:NUM_FEW] for prompt in EDGES]


@pytest.mark.parametrize(("prefill", "decode"), [(2, (8, 2)), (1, (4, 2))])
async def test_what_is_pulled_arrives_to_the_byte_and_is_decoded_from(world: World, prefill: int, decode: Cut) -> None:
    """The same, read by the ranks themselves: a rank reads the blocks that it keeps."""
    async with world.pull_session(prefill, decode) as session:
        batch = [await session.reserve(prompt.token_ids) for prompt in FEW]
        await session.prefill(*batch)
        for each in batch:
            assert (await session.pull(each)).error is None
            assert differing(session.received(each), session.sent(each)) == []
        assert session.nothing_else_written()
        outputs = await decode_batch(session.destination, batch, NUM_FEW)
    assert outputs == [prompt.output_ids[:NUM_FEW] for prompt in FEW]


@pytest.mark.parametrize("num_cached_tokens", [16, 40])
async def test_what_the_ranks_have_already_is_not_pushed(world: World, num_cached_tokens: int) -> None:
    """A block, or two and a half: what lies behind is pushed to whoever keeps it, and nothing else."""
    async with world.push_session(1, (4, 2)) as session:
        one = await session.reserve(BY_LENGTH[97].token_ids, num_cached_tokens)
        await session.prefill(one)
        await session.arrived(one)
        assert differing(session.received(one), session.sent(one)) == []
        assert session.nothing_else_written()


@pytest.mark.parametrize("chunk", [128, 256])
async def test_ranks_that_prefill_and_decode_give_the_reference_tokens(world: World, chunk: int) -> None:
    """Prompts in chunks beside sequences that decode, which get their blocks one by one: attention across ranks at every length."""
    worker = await world.worker("m", 4, 2)
    prompts = [BY_LENGTH[length] for length in (31, 48, 300)]
    outputs = await generate(worker, prompts, NUM_FEW, chunk)
    assert outputs == [prompt.output_ids[:NUM_FEW] for prompt in prompts]


async def test_the_same_memory_holds_as_many_times_more_tokens(world: World) -> None:
    """What a rank sets aside does not depend on how many share a sequence; a sequence of n tokens takes 1/dcp of the blocks."""
    plain, shared = await world.worker("d", 4, 1), await world.worker("d", 4, 2)
    sizes = {rank.num_region_bytes for worker in (plain, shared) for rank in worker.info.ranks}
    assert len(sizes) == 1
    assert shared.block_tokens == 2 * plain.block_tokens
    at = [rank.manifest.coordinates for rank in shared.info.ranks]
    assert [(each.tp_rank, each.dcp_rank, each.dcp_size) for each in at] == [(rank, rank % 2, 2) for rank in range(4)]


async def test_a_flipped_bit_on_one_rank_is_named(world: World) -> None:
    """In the last block of a prompt, on the rank of each group that keeps it: one digest differs, that of its cache and rank."""
    async with world.push_session(1, (8, 4)) as session:
        one = await session.reserve(BY_LENGTH[33].token_ids)
        await session.prefill(one)
        await session.arrived(one)
        rank = 6  # the third of its group: block 2 of the sequence is its block 0
        manifest = session.destination.info.ranks[rank].manifest
        place = next(span.place for span in manifest.spans if span.key.role is Role.VALUE)
        assert isinstance(place, PagedPlace)
        data = np.frombuffer(world.memories.of(session.destination.name)[rank], np.uint8)
        data[place.offset + one.there.block_ids[0] * place.block_stride] ^= 1
        sent = await session.source.group.digest(one.seq, PeerSide.SOURCE, 0, 33)
        held = await session.destination.group.digest(one.seq, PeerSide.DESTINATION, 0, 33)
    (found,) = differences(sent, held)
    assert found.startswith("target value of layer 3 on rank 6 is ")


async def test_keys_that_a_rank_does_not_see_change_the_tokens(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: ranks that leave out the last key that they hold give other tokens."""
    lengths = AttentionGeometry.local_lengths

    def one_less(self: AttentionGeometry, whole: Ints) -> Ints:
        return np.maximum(lengths(self, whole) - 1, 0)

    worker = await world.worker("m", 4, 2)
    prompts = [BY_LENGTH[65]]
    monkeypatch.setattr(AttentionGeometry, "local_lengths", one_less)
    assert await generate(worker, prompts, NUM_FEW, 128) != [prompt.output_ids[:NUM_FEW] for prompt in prompts]


async def test_answers_for_other_heads_change_the_tokens(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: queries that are gathered in another order than they are answered give other tokens."""
    gather = ContextGroup.gather_queries
    monkeypatch.setattr(ContextGroup, "gather_queries", lambda self, query: gather(self, query).flip(1))
    worker = await world.worker("m", 4, 2)
    prompts = [BY_LENGTH[65]]
    assert await generate(worker, prompts, NUM_FEW, 128) != [prompt.output_ids[:NUM_FEW] for prompt in prompts]


async def test_a_failure_between_two_ranks_of_a_group_ends_the_engine(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that fails between question and answer: its partner, and the ranks of the other group, do not wait for it."""
    merge = ContextGroup.merge_own

    def faulty(self: ContextGroup, partial: Any) -> Any:
        if threading.current_thread().name == "rank-1":
            raise RuntimeError("planted")
        return merge(self, partial)

    monkeypatch.setattr(ContextGroup, "merge_own", faulty)
    async with engine(starts(world.folder, tmp_path, 4, dcp=2), thread_launcher(4)) as (group, _):
        await group.bind(binding(0, 2))
        item = StepItem(seq=0, start=0, num_tokens=2, token_ids=(5, 6), sample=True)
        with pytest.raises(EngineDeadError, match="planted"):
            await group.step(StepPlan(step=0, items=(item,)))


async def test_illegal_groups_and_foreign_blocks_are_refused(world: World, tmp_path: Path) -> None:
    """The ranks of a group hold the same KV head; block ids are those of one rank; digests end with the blocks of all."""
    for tp, dcp in ((2, 2), (4, 4), (8, 3)):
        with pytest.raises(EngineError, match=f"dcp: {dcp} is not allowed"):
            async with engine(starts(world.folder, tmp_path, tp, dcp=dcp), thread_launcher(tp)):
                pass
    worker = await world.worker("m", 4, 2)
    await worker.group.bind(binding(0, 5, block_ids=(0, 1), generation=worker.next_generation()))
    with pytest.raises(EngineError, match="within the sequence's blocks"):
        await worker.group.digest(0, PeerSide.DESTINATION, 0, 65)
    assert await worker.group.digest(0, PeerSide.DESTINATION, 0, 64)
    with pytest.raises(EngineError, match="blocks of a sequence: 2 is not allowed; the rule is: 3 or more"):
        await worker.run([StepItem(seq=0, start=64, num_tokens=1, token_ids=(5,))])
    with pytest.raises(EngineError, match="different ids from 0 to 1023"):
        await worker.group.bind(binding(1, 5, block_ids=(1024,)))
    assert await worker.group.release((0,), worker.next_generation(), 5000) == frozenset()


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
async def test_every_pair_gives_the_reference_tokens_when_pushed(world: World, prefill: int, decode: Cut) -> None:
    """64 tokens of each prompt, without exception."""
    source, destination = await world.pair("push", prefill, decode)
    for batch in _batches(BATCH):
        outputs = await hand_over(source, destination, [prompt.token_ids for prompt in batch], NUM_OUTPUT_TOKENS)
        assert outputs == [prompt.output_ids for prompt in batch]


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
async def test_every_pair_gives_the_reference_tokens_when_pulled(world: World, prefill: int, decode: Cut) -> None:
    """64 tokens of each prompt, in batches of as many as have staging rows."""
    for prompts in _batches(BATCH):
        async with world.pull_session(prefill, decode, NUM_OUTPUT_TOKENS) as session:
            batch = [await session.reserve(prompt.token_ids) for prompt in prompts]
            for each in batch:  # by itself: some chunks of three prompts are more than a step holds
                await session.prefill(each)
                assert (await session.pull(each)).error is None
            outputs = await decode_batch(session.destination, batch, NUM_OUTPUT_TOKENS)
        assert outputs == [prompt.output_ids for prompt in prompts]


@pytest.mark.long
@pytest.mark.parametrize("chunk", [128, 256])
@pytest.mark.parametrize("cut", DECODE)
async def test_every_cut_gives_the_reference_tokens_by_itself(world: World, cut: Cut, chunk: int) -> None:
    """64 tokens of each prompt, prefilled in chunks and decoded by the same ranks."""
    worker = await world.worker("m", *cut)
    for batch in _batches(BATCH):
        outputs = await generate(worker, batch, NUM_OUTPUT_TOKENS, chunk)
        assert outputs == [prompt.output_ids for prompt in batch]


def _batches(size: int) -> Sequence[Sequence[StoredPrompt]]:
    prompts = WIDE.prompts
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]
