"""Frames that are lost on their way are asked for: the answer is whole, and what cannot be had any more ends it by name."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.bus.memory import MemoryServer
from common.bus.storage import WORKERS_CONFIG
from common.runtime.clock import SystemClock
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.requests import Accepted, FinishReason, Refused, ReplayTokens, SubmitRequest, TokenFrame
from services.router import replaying
from services.router.core import patience
from tests.integration.router_world import ANSWER, PATIENCE_S, Mesh, World, linked_pair, record, router_world, silence

PLAIN = {"model": "tiny", "prompt": "hello"}


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask soon: these tests are about what is asked, and not about when."""
    monkeypatch.setattr(patience, "SILENCE_S", 0.01)
    monkeypatch.setattr(patience, "GAP_S", 0.01)


def frame(mesh: Mesh, submit: SubmitRequest, index: int, end: int | None = None, **fields: Any) -> TokenFrame:
    """Tokens of the mesh's answer."""
    return TokenFrame(
        handoff_id=submit.handoff_id,
        request_id=submit.request_id,
        attempt=submit.attempt,
        index=index,
        token_ids=tuple(mesh.answer[index:end]),
        **fields,
    )


def last_frame(mesh: Mesh, submit: SubmitRequest, index: int) -> TokenFrame:
    """The rest of the answer with its end."""
    return frame(mesh, submit, index, final=True, num_tokens=len(mesh.answer), finish_reason=FinishReason.STOP)


def asked(mesh: Mesh) -> Sequence[tuple[str, ReplayTokens]]:
    """Who was asked for what, so far; whoever was only told that the end is known is left out."""
    found = [(subject.split(".", 3)[-1], decode(data, ReplayTokens)) for subject, data in mesh.replays]
    return [(subject, message) for subject, message in found if not message.ended]


async def served(world: World, *, stream: bool) -> str:
    """The text of one request."""
    if not stream:
        status, answer, _ = await world.post("/v1/completions", PLAIN)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])
    *chunks, last = await world.events("/v1/completions", PLAIN)
    assert last == "[DONE]"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_frame_is_asked_for(tmp_path: Path, stream: bool) -> None:
    """The second token is lost, the end is not: decode is asked from the second token on, and the text is whole."""

    async def lose_one(mesh: Mesh, submit: SubmitRequest) -> None:
        mesh.replay = lambda _, message: last_frame(mesh, submit, message.index)
        await mesh.send(submit, 0, mesh.answer[:1])
        await mesh.send(
            submit, 2, mesh.answer[2:], final=True, num_tokens=len(mesh.answer), finish_reason=FinishReason.STOP
        )

    async with router_world(tmp_path) as world:
        world.mesh.scripts = [lose_one]
        assert await served(world, stream=stream) == ANSWER
        assert [(subject, message.index) for subject, message in asked(world.mesh)] == [("decode.decode-0.replay", 1)]


async def test_a_lost_end_is_asked_for_in_pieces(tmp_path: Path) -> None:
    """Everything behind the first token is lost: silence is asked about until the end is there, however small the answers."""

    async def lose_the_rest(mesh: Mesh, submit: SubmitRequest) -> None:
        def replay(_: str, message: ReplayTokens) -> TokenFrame:
            if message.index + 1 < len(mesh.answer):
                return frame(mesh, submit, message.index, message.index + 1)
            return last_frame(mesh, submit, message.index)

        mesh.replay = replay
        await mesh.send(submit, 0, mesh.answer[:1])

    async with router_world(tmp_path) as world:
        world.mesh.scripts = [lose_the_rest]
        assert await served(world, stream=True) == ANSWER
        await world.mesh.until(lambda: len(_ended(world.mesh)) == 2)
        assert _ended(world.mesh) == ["decode.decode-0.replay", "prefill.prefill-0.replay"]


def _ended(mesh: Mesh) -> list[str]:
    return sorted(subject.split(".", 3)[-1] for subject, data in mesh.replays if decode(data, ReplayTokens).ended)


async def test_an_end_that_came_from_prefill_is_found_there(tmp_path: Path) -> None:
    """Decode was released and knows nothing, prefill has the one token of the answer."""

    async def lose_all(mesh: Mesh, submit: SubmitRequest) -> None:
        def replay(role: str, _: ReplayTokens) -> TokenFrame | Refused:
            return last_frame(mesh, submit, 0) if role == "prefill" else _unknown(submit)

        mesh.replay = replay

    async with router_world(tmp_path) as world:
        world.mesh.scripts = [lose_all]
        assert await served(world, stream=False) == ANSWER


