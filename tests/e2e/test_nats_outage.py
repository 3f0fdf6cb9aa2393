"""NATS stops for some seconds under many streams, frozen or restarted: whoever had begun gets the rest, once and whole."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from common.runtime.clock import SystemClock
from tests.e2e.planted_mesh import PlantedMesh
from tests.e2e.stream import Stream
from tests.integration.stored_reference import load_reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

OUTAGE_S: Final = 5.0
NUM_BEGUN, NUM_BEFORE = 4, 8
"""NATS goes when so many streams have so many of their 64 tokens."""
PROMPTS: Final = load_reference("tiny").prompts[:16]


async def _all_at_once(mesh: PlantedMesh, streams: list[Stream], interrupt: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for stream, prompt in zip(streams, PROMPTS, strict=True):
            group.create_task(stream.read(mesh.probe, prompt.token_ids, len(prompt.output_ids)))
        begun = [group.create_task(stream.until(NUM_BEFORE)) for stream in streams]
        for first in itertools.islice(asyncio.as_completed(begun), NUM_BEGUN):
            await first
        await interrupt()
        for task in begun:
            task.cancel()


@pytest.mark.parametrize("how", ["frozen", "restarted"])
async def test_streams_survive_an_outage_of_nats(planted_shm: PlantedMesh, how: str) -> None:
    """Sixteen streams, some of them in their middle, and NATS is away for five seconds.

    Each is whole and equal to the reference, or, if none of its tokens had come before, ends with a named error. Then the mesh is
    ready and serves, and holds what it held before.
    """
    mesh, server = planted_shm, planted_shm.services.server
    assert (await mesh.complete(PROMPTS[0].token_ids, 64)).is_whole
    baseline = await mesh.probe.holdings()
    streams = [Stream() for _ in PROMPTS]
    before: list[int] = []

    async def interrupt() -> None:
        await asyncio.to_thread(server.freeze if how == "frozen" else server.stop)
        before.extend(len(stream.token_ids) for stream in streams)
        await SystemClock().sleep(
            OUTAGE_S
        )  # what is tested takes this long: leases and silence have time to be noticed
        await asyncio.to_thread(server.thaw if how == "frozen" else server.start)

    await _all_at_once(mesh, streams, interrupt)
    ends = [(stream.is_whole, stream.error) for stream in streams]
    print(f"{how}: {before} tokens before; {ends}; replays so far {await mesh.replays()}")
    for stream, prompt, num_before in zip(streams, PROMPTS, before, strict=True):
        if stream.is_whole:
            assert stream.token_ids == list(prompt.output_ids)
        else:
            assert stream.error is not None
            assert (num_before, stream.token_ids) == (0, []), stream.error
    assert any(stream.is_whole for stream in streams)
    await mesh.services.ready(mesh.probe.http)
    after = await mesh.complete(PROMPTS[1].token_ids, 64)
    assert (after.is_whole, after.token_ids) == (True, list(PROMPTS[1].output_ids))
    await mesh.probe.assert_settles(baseline)
