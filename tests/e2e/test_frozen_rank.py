"""A prefill rank is frozen in the middle of a write, its request is given up, and decode's memory goes to another request.

The rank is stopped where it is most dangerous: the grant has been found valid, the bytes are not there yet. Whatever it does when it
is woken, the other request's cache holds the same bytes as without any of this, and its tokens are those of the reference.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import Final

import pytest

from tests.e2e.planted_mesh import PlantedMesh
from tests.e2e.stream import Stream
from tests.integration.cache_bytes import Gathered, differing
from tests.integration.stored_reference import load_reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

REFERENCE: Final = load_reference("tiny").prompts
B: Final = REFERENCE[-1]
C: Final = REFERENCE[0]
PROMPT_A: Final = tuple(60 + number % 900 for number in range(700))
TOKENS_A: Final = 1700
TOKENS_B: Final = 100
BLOCKS_A: Final = (len(PROMPT_A) + TOKENS_A) // 16
"""Of decode's 192: what is left does not hold B."""


@dataclass(frozen=True)
class Outcome:
    """B's tokens, and the bytes of its cache."""

    token_ids: list[int]
    cache: Gathered


async def _c_is_served(mesh: PlantedMesh) -> None:
    """A small request that fits beside the others: while a rank stands still it goes to the other ranks of the same worker."""
    stream = await mesh.complete(C.token_ids, len(C.output_ids))
    assert (stream.is_whole, stream.token_ids) == (True, list(C.output_ids))


async def _outcome(mesh: PlantedMesh, b: Stream) -> Outcome:
    """What has become of B, which has ended."""
    assert b.is_whole, b.error
    grant = await mesh.grant(b.request_id)
    # The last token is not computed any more: the cache ends before it.
    return Outcome(b.token_ids, await mesh.cache(grant, len(B.token_ids) + TOKENS_B - 1))


async def _undisturbed(mesh: PlantedMesh) -> Outcome:
    """What B is when nothing happens; its first tokens are the reference's."""
    outcome = await _outcome(mesh, await mesh.complete(B.token_ids, TOKENS_B))
    assert outcome.token_ids[: len(B.output_ids)] == list(B.output_ids)
    return outcome


async def _frozen(mesh: PlantedMesh, *, guarded: bool = True) -> int:
    """Send A, freeze the rank that writes first, and leave: A is over when this returns. The rank's process id."""
    seen = len(mesh.probe.events)
    if not guarded:
        mesh.order("unguarded")
    mesh.order("freeze")
    asking = asyncio.get_running_loop().create_task(Stream().read(mesh.probe, PROMPT_A, TOKENS_A))
    pid = await mesh.frozen()
    mesh.withdraw("unguarded")
    assert (await mesh.blocks())["held"] == BLOCKS_A
    await _c_is_served(mesh)
    asking.cancel()
    await asyncio.wait({asking})
    request_id = await mesh.submitted(len(PROMPT_A), seen)
    await mesh.probe.event(lambda each: each["request_id"] == request_id and each["event"] == "request_cancelled")
    return pid


async def _late_write(mesh: PlantedMesh, *, waits: bool, guarded: bool = True) -> Outcome:
    """Wake A's rank while B waits for A's memory (`waits`), or when B has it and generates; what has become of B."""
    pid = await _frozen(mesh, guarded=guarded)
    await mesh.blocks_become(held=0, quarantined=BLOCKS_A if waits else 0)
    seen, b = len(mesh.probe.events), Stream()
    async with asyncio.TaskGroup() as group:
        group.create_task(b.read(mesh.probe, B.token_ids, TOKENS_B))
        if waits:
            await mesh.submitted(len(B.token_ids), seen)
            assert (await mesh.blocks(), b.token_ids) == (
                {"free": 42, "kept": 0, "held": 0, "quarantined": BLOCKS_A},
                [],
            )
        else:
            await b.until(5)
        mesh.wake(pid)
    await mesh.prefill_answers()
    return await _outcome(mesh, b)


async def _wakes_up(mesh: PlantedMesh, transport: str) -> None:
    expected = await _undisturbed(mesh)
    outcome = await _late_write(mesh, waits=transport == "shm")
    assert outcome.token_ids == expected.token_ids
    assert differing(outcome.cache, expected.cache) == []
    assert differing((await _undisturbed(mesh)).cache, expected.cache) == []
    baseline = await mesh.probe.holdings()
    planted = await _late_write(mesh, waits=False, guarded=False)
    print(f"{transport}: without a guard {differing(planted.cache, expected.cache)} differ")
    assert differing(planted.cache, expected.cache) != []
    assert differing((await _undisturbed(mesh)).cache, expected.cache) == []
    await mesh.probe.assert_settles(baseline)


async def test_a_rank_that_wakes_up_changes_nothing(planted_shm: PlantedMesh) -> None:
    """A's blocks are quarantined until the rank has stopped writing, and B waits: it is right in every byte.

    Nothing is held afterwards that was not before. The check can fail: when nobody waits for writers, the same rank overwrites B's
    cache.
    """
    await _wakes_up(planted_shm, "shm")


@pytest.mark.long
async def test_a_rank_that_wakes_up_changes_nothing_over_tcp(planted_tcp: PlantedMesh) -> None:
    """B has A's blocks at once, and is right in every byte, too. The port's tests freeze writers over tcp without a mesh around them."""
    await _wakes_up(planted_tcp, "tcp")


async def test_a_frozen_rank_that_is_killed_gives_the_memory_back(planted_shm: PlantedMesh) -> None:
    """Quarantine ends with the death of the writer; its worker ends too, and when it is back the mesh serves as before."""
    mesh = planted_shm
    expected = await _undisturbed(mesh)
    baseline = await mesh.probe.holdings()
    pid = await _frozen(mesh)
    await mesh.blocks_become(held=0, quarantined=BLOCKS_A)
    num_links = len(mesh.probe.link_events)
    os.kill(pid, signal.SIGKILL)
    await mesh.blocks_become(held=0, quarantined=0)
    assert await mesh.services.ended("prefill") != 0
    await mesh.services.start("prefill")
    await mesh.probe.link_event("linked", "decode-0", num_links)
    await mesh.services.ready(mesh.probe.http)
    outcome = await _undisturbed(mesh)
    assert outcome.token_ids == expected.token_ids
    assert differing(outcome.cache, expected.cache) == []
    await mesh.probe.assert_settles(baseline)