async def test_an_error_that_only_the_broker_knows_is_found_there(tmp_path: Path) -> None:
    """The broker's last word was lost: its error is the answer."""

    async def lose_an_error(mesh: Mesh, submit: SubmitRequest) -> None:
        error = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message="no bytes came")
        end = TokenFrame(
            handoff_id=submit.handoff_id,
            request_id=submit.request_id,
            attempt=submit.attempt,
            index=0,
            final=True,
            error=error,
        )
        mesh.replay = lambda role, _: end if role == "broker" else _unknown(submit)

    async with router_world(tmp_path, max_attempts=1) as world:
        world.mesh.scripts = [lose_an_error]
        status, answer, _ = await world.post("/v1/completions", PLAIN)
        assert (status, answer["error"]["message"]) == (503, "no bytes came")


@pytest.mark.parametrize("broker_knows_the_end", [False, True])
async def test_what_nobody_knows_any_more_ends_the_request_by_name(tmp_path: Path, broker_knows_the_end: bool) -> None:
    """No worker has the tokens: the stream ends with an error at once, and not at its deadline, also when it had ended well."""

    async def lose_for_good(mesh: Mesh, submit: SubmitRequest) -> None:
        end = frame(mesh, submit, 99, final=True, num_tokens=len(mesh.answer), finish_reason=FinishReason.STOP)
        mesh.replay = lambda role, _: end if role == "broker" and broker_knows_the_end else _unknown(submit)
        await mesh.send(submit, 0, mesh.answer[:1])

    async with router_world(tmp_path) as world:
        world.mesh.scripts = [lose_for_good]
        *chunks, last = await world.events("/v1/completions", PLAIN | {"redispatch": False})
        assert (chunks[-1]["error"]["code"], last) == ("worker_lost", "[DONE]")


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("broker_remembers", [False, True])
async def test_what_went_with_its_worker_ends_the_request_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool, broker_remembers: bool
) -> None:
    """Decode told its last tokens, which were lost, and is gone, or another start has its name: nobody waits for the deadline."""
    monkeypatch.setattr(replaying, "ASK_S", 0.02)
    registered = linked_pair()

    async def lose_the_worker(mesh: Mesh, submit: SubmitRequest) -> None:
        end = frame(mesh, submit, 99, final=True, num_tokens=len(mesh.answer), finish_reason=FinishReason.STOP)
        known = {"broker": end if broker_remembers else _unknown(submit), "prefill": _unknown(submit)}
        mesh.replay = lambda role, _: known.get(role)
        await mesh.send(submit, 0, mesh.answer[:1])
        await mesh.until(lambda: len(asked(mesh)) >= 6)  # it is still there, and nobody is judged
        workers = await mesh.bus.ensure_bucket(WORKERS_CONFIG)
        if is_replaced:
            registered[1] = record("decode-0", incarnation="another")
            await workers.put("decode-0", encode(registered[1]))
        else:
            del registered[1]
            await workers.delete("decode-0")

    async with router_world(tmp_path, records=registered) as world:
        world.mesh.scripts = [lose_the_worker]
        async with asyncio.timeout(PATIENCE_S):
            *chunks, last = await world.events("/v1/completions", PLAIN | {"redispatch": False})
        assert (chunks[-1]["error"]["code"], last) == ("worker_lost", "[DONE]")


async def test_a_request_that_takes_its_time_is_left_alone(tmp_path: Path) -> None:
    """While the broker says that it is under way, unanswered questions and empty answers end nothing."""
    enough = 4

    async def take_time(mesh: Mesh, submit: SubmitRequest) -> None:
        def replay(role: str, _: ReplayTokens) -> TokenFrame | Accepted | Refused | None:
            match len(mesh.replays):
                case 1:
                    return None
                case 2:
                    return frame(mesh, submit, len(mesh.answer))
                case _:
                    return Accepted(handoff_id=submit.handoff_id) if role == "broker" else _unknown(submit)

        mesh.replay = replay
        await mesh.until(lambda: len(mesh.replays) >= enough)
        whole = encode(last_frame(mesh, submit, 0))
        await mesh.bus.publish(subjects.tokens(submit.router_id, submit.request_id), whole)

    async with router_world(tmp_path) as world:
        world.mesh.scripts = [take_time]
        assert await served(world, stream=False) == ANSWER


async def test_after_an_outage_every_request_asks_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the connection is reason enough: nobody waits for silence to be noticed."""
    monkeypatch.setattr(patience, "SILENCE_S", 1e6)
    monkeypatch.setattr(patience, "LONGEST_S", 1e6)
    server = MemoryServer(SystemClock())
    async with router_world(tmp_path, buses=(server.connect(), server.connect())) as world:
        mesh = world.mesh
        mesh.scripts = [silence]
        asking = asyncio.get_running_loop().create_task(served(world, stream=False))
        await mesh.until(lambda: mesh.submits)
        submit = mesh.submits[0]
        mesh.replay = lambda _, message: last_frame(mesh, submit, message.index)
        server.go_down()
        server.come_back()
        assert await asking == ANSWER


def _unknown(submit: SubmitRequest) -> Refused:
    error = ErrorInfo(code=ErrorCode.UNKNOWN_HANDOFF, message="who?")
    return Refused(handoff_id=submit.handoff_id, error=error)
