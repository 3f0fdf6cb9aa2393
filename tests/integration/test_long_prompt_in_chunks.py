"""A prompt of several chunks on several ranks: what has been pushed of one chunk is not forgotten with the next."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio
import torch

from common.engine.ranks.group import RankGroup
from contracts.rank import StepPlan
from tests.integration.byte_session import ByteSession
from tests.integration.cache_bytes import Memories, differing
from tests.integration.handoff_pairs import Worker, link, start_worker
from tests.integration.reference_prompts import random_model

CHUNK = 256
PROMPT = tuple(random.Random(17).randrange(3, 250) for _ in range(1_700))
NUM_CHUNKS = 7

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, kw_only=True)
class World:
    """A prefill worker of two ranks, linked to a decode worker of one."""

    source: Worker
    destination: Worker
    memories: Memories


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Thread ranks of a random checkpoint."""
    torch.set_num_threads(1)
    folder, sockets = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("s")
    random_model().save_pretrained(folder)
    memories = Memories()
    workers: list[Worker] = []
    try:
        for name, tp in (("p2", 2), ("d1", 1)):
            workers.append(await start_worker(name, folder, sockets, tp, memories=memories))
        source, destination = workers
        await link(source, destination)
        yield World(source=source, destination=destination, memories=memories)
    finally:
        for worker in workers:
            await worker.group.stop()


async def test_1700_tokens_in_chunks_of_256_arrive_whole(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks prefill in seven steps: each token of each part is reported once, and every byte is there."""
    steps: list[StepPlan] = []
    step = RankGroup.step

    async def counted(self: RankGroup, plan: StepPlan) -> object:
        steps.append(plan)
        return await step(self, plan)

    monkeypatch.setattr(RankGroup, "step", counted)
    session = ByteSession(source=world.source, destination=world.destination, memories=world.memories, chunk=CHUNK)
    one = await session.reserve(PROMPT)
    await session.prefill(one)
    await session.arrived(one)
    assert [item.num_tokens for plan in steps for item in plan.items] == [CHUNK] * (NUM_CHUNKS - 1) + [164]
    assert differing(session.received(one), session.sent(one)) == []
    assert session.nothing_else_written()
    await session.end()


async def test_a_chunk_that_is_missing_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: tokens that were said to be there, and were never sent, are still poison."""
    session = ByteSession(source=world.source, destination=world.destination, memories=world.memories, chunk=CHUNK)
    one = await session.reserve(PROMPT, CHUNK)
    await session.prefill(one)
    await session.arrived(one)
    whole = replace(one, here=replace(one.here, start=0), there=replace(one.there, start=0))
    wrong = differing(session.received(whole), session.sent(whole))
    assert wrong == [f"target/{role}/3/whole" for role in ("key", "value")]
    await session.end()
