"""Real ranks whose decode worker pulls and verifies: what it has read wrong on one rank is answered by nobody, and that rank is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common.worker.settings import PulledRoles
from contracts.errors import ErrorCode
from contracts.handoff import PrefillFinished
from contracts.manifest import Role
from contracts.pull import Transfer
from contracts.requests import Refused
from services.prefill.service import PrefillService
from tests.integration.cache_bytes import Held, Memories, spoil
from tests.integration.pull_ranks import NUM_TOKENS, PROMPTS, RanksMesh, ranks_mesh

BLOCK = 3
BLOCK_SIZE = 16
LONG = next(prompt for prompt in PROMPTS if len(prompt.token_ids) > BLOCK * BLOCK_SIZE)
SHORT = next(prompt for prompt in PROMPTS if len(prompt.token_ids) <= BLOCK * BLOCK_SIZE)
SETTINGS: dict[str, Any] = {"transfer": Transfer.PULL, "verify_cache": True}


async def computed_and_pulled(world: RanksMesh, handoff: str, prompt: Any) -> PrefillFinished:
    """A prompt whose pull has ended well, as far as the pull can tell."""
    _, finished = await world.compute(handoff, prompt, verify=True)
    await pulled(world, handoff, finished)
    return finished


async def pulled(world: RanksMesh, handoff: str, finished: PrefillFinished) -> None:
    """Pull it, without an error."""
    assert (await world.pull(handoff, finished.source)).error is None
    await world.all_moved(handoff)


async def assert_corrupt(world: RanksMesh, handoff: str, finished: PrefillFinished, role: Role, rank: int) -> None:
    """The commit is refused, whenever it comes; `role` on `rank`, and nothing on another rank, is said to differ."""
    assert finished.first_token is not None
    for _ in range(2):
        refused = await world.mesh.commit(finished.first_token, handoff, finished.digests, drafts=world.has_drafts)
        assert isinstance(refused, Refused)
        assert (refused.error.code, refused.error.rule.retryable) == (ErrorCode.CACHE_CORRUPT, False)
        named = set(re.findall(r"(\w+) of layer \d+ on rank (\d+) is", refused.error.message))
        assert named == {(str(role), str(rank))}
    await world.release(handoff)
    assert world.mesh.frames.empty()


async def assert_good(world: RanksMesh, handoff: str, prompt: Any) -> None:
    """Another request of the same worker is pulled, verified, and has the reference's tokens."""
    finished = await computed_and_pulled(world, handoff, prompt)
    assert await world.tokens(handoff, finished) == list(prompt.output_ids[:NUM_TOKENS])
    await world.release(handoff)


def verdicts(world: RanksMesh) -> dict[str, float]:
    """How many caches were found to be what."""
    text = world.mesh.services["decode-0"].metrics.exposition().decode()
    found = re.findall(r'worker_cache_verifications_total\{outcome="(\w+)"\} (\S+)', text)
    return {outcome: float(value) for outcome, value in found}


@pytest.mark.parametrize(
    ("cut", "failpoint", "role", "rank"),
    [
        ((2, 1), "zero:role=value,layer=3,block={},destination=1", Role.VALUE, 1),
        ((4, 2), "zero:role=key,block={},destination=1", Role.KEY, 1),
        ((4, 2), "swap:role=key,block={},with=1,destination=3", Role.KEY, 3),
    ],
    ids=["d2", "d4-dcp2", "d4-dcp2-swapped"],
)
async def test_a_block_that_was_read_wrong_on_one_rank_fails_its_request_alone(
    tmp_path: Path, cut: tuple[int, int], failpoint: str, role: Role, rank: int
) -> None:
    """Its rank is named, the client has no token, memory comes back; a request without such a block is verified and answered."""
    async with ranks_mesh(
        tmp_path, cut=cut, failpoints=failpoint.format(BLOCK), pull=PulledRoles.ALL, **SETTINGS
    ) as world:
        wrong = await computed_and_pulled(world, "r0-0", LONG)
        await assert_corrupt(world, "r0-0", wrong, role, rank)
        await assert_good(world, "r1-0", SHORT)
        assert verdicts(world) == {"good": 1.0, "corrupt": 1.0, "unknown": 0.0}


@pytest.mark.parametrize("role", [Role.CONV, Role.SSM])
async def test_a_state_that_went_bad_at_one_source_rank_fails_its_request_alone(tmp_path: Path, role: Role) -> None:
    """States are read into a staging row and merged: what a source rank no longer holds as it was computed is found behind that, too."""
    memories = Memories()
    async with ranks_mesh(tmp_path, cut=(2, 1), memories=memories, pull=PulledRoles.STATES, **SETTINGS) as world:
        _, finished = await world.compute("r0-0", LONG, verify=True)
        source = finished.source
        assert source is not None
        prefill = world.mesh.services["prefill-0"]
        assert isinstance(prefill, PrefillService)
        held = Held(block_ids=source.block_ids, slot=source.slot, num_tokens=len(LONG.token_ids))
        manifest = prefill.replicas[0].info.ranks[1].manifest
        spoil(manifest, memories.of("prefill-0")[1], held, role)
        await pulled(world, "r0-0", finished)
        await assert_corrupt(world, "r0-0", finished, role, 1)
        await assert_good(world, "r1-0", LONG)
        assert verdicts(world) == {"good": 1.0, "corrupt": 1.0, "unknown": 0.0}
