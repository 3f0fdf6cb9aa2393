"""Drafts behind worker services, on real ranks: they come along with the cache, or stay behind, and the tokens are the reference's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common.worker.settings import PulledRoles
from contracts.dataplane import Transport
from contracts.errors import ErrorCode
from contracts.manifest import Namespace, Role
from contracts.pull import Transfer
from contracts.requests import Refused
from tests.integration.pull_ranks import NUM_TOKENS, PROMPTS, RanksMesh, ranks_mesh

DEPTH = 3
GUESSING: dict[str, Any] = {"num_speculative_tokens": DEPTH}
DRAFT_ROLES = {Role.KEY, Role.VALUE, Role.BOOTSTRAP}


def num_guesses(world: RanksMesh, outcome: str) -> int:
    """How many tokens the decode worker has `drafted`, or has had right (`draft_accepted`), so far."""
    text = world.mesh.services["decode-0"].metrics.exposition().decode()
    return int(sum(map(float, re.findall(rf"worker_{outcome}_total{{.*}} (\S+)", text))))


async def answer(world: RanksMesh, handoff: str, number: int) -> None:
    """Have one prompt computed, moved, verified and decoded: the answer is the reference's."""
    prompt = PROMPTS[number]
    reserved, finished = await world.compute(handoff, prompt, verify=True)
    drafts = {each.role for each in finished.digests if each.namespace is Namespace.DRAFT}
    assert drafts == (DRAFT_ROLES if world.has_drafts else set())
    if reserved.pulled:
        assert (await world.pull(handoff, finished.source)).error is None
    await world.all_moved(handoff)
    assert await world.tokens(handoff, finished) == list(prompt.output_ids[:NUM_TOKENS])
    await world.release(handoff)


@pytest.mark.parametrize(
    "decode",
    [
        {"cut": (1, 1)},
        {"cut": (4, 2), "transfer": Transfer.PULL, "pull": PulledRoles.ALL},
        {"cut": (2, 1), "transfer": Transfer.PULL, "mtp_draft_body_tp1": True, "transport": Transport.TCP},
    ],
    ids=["push", "pull all", "pull states over tcp"],
)
async def test_drafts_come_along_and_are_verified(tmp_path: Path, decode: dict[str, Any]) -> None:
    """P2 to other cuts: every byte of the draft's cache is moved one way or the other, and digested; some guesses are right."""
    async with ranks_mesh(tmp_path, prefill=GUESSING, verify_cache=True, **GUESSING, **decode) as world:
        link = await world.mesh.link()
        assert link is not None
        assert (link.has_drafts, link.why_no_drafts) == (True, "")
        for number in (0, 2):
            await answer(world, f"r{number}-0", number)
        assert 0 < num_guesses(world, "draft_accepted") < num_guesses(world, "drafted")


@pytest.mark.parametrize(
    ("prefill", "decode", "text"),
    [
        ({}, GUESSING, "draft: none at the prefill worker, mtp:"),
        (
            GUESSING,
            {},
            "at the decode worker (rule same_draft: set num_speculative_tokens with drafter=mtp at the decode worker, too)",
        ),
        (GUESSING, {**GUESSING, "drafter": "ngram"}, "none at the decode worker"),
    ],
    ids=["none at prefill", "none at decode", "another at decode"],
)
async def test_where_drafts_differ_the_rest_is_handed_over(
    tmp_path: Path, prefill: dict[str, Any], decode: dict[str, Any], text: str
) -> None:
    """The pair is linked, says what stays behind and why, and the answer is the same; a draft head without its cache guesses nothing."""
    async with ranks_mesh(tmp_path, prefill=prefill, verify_cache=True, **decode) as world:
        link = await world.mesh.link()
        assert link is not None
        assert not link.has_drafts
        assert text in link.why_no_drafts
        await answer(world, "r0-0", 0)
        assert (num_guesses(world, "drafted") > 0) == (decode.get("drafter") == "ngram")


@pytest.mark.parametrize("fault", ["role=bootstrap", "namespace=draft,role=key,block=0"])
async def test_a_draft_that_arrives_as_zeros_is_refused(tmp_path: Path, fault: str) -> None:
    """It would have cost guesses alone: with verify_cache it is found before the first step, and named."""
    pulls: dict[str, Any] = {"transfer": Transfer.PULL, "pull": PulledRoles.ALL}
    async with ranks_mesh(
        tmp_path, prefill=GUESSING, failpoints=f"zero:{fault}", verify_cache=True, **GUESSING, **pulls
    ) as world:
        _, finished = await world.compute("r0-0", PROMPTS[0], verify=True)
        assert (await world.pull("r0-0", finished.source)).error is None
        refused = await world.mesh.commit(finished.first_token or 0, "r0-0", finished.digests, drafts=True)
        assert isinstance(refused, Refused)
        assert refused.error.code is ErrorCode.CACHE_CORRUPT
        assert "draft " in refused.error.message
        assert "target " not in refused.error.message
        await world.release("r0-0")
