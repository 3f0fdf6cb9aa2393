"""A later attempt of a request: its prompt ends with tokens that the client has, and its stream goes on behind them."""

from __future__ import annotations

import pytest

from contracts.errors import ErrorCode
from contracts.handoff import PrefillFinished, RequestEnded, TakenOver
from contracts.requests import Accepted, FinishReason, Refused, ReplayAnswer, ReplayTokens, SamplingParams
from contracts.subjects import WorkerVerb
from services.mixed.service import MixedService
from tests.integration.worker_world import EXPECTED, PROMPT, Mesh, in_mesh, mixed_run, pair

AGAIN = "r1-1"
DELIVERED = 5
LEFT = SamplingParams(max_tokens=12 - DELIVERED, seed=9, temperature=0.0)


async def begin(mesh: Mesh, sampling: SamplingParams = LEFT) -> None:
    """Both workers of a pair have the later attempt."""
    mesh.prompts[AGAIN] = (*PROMPT, *EXPECTED[:DELIVERED])
    await pair(mesh)
    await mesh.send_prompt("prefill", "prefill-0", AGAIN)
    reserved = await mesh.reserve(sampling, AGAIN, num_delivered_tokens=DELIVERED, request_id="r1", attempt=1)
    answer = await mesh.run(reserved, sampling=sampling, num_delivered_tokens=DELIVERED, request_id="r1", attempt=1)
    assert answer == Accepted(handoff_id=AGAIN)


def test_decode_goes_on_behind_the_delivered_tokens() -> None:
    """Frames begin at their number, the end counts all; replays go back to it and no further."""

    async def scenario(mesh: Mesh) -> None:
        await begin(mesh)
        finished = await mesh.heard.get()
        assert isinstance(finished, PrefillFinished)
        assert finished.first_token == EXPECTED[DELIVERED]
        await mesh.commit(finished.first_token, AGAIN)
        ids, final = await mesh.text(DELIVERED)
        assert ids == EXPECTED[DELIVERED:]
        assert (final.num_tokens, final.finish_reason, final.attempt) == (12, FinishReason.LENGTH, 1)
        taken_over, ended = await mesh.heard.get(), await mesh.heard.get()
        assert isinstance(taken_over, TakenOver)
        assert isinstance(ended, RequestEnded)
        assert ended.num_tokens == 12
        asked = [ReplayTokens(handoff_id=AGAIN, index=index) for index in (DELIVERED, 9, DELIVERED - 1)]
        told = [await mesh.ask("decode", "decode-0", WorkerVerb.REPLAY, each, ReplayAnswer) for each in asked]
        assert [list(each.token_ids) for each in told[:2]] == [EXPECTED[DELIVERED:], EXPECTED[9:]]
        assert told[2].error.code is ErrorCode.PROTOCOL
        await mesh.release("prefill", "prefill-0", AGAIN)
        mesh.assert_empty()

    in_mesh(scenario)


def test_prefill_ends_a_later_attempt_with_its_one_token() -> None:
    """One token was left: prefill tells it, at its index, with the count of all."""

    async def scenario(mesh: Mesh) -> None:
        await begin(mesh, SamplingParams(max_tokens=1, seed=9, temperature=0.0))
        ids, final = await mesh.text(DELIVERED)
        assert (ids, final.num_tokens) == ([EXPECTED[DELIVERED]], DELIVERED + 1)
        for role in ("prefill", "decode"):
            await mesh.release(role, f"{role}-0", AGAIN)
        mesh.assert_empty()

    in_mesh(scenario)


@pytest.mark.parametrize("delivered", [DELIVERED, len(PROMPT) + DELIVERED + 1])
def test_a_mixed_worker_goes_on_too_and_refuses_more_than_the_prompt_has(delivered: int) -> None:
    """The same on a mixed worker; delivered tokens are the end of the prompt, so there cannot be more of them."""

    async def scenario(mesh: Mesh) -> None:
        mesh.prompts[AGAIN] = (*PROMPT, *EXPECTED[:DELIVERED])
        await mesh.add(MixedService, "mixed-0")
        await mesh.send_prompt("mixed", "mixed-0", AGAIN)
        message = mixed_run(
            handoff_id=AGAIN,
            request_id="r1",
            attempt=1,
            num_prompt_tokens=len(PROMPT) + DELIVERED,
            prompt_hash=mesh.hash_of(AGAIN),
            sampling=LEFT,
            num_delivered_tokens=delivered,
        )
        answer = await mesh.ask("mixed", "mixed-0", WorkerVerb.RUN, message)
        if delivered > DELIVERED:
            assert isinstance(answer, Refused)
            assert answer.error.code is ErrorCode.PROTOCOL
            assert answer.error.message.startswith(f"num_delivered_tokens: {delivered} is not allowed")
            return
        ids, final = await mesh.text(DELIVERED)
        assert (ids, final.num_tokens) == (EXPECTED[DELIVERED:], 12)
        ended = await mesh.heard.get()
        assert isinstance(ended, RequestEnded)
        assert ended.num_tokens == 12
        mesh.assert_empty()

    in_mesh(scenario)
