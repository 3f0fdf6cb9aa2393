"""What lies in a decode worker's caches after a handoff, byte by byte and layer by layer, for prefill 1, 2, 4 x decode 1, 2."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from common.layout.bind import TokenChunk
from common.layout.part_copies import PartCopies
from contracts.manifest import Role
from tests.integration.byte_session import ByteSession, Travelling, layers_of, paged
from tests.integration.cache_bytes import Gathered, Memories, differing
from tests.integration.handoff_pairs import BLOCK_SIZE, CHUNK, Worker, link, start_worker
from tests.integration.reference_prompts import random_model

PREFILL, DECODE = (1, 2, 4), (1, 2)
PAIRS = [(prefill, decode) for prefill in PREFILL for decode in DECODE]
NUM_LAYERS = 8
NOISE = 1e-5
"""How far caches computed on several ranks may be from those of one, relative to the largest value: sums in another order."""

LONG, SHORT, LATER = (
    tuple(random.Random(length).randrange(3, 250) for _ in range(length)) for length in (300, 75, 140)
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, kw_only=True)
class World:
    """Linked workers of every size, their memory, and the caches of each prompt on a worker with one rank."""

    workers: dict[str, Worker]
    memories: Memories
    unsharded: dict[tuple[int, ...], Gathered]

    @asynccontextmanager
    async def session(self, prefill: int, decode: int) -> AsyncIterator[ByteSession]:
        """Handoffs between two sizes."""
        session = ByteSession(
            source=self.workers[f"p{prefill}"], destination=self.workers[f"d{decode}"], memories=self.memories
        )
        try:
            yield session
        finally:
            await session.end()

    def check(self, session: ByteSession, *wanted: Travelling, exact: bool = False) -> None:
        """The destination holds what the source computed, byte for byte, and that is what one rank alone computes.

        With `exact` it is that to the last bit: the source is one rank, and computed the same steps.
        """
        for each in wanted:
            received = session.received(each)
            assert differing(received, session.sent(each)) == []
            alone = self.unsharded[each.prompt]
            assert received.keys() == alone.keys()
            if exact:
                assert differing(received, alone) == []
            for key, data in received.items():
                ours, theirs = data.view(np.float32), alone[key].view(np.float32)
                error = float(np.abs(ours - theirs).max()) / float(np.abs(theirs).max())
                assert error <= NOISE, f"{key.name}: {error}"
        assert session.nothing_else_written()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """A random checkpoint of eight layers in fp32, a worker of each size and role, and all links."""
    torch.set_num_threads(1)
    folder, sockets = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("s")
    random_model(num_layers=NUM_LAYERS, spread=0.06).save_pretrained(folder)
    memories = Memories()
    workers: dict[str, Worker] = {}
    try:
        for name, tp in (*((f"p{tp}", tp) for tp in PREFILL), *((f"d{tp}", tp) for tp in DECODE), ("alone", 1)):
            workers[name] = await start_worker(name, folder, sockets, tp, memories=memories)
        for prefill, decode in PAIRS:
            await link(workers[f"p{prefill}"], workers[f"d{decode}"])
        await link(workers["alone"], workers["d1"])
        unsharded: dict[tuple[int, ...], Gathered] = {}
        for prompt in (LONG, SHORT, LATER):
            session = ByteSession(source=workers["alone"], destination=workers["d1"], memories=memories)
            one = await session.reserve(prompt)
            await session.prefill(one)
            await session.arrived(one)
            unsharded[prompt] = session.sent(one)
            await session.end()
        yield World(workers=workers, memories=memories, unsharded=unsharded)
    finally:
        for worker in workers.values():
            await worker.group.stop()


async def test_every_layer_and_role_is_looked_at(world: World) -> None:
    """Eight layers, each fourth with full attention; the long prompt has three chunks and ends inside a block."""
    linear, full = {0, 1, 2, 4, 5, 6}, {3, 7}
    for found in world.unsharded.values():
        assert layers_of(found) == {Role.KEY: full, Role.VALUE: full, Role.CONV: linear, Role.SSM: linear}
    assert len(LONG) > 2 * CHUNK
    assert len(LONG) % BLOCK_SIZE


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
async def test_two_prompts_of_one_batch_arrive_each_with_its_own_bytes(world: World, prefill: int, decode: int) -> None:
    """A prompt of three chunks shares its first step with a short one; after both have ended, each is whole."""
    async with world.session(prefill, decode) as session:
        one, other = await session.reserve(LONG), await session.reserve(SHORT)
        await session.prefill(one, other)
        await session.arrived(one, other)
        world.check(session, one, other)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
async def test_a_takeover_that_is_late_finds_its_bytes_although_others_have_been_pushed(
    world: World, prefill: int, decode: int
) -> None:
    """A has arrived and is not taken over yet, while B is computed and pushed through the same workers: A is still whole.

    Then A decodes while B's push goes on: B's bytes are its own, and the keys and values of A's prompt stay as they were. At last
    C is computed in the source's memory that was A's.
    """
    async with world.session(prefill, decode) as session:
        first = await session.reserve(SHORT)
        await session.prefill(first)
        await session.arrived(first)
        second = await session.reserve(LONG)
        await session.prefill_step(second)
        await session.prefill_step(second)
        world.check(session, first, exact=prefill == 1)
        prompt_of_first = paged(session.received(first))
        await session.decode(first, 2)
        await session.prefill(second)
        await session.arrived(second)
        world.check(session, second, exact=prefill == 1)
        assert differing(paged(session.received(first)), prompt_of_first) == []
        await session.forget_at_source(first)
        third = await session.reserve(LATER)
        assert third.here.slot == first.here.slot
        assert set(first.here.block_ids) <= set(third.here.block_ids)
        await session.prefill(third)
        await session.arrived(third)
        world.check(session, second, third, exact=prefill == 1)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("num_cached_tokens", [32, 74])
async def test_what_the_destination_has_already_is_not_written(
    world: World, prefill: int, decode: int, num_cached_tokens: int
) -> None:
    """Whole blocks, or all tokens but one, are there already: only what is behind them is pushed, and the states."""
    async with world.session(prefill, decode) as session:
        one = await session.reserve(SHORT, num_cached_tokens)
        await session.prefill(one)
        await session.arrived(one)
        assert differing(session.received(one), session.sent(one)) == []
        assert session.nothing_else_written()


def chunk_restarting_at_row_0(
    src_block_ids: Sequence[int], dst_block_ids: Sequence[int], start: int, end: int, block_size: int
) -> TokenChunk:
    """A fault: each chunk is written from the destination's first block on."""
    first = start // block_size
    shifted = (*dst_block_ids[:first], *dst_block_ids[: len(dst_block_ids) - first])
    return TokenChunk(src_block_ids, shifted, start, end, block_size)


