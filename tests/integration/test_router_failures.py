"""What clients and the mesh see when something goes wrong, at every phase of a request."""

from pathlib import Path
from typing import Any

import openai
import pytest

from contracts.errors import ErrorCode, ErrorInfo
from contracts.requests import FinishReason, SubmitRequest
from contracts.workers import WorkerLoad
from services.router.answering import StreamedAnswer
from services.router.generation import Progress
from services.router.interruption import SlowReaderError
from tests.integration.router_world import (
    ANSWER,
    MAX_POSITION,
    Mesh,
    one_token,
    overloaded,
    record,
    router_world,
    silence,
    whole_answer,
)

PLAIN = {"model": "tiny", "prompt": "hello"}
NOWHERE_ELSE = {"redispatch": False}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("completions", b"{", (400, "invalid_request", None)),
        ("completions", {"prompt": "x"}, (400, "invalid_request", "model")),
        ("completions", PLAIN | {"model": "other"}, (404, "model_not_found", "model")),
        ("completions", PLAIN | {"prompt": ""}, (400, "invalid_request", "prompt")),
        ("completions", PLAIN | {"prompt": [1, 320]}, (400, "invalid_request", "prompt")),
        ("completions", PLAIN | {"prompt": [-1]}, (400, "invalid_request", "prompt")),
        ("completions", PLAIN | {"max_tokens": 0}, (400, "invalid_request", "max_tokens")),
        ("completions", PLAIN | {"max_tokens": "5"}, (400, "invalid_request", "max_tokens")),
        ("completions", PLAIN | {"temperature": 3}, (400, "invalid_request", "temperature")),
        ("completions", PLAIN | {"logprobs": 1}, (400, "unsupported_parameter", "logprobs")),
        ("completions", PLAIN | {"n": 200}, (400, "invalid_request", "n")),
        ("completions", PLAIN | {"max_tokens": 10, "min_tokens": 11}, (400, "invalid_request", "min_tokens")),
        ("completions", PLAIN | {"max_tokens": MAX_POSITION}, (400, "context_length_exceeded", "max_tokens")),
        ("completions", PLAIN | {"prompt": [1] * MAX_POSITION}, (413, "prompt_too_long", "prompt")),
        ("completions", PLAIN | {"prompt": "x" * 3_000_000}, (413, "body_too_large", None)),
        ("chat/completions", CHAT | {"tools": [{}]}, (400, "unsupported_parameter", "tools")),
        ("chat/completions", CHAT | {"messages": []}, (400, "invalid_request", "messages")),
        (
            "chat/completions",
            CHAT | {"messages": [{"role": "robot", "content": "x"}]},
            (400, "invalid_request", "messages"),
        ),
        ("no/such/path", PLAIN, (404, "invalid_request", None)),
    ],
)
async def test_bad_requests_are_refused_before_anything_is_allocated(
    tmp_path: Path, path: str, body: Any, expected: tuple[int, str, str | None]
) -> None:
    """The answer names the field; the mesh never hears of the request; the client is told not to try again."""
    async with router_world(tmp_path, max_body_bytes=1_000_000) as world:
        got_status, answer, headers = await world.post(f"/v1/{path}", body)
        assert (got_status, answer["error"]["code"], answer["error"]["param"]) == expected
        assert answer["error"]["type"] in {"invalid_request_error", "not_found_error"}
        assert headers.get("x-should-retry", "false") == "false"
        assert world.mesh.frames == {}


