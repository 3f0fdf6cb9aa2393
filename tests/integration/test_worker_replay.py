"""Tokens whose frames were lost can be had again from the worker: while it generates, and after it has released everything."""

from typing import Any

from contracts.errors import ErrorCode
from contracts.handoff import PrefillFinished
from contracts.requests import Accepted, FinishReason, Refused, ReplayAnswer, ReplayTokens, SamplingParams, TokenFrame
from contracts.subjects import WorkerVerb
from tests.integration.worker_world import EXPECTED, HANDOFF, Mesh, in_mesh, pair


async def replayed(mesh: Mesh, role: str, index: int, *, ended: bool = False) -> Any:
    """What a worker answers."""
    message = ReplayTokens(handoff_id=HANDOFF, index=index, ended=ended)
    return await mesh.ask(role, f"{role}-0", WorkerVerb.REPLAY, message, ReplayAnswer)


def code_of(answer: Any) -> ErrorCode | None:
    """Why it refused, if it did."""
    return answer.error.code if isinstance(answer, Refused) else None


def test_decode_tells_its_tokens_again_until_the_router_has_the_end() -> None:
    """Unknown, then without a token, then all tokens with their end, also after the release; at last forgotten, and empty."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        assert code_of(await replayed(mesh, "decode", 0)) is ErrorCode.UNKNOWN_HANDOFF
        await mesh.send_prompt("prefill", "prefill-0")
        reserved = await mesh.reserve()
        nothing = TokenFrame(handoff_id=HANDOFF, request_id="r1", attempt=0, index=0)
        assert await replayed(mesh, "decode", 0) == nothing
        assert await mesh.run(reserved) == Accepted(handoff_id=HANDOFF)
        assert isinstance(await mesh.heard.get(), PrefillFinished)
        await mesh.commit(EXPECTED[0])
        first = await replayed(mesh, "decode", 0)
        assert (first.token_ids[0], first.final) == (EXPECTED[0], False)
        assert code_of(await replayed(mesh, "decode", 99)) is ErrorCode.PROTOCOL
        await mesh.text()
        for role in ("prefill", "decode"):
            await mesh.release(role, f"{role}-0")
        rest = await replayed(mesh, "decode", 5)
        assert (list(rest.token_ids), rest.final, rest.num_tokens) == (EXPECTED[5:], True, 12)
        assert rest.finish_reason is FinishReason.LENGTH
        tokens = mesh.services["decode-0"].tokens
        assert tokens.num_kept == 1
        for _ in range(2):
            assert await replayed(mesh, "decode", 12, ended=True) == Accepted(handoff_id=HANDOFF)
        assert tokens.num_kept == 0
        assert code_of(await replayed(mesh, "decode", 0)) is ErrorCode.UNKNOWN_HANDOFF
        assert code_of(await replayed(mesh, "prefill", 0)) is ErrorCode.UNKNOWN_HANDOFF
        mesh.assert_empty()

    in_mesh(scenario)


def test_prefill_tells_the_one_token_of_an_answer_again() -> None:
    """What ends with its first token was told by prefill, and is known there after both workers were released."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.send_prompt("prefill", "prefill-0")
        reserved = await mesh.reserve()
        await mesh.run(reserved, sampling=SamplingParams(max_tokens=1, seed=9))
        await mesh.text()
        await mesh.release("prefill", "prefill-0")
        await mesh.release("decode", "decode-0")
        assert code_of(await replayed(mesh, "decode", 0)) is ErrorCode.UNKNOWN_HANDOFF
        answer = await replayed(mesh, "prefill", 0)
        assert (list(answer.token_ids), answer.final, answer.num_tokens) == (EXPECTED[:1], True, 1)

    in_mesh(scenario)


def test_what_no_router_asks_for_goes_at_the_deadline() -> None:
    """A router that dies costs memory until then, and not longer."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.send_prompt("prefill", "prefill-0")
        await mesh.run(await mesh.reserve())
        await mesh.heard.get()
        await mesh.commit(EXPECTED[0])
        await mesh.text()
        await mesh.release("prefill", "prefill-0")
        tokens = mesh.services["decode-0"].tokens
        await mesh.clock.sleep(50)
        kept_before = tokens.num_kept
        await mesh.clock.sleep(20)
        assert (kept_before, tokens.num_kept) == (1, 0)

    in_mesh(scenario)


def test_tokens_of_an_outage_come_in_order_afterwards() -> None:
    """The bus is gone while decode generates: it computes to the end, and then every token comes once, with the end."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.send_prompt("prefill", "prefill-0")
        await mesh.run(await mesh.reserve())
        await mesh.heard.get()
        await mesh.commit(EXPECTED[0])
        mesh.server.go_down()
        await mesh.clock.sleep(3)
        mesh.server.come_back()
        ids, final = await mesh.text()
        assert (ids, final.num_tokens) == (EXPECTED, 12)

    in_mesh(scenario)