async def test_a_second_chunk_that_restarts_at_row_0_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: every report is in order, and keys and values of both layers differ."""
    monkeypatch.setattr("common.engine.ranks.step_pushes.TokenChunk", chunk_restarting_at_row_0)
    async with world.session(2, 1) as session:
        one = await session.reserve(LONG)
        await session.prefill(one)
        await session.arrived(one)
        wrong = differing(session.received(one), session.sent(one))
        assert wrong == [f"target/{role}/{layer}/whole" for layer in (3, 7) for role in ("key", "value")]


async def test_a_second_request_in_the_first_ones_slot_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: states of the second sequence that land in the slot of the first spoil every linear layer of both."""
    slots: list[int] = []
    place_state = PartCopies.place_state

    def always_first(self: PartCopies, src_slot: int, dst_slot: int, **rows: int) -> Any:
        slots.append(dst_slot)
        return place_state(self, src_slot, slots[0], **rows)

    monkeypatch.setattr(PartCopies, "place_state", always_first)
    async with world.session(1, 2) as session:
        one, other = await session.reserve(SHORT), await session.reserve(LATER)
        await session.prefill(one)
        await session.arrived(one)
        assert differing(session.received(one), session.sent(one)) == []
        await session.prefill(other)
        await session.arrived(other)
        for each in (one, other):
            wrong = differing(session.received(each), session.sent(each))
            assert len(wrong) == 6 * 4
            assert not any("key" in name or "value" in name for name in wrong)