async def test_a_wrong_method_is_refused_in_the_same_form(tmp_path: Path) -> None:
    """405 says which methods there are."""
    async with router_world(tmp_path) as world, world.session.get(f"{world.url}/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert "error" in await response.json()


async def test_without_a_route_the_client_is_told_when_to_come_back(tmp_path: Path) -> None:
    """503 with Retry-After and the reason, and /ready says the same."""
    async with router_world(tmp_path, records=[]) as world:
        status, answer, headers = await world.post("/v1/completions", PLAIN)
        assert (status, answer["error"]["code"]) == (503, "no_route")
        assert "no worker is ready" in answer["error"]["message"]
        assert headers["Retry-After"] == "10"  # about as long as a worker takes to start
        ready, lacking = await world.get("/ready")
        assert (ready, lacking["missing"]) == (503, ["no worker is ready"])
        assert (await world.get("/health"))[0] == 200


async def test_a_refused_prompt_is_tried_elsewhere(tmp_path: Path) -> None:
    """The next attempt has a number and a handoff of its own, on another worker; the refused one is called off."""
    busy = WorkerLoad(num_free_blocks=10_000, num_free_slots=8, num_waiting=0, num_running=3)
    records = [record("mixed-0"), record("mixed-1", load=busy)]
    async with router_world(tmp_path, records=records, expected_workers=("mixed-0", "mixed-1")) as world:
        world.mesh.refuse_prompts = [overloaded()]
        status, answer, _ = await world.post("/v1/completions", PLAIN)
        assert (status, answer["choices"][0]["text"]) == (200, ANSWER)
        submit = world.mesh.submits[0]
        assert (submit.attempt, submit.handoff_id) == (1, f"{submit.request_id}-1")
        assert world.mesh.prompt_subjects == [f"pd.v1.rpc.mixed.{each}.prompt" for each in ("mixed-0", "mixed-1")]
        await world.mesh.until(lambda: world.mesh.hints)
        assert world.mesh.hints[0][1].handoff_id == f"{submit.request_id}-0"
        assert world.mesh.cancels == []


async def test_attempts_are_bounded(tmp_path: Path) -> None:
    """When all are refused the client gets the last refusal, with Retry-After."""
    async with router_world(tmp_path, max_attempts=3) as world:
        world.mesh.refuse_submits = [overloaded("no slot is free")] * 9
        status, answer, headers = await world.post("/v1/completions", PLAIN | {"stream": True})
        assert (status, answer["error"]["message"]) == (429, "no slot is free")
        assert answer["error"]["type"] == "rate_limit_error"
        assert (headers["Retry-After"], headers["x-should-retry"]) == ("1", "true")
        assert [submit.attempt for submit in world.mesh.submits] == [0, 1, 2]


async def test_retry_after_is_told_from_answers_and_not_from_refusals(tmp_path: Path) -> None:
    """A million wait. While only refusals end nothing can be told; when answers end it takes as long as may be said."""
    load = WorkerLoad(num_free_blocks=0, num_free_slots=0, num_waiting=1_000_000, num_running=8)
    async with router_world(tmp_path, records=[record("mixed-0", load=load)], max_attempts=1) as world:

        async def refused_for_s() -> str:
            world.mesh.refuse_submits = [overloaded()]
            status, _, headers = await world.post("/v1/completions", PLAIN)
            assert status == 429
            return str(headers["Retry-After"])

        assert [await refused_for_s() for _ in range(5)] == ["1"] * 5
        assert (await world.post("/v1/completions", PLAIN | {"n": 2}))[0] == 200
        assert await refused_for_s() == "60"


async def test_the_end_is_brought_once_to_a_client_that_does_not_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second end is waited for behind the first: the client is told at once why its stream breaks off."""
    ends: list[Progress] = []
    take = StreamedAnswer.take

    async def not_taken(self: StreamedAnswer, choice: int, progress: Progress) -> None:
        if progress.finish_reason is not None:
            ends.append(progress)
            raise SlowReaderError("the client does not read")
        await take(self, choice, progress)

    monkeypatch.setattr(StreamedAnswer, "take", not_taken)
    async with router_world(tmp_path) as world:
        _, error, done = await world.events("/v1/completions", PLAIN | {"max_tokens": 3})
        assert (error["error"]["code"], done) == ("cancelled", "[DONE]")
        assert (len(ends), len(world.mesh.submits)) == (1, 1)


async def test_a_refusal_for_good_is_not_tried_again(tmp_path: Path) -> None:
    """What is refused for what it is would be refused everywhere."""
    async with router_world(tmp_path) as world:
        world.mesh.refuse_submits = [ErrorInfo(code=ErrorCode.PROMPT_TOO_LONG, message="too long")]
        status, _, _ = await world.post("/v1/completions", PLAIN)
        assert (status, len(world.mesh.submits)) == (413, 1)


async def fail_at_once(mesh: Mesh, submit: SubmitRequest) -> None:
    """End with an error before any token, as the broker does when no memory can be reserved."""
    await mesh.send(submit, 0, [], final=True, error=overloaded("no block is free"))


async def fail_later(mesh: Mesh, submit: SubmitRequest) -> None:
    """End with an error after two tokens."""
    await mesh.send(submit, 0, mesh.answer[:2])
    error = ErrorInfo(code=ErrorCode.WORKER_LOST, message="decode-0 is gone")
    await mesh.send(submit, 2, [], final=True, num_tokens=2, error=error)


async def test_a_failure_before_the_first_token_is_tried_again(tmp_path: Path) -> None:
    """Nobody has seen anything yet: the client notices nothing."""
    async with router_world(tmp_path) as world:
        world.mesh.scripts = [fail_at_once, whole_answer]
        status, answer, _ = await world.post("/v1/completions", PLAIN)
        assert (status, answer["choices"][0]["text"]) == (200, ANSWER)
        assert [submit.attempt for submit in world.mesh.submits] == [0, 1]


async def test_a_failure_inside_a_stream_is_an_explicit_error(tmp_path: Path) -> None:
    """If it must not go on elsewhere, the stream ends with an error event and [DONE]; the official client raises it."""
    async with router_world(tmp_path) as world, world.client() as client:
        world.mesh.scripts = [fail_later]
        *chunks, last = await world.events("/v1/completions", PLAIN | NOWHERE_ELSE)
        assert last == "[DONE]"
        assert chunks[-1]["error"]["code"] == "worker_lost"
        assert chunks[-1]["error"]["request_id"]
        stream = await client.completions.create(model="tiny", prompt="hello", stream=True, extra_body=NOWHERE_ELSE)
        with pytest.raises(openai.APIError, match="decode-0 is gone"):
            _ = [chunk async for chunk in stream]
        assert len(world.mesh.submits) == 2


async def test_a_failure_behind_a_whole_answer_has_a_status(tmp_path: Path) -> None:
    """Without streaming nothing was sent yet, so the error is the answer."""
    async with router_world(tmp_path) as world, world.client() as client:
        world.mesh.scripts = [fail_later]
        with pytest.raises(openai.InternalServerError, match="decode-0 is gone") as caught:
            await client.completions.create(model="tiny", prompt="hello", extra_body=NOWHERE_ELSE)
        assert caught.value.status_code == 503


async def contradict(mesh: Mesh, submit: SubmitRequest) -> None:
    """Send a token twice, differently."""
    await mesh.send(submit, 0, [1])
    await mesh.send(submit, 0, [2])


async def test_contradicting_frames_end_the_request_and_are_called_off(tmp_path: Path) -> None:
    """Never an answer from frames that cannot be true together."""
    async with router_world(tmp_path) as world:
        world.mesh.scripts = [contradict]
        status, answer, _ = await world.post("/v1/completions", PLAIN)
        assert (status, answer["error"]["code"]) == (500, "protocol_error")
        await world.mesh.until(lambda: world.mesh.cancels)


async def test_silence_ends_by_the_deadline(tmp_path: Path) -> None:
    """A mesh that accepts and never answers is a failure, and is told that nobody waits any more."""
    async with router_world(tmp_path, request_timeout_s=0.2) as world:
        world.mesh.scripts = [silence]
        status, answer, _ = await world.post("/v1/completions", PLAIN)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        await world.mesh.until(lambda: world.mesh.cancels)


async def leave_a_gap(mesh: Mesh, submit: SubmitRequest) -> None:
    """Lose the second token."""
    await mesh.send(submit, 0, mesh.answer[:1])
    await mesh.send(
        submit, 2, mesh.answer[2:], final=True, num_tokens=len(mesh.answer), finish_reason=FinishReason.STOP
    )


async def test_a_gap_ends_by_the_deadline(tmp_path: Path) -> None:
    """Text behind the gap is never shown; the stream ends with an error event."""
    async with router_world(tmp_path, request_timeout_s=0.3) as world:
        world.mesh.scripts = [leave_a_gap]
        *chunks, last = await world.events("/v1/completions", PLAIN)
        assert (len(chunks), last) == (2, "[DONE]")
        assert chunks[1]["error"]["code"] == "deadline_exceeded"
        await world.mesh.until(lambda: world.mesh.cancels)


async def test_one_failing_choice_ends_the_others(tmp_path: Path) -> None:
    """An answer is whole or an error: the other choices are called off."""
    async with router_world(tmp_path, max_attempts=1) as world:
        world.mesh.scripts = [one_token, fail_later]
        status, _, _ = await world.post("/v1/completions", PLAIN | {"n": 2})
        assert status == 503
        await world.mesh.until(lambda: world.mesh.cancels)


async def test_an_explicit_refusal_is_taken_at_its_word(tmp_path: Path) -> None:
    """The broker said that it has nothing of the attempt: the worker with the prompt gets a hint, the broker no cancel."""
    async with router_world(tmp_path) as world:
        mesh = world.mesh
        mesh.refuse_submits.append(ErrorInfo(code=ErrorCode.INVALID_REQUEST, message="planted"))
        status, _, _ = await world.post("/v1/completions", PLAIN)
        assert status == 400
        await mesh.until(lambda: mesh.hints)
    assert mesh.cancels == []
