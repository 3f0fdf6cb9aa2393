"""What can be measured of a request at the router: in metrics, in one log line, and under one trace."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from common.runtime.trace import new_trace
from contracts.errors import ErrorCode, ErrorInfo
from contracts.requests import FinishReason, SubmitRequest
from contracts.trace import TraceContext, read_trace
from tests.integration.router_world import ANSWER, Mesh, World, encode_text, overloaded, router_world, silence

ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 100}
Samples = Mapping[tuple[str, ...], float]


async def exposition(world: World) -> str:
    """The text of /metrics."""
    async with world.session.get(f"{world.url}/metrics") as response:
        return await response.text()


async def samples(world: World, name: str) -> Samples:
    """Values of one series by its labels' values, in the order of the labels' names; zeros left out."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(await exposition(world))
        for sample in family.samples
        if sample.name == f"pdmesh_router_{name}" and sample.value
    }


def line_of(lines: list[MutableMapping[str, Any]]) -> MutableMapping[str, Any]:
    """The one line about a request."""
    (line,) = [line for line in lines if line["event"] == "request_finished"]
    return line


async def token_by_token(mesh: Mesh, submit: SubmitRequest) -> None:
    """One frame a token, then the end."""
    for index, token in enumerate(mesh.answer):
        await mesh.send(submit, index, [token])
    count = len(mesh.answer)
    await mesh.send(submit, count, [], final=True, num_tokens=count, finish_reason=FinishReason.STOP)


async def test_counters_of_replays_begin_at_zero(tmp_path: Path) -> None:
    """Every outcome is shown before it first happens, so that its first time is seen as an increase."""
    async with router_world(tmp_path) as world:
        text = await exposition(world)
    for outcome in ("news", "nothing_new", "unanswered", "lost"):
        assert f'pdmesh_router_replays_total{{outcome="{outcome}"}} 0.0\n' in text


async def test_a_request_is_told_alike_by_its_line_and_by_the_histograms(tmp_path: Path) -> None:
    """Times, tokens and outcome of one request; no part is longer than the whole."""
    async with router_world(tmp_path) as world:
        world.mesh.scripts = [token_by_token]
        with capture_logs() as lines:
            await world.events("/v1/completions", ASK)
        line = line_of(lines)
        num_prompt, num_output = len(encode_text("hello")), len(encode_text(ANSWER))
        assert (line["status"], line["stream"], line["finish_reasons"]) == ("200", True, ["stop"])
        assert (line["num_prompt_tokens"], line["num_completion_tokens"]) == (num_prompt, num_output)
        key = ("completions",)
        for name, expected, count in (
            ("prepare_seconds", {(): line["prepare_ms"] / 1e3}, {(): 1}),
            ("time_to_first_token_seconds", {key: line["ttft_ms"] / 1e3}, {key: 1}),
            ("time_per_output_token_seconds", {key: line["tpot_ms"] / 1e3}, {key: 1}),
            ("inter_token_seconds", {key: line["tpot_ms"] * (num_output - 1) / 1e3}, {key: num_output - 1}),
            ("request_seconds", {key: line["duration_ms"] / 1e3}, {key: 1}),
            ("request_prompt_tokens", {key: num_prompt}, {key: 1}),
            ("choice_output_tokens", {key: num_output}, {key: 1}),
        ):
            assert await samples(world, f"{name}_sum") == pytest.approx(expected, abs=1e-6), name
            assert await samples(world, f"{name}_count") == count, name
        assert await samples(world, "submit_seconds_count") == {(): 1}
        assert line["prepare_ms"] <= line["ttft_ms"] <= line["duration_ms"]
        assert line["ttft_ms"] + line["tpot_ms"] * (num_output - 1) <= line["duration_ms"]
        assert await samples(world, "choices_total") == {("completions", "stop"): 1}
        assert await samples(world, "requests_total") == {("completions", "200"): 1}


REFUSALS = (
    ("/v1/completions", {"model": "tiny", "prompt": "hi", "temperature": -1}, 400, "invalid_request"),
    ("/v1/completions", {"model": "other", "prompt": "hi"}, 404, "model_not_found"),
    ("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 10**6}, 400, "context_length_exceeded"),
    ("/v1/completions", b"{not json", 400, "invalid_request"),
    ("/v1/chat/completions", {"model": "tiny", "messages": "hi"}, 400, "invalid_request"),
    ("/tokenize", {"model": "other", "prompt": "hi"}, 404, "model_not_found"),
)


async def test_refused_requests_are_counted_and_told(tmp_path: Path) -> None:
    """A request that was refused for what it is has its place in the metrics, and a line if it was one to generate."""
    async with router_world(tmp_path) as world:
        for path, body, status, code in REFUSALS:
            with capture_logs() as lines:
                answered, content, headers = await world.post(path, body)
            assert (answered, content["error"]["code"]) == (status, code)
            assert read_trace({"traceparent": headers["traceparent"]}) is not None
            told = [(line["status"], line["error_code"]) for line in lines if line["event"] == "request_finished"]
            assert told == ([] if path == "/tokenize" else [(str(status), code)])
        assert await samples(world, "requests_total") == {
            ("completions", "400"): 3,
            ("completions", "404"): 1,
            ("chat", "400"): 1,
            ("tokenize", "404"): 1,
        }
        assert await samples(world, "errors_total") == {
            ("invalid_request", "completions"): 2,
            ("model_not_found", "completions"): 1,
            ("context_length_exceeded", "completions"): 1,
            ("invalid_request", "chat"): 1,
            ("model_not_found", "tokenize"): 1,
        }
        assert await samples(world, "request_seconds_count") == {}


async def test_paths_that_are_not_ours_share_one_label(tmp_path: Path) -> None:
    """Whatever a client asks for, the number of series stays bounded; probes are not counted at all."""
    async with router_world(tmp_path) as world:
        for path in ("/v1/nothing", "/admin/../x", "/v1/models/other", "/v1/models"):
            await world.get(path)
        assert await samples(world, "requests_total") == {
            ("other", "404"): 2,
            ("models", "404"): 1,
            ("models", "200"): 1,
        }


async def test_a_full_router_is_counted_as_429(tmp_path: Path) -> None:
    """Its limit is shown beside what is under way."""
    async with router_world(tmp_path, max_concurrent_requests=1, max_choices=1) as world:
        world.mesh.scripts = [silence]
        async with asyncio.TaskGroup() as group:
            first = group.create_task(world.post("/v1/completions", ASK), name="first")
            await world.mesh.until(lambda: world.mesh.submits)
            assert (await world.post("/v1/completions", ASK))[0] == 429
            assert await samples(world, "running_requests") == {(): 1}
            assert await samples(world, "running_requests_limit") == {(): 1}
            first.cancel()
        await world.mesh.until(lambda: world.mesh.cancels)
        counted = await samples(world, "requests_total")
        assert counted == {("completions", "429"): 1, ("completions", "499"): 1}
        assert await samples(world, "choices_total") == {("completions", "cancelled"): 1}


async def test_a_failure_inside_a_stream_has_the_status_of_its_error(tmp_path: Path) -> None:
    """The client read 200 at the beginning; the metrics and the line say what became of it."""

    async def break_off(mesh: Mesh, submit: SubmitRequest) -> None:
        await mesh.send(submit, 0, mesh.answer[:2])
        error = ErrorInfo(code=ErrorCode.WORKER_LOST, message="gone")
        await mesh.send(submit, 2, [], final=True, num_tokens=2, error=error)

    async with router_world(tmp_path) as world:
        world.mesh.scripts = [break_off]
        with capture_logs() as lines:
            await world.events("/v1/completions", ASK | {"redispatch": False})
        line = line_of(lines)
        assert (line["status"], line["error_code"], line["num_completion_tokens"]) == ("503", "worker_lost", 2)
        assert await samples(world, "requests_total") == {("completions", "503"): 1}
        assert await samples(world, "choices_total") == {("completions", "error"): 1}


async def test_a_stop_string_is_told_to_the_broker_as_an_end(tmp_path: Path) -> None:
    """With its reason and the tokens that counted; a client that leaves is told as a cancel, with what it had."""

    async def begin(mesh: Mesh, submit: SubmitRequest) -> None:
        for index, token in enumerate(mesh.answer[:-1]):
            await mesh.send(submit, index, [token])

    async with router_world(tmp_path) as world:
        world.mesh.scripts = [begin]
        _, content, _ = await world.post("/v1/completions", ASK | {"stop": ["rld! It"]})
        await world.mesh.until(lambda: world.mesh.cancels)
        stopped = world.mesh.cancels.pop()
        assert (stopped.finish_reason, stopped.num_tokens) == (FinishReason.STOP, content["usage"]["completion_tokens"])
        async with world.session.post(f"{world.url}/v1/completions", json=ASK | {"stream": True}) as response:
            for _ in range(3):
                await response.content.readline()
            response.close()
        await world.mesh.until(lambda: world.mesh.cancels)
        left = world.mesh.cancels.pop()
        assert left.finish_reason is None
        assert left.num_tokens > 0


async def test_the_clients_trace_goes_on_into_the_mesh(tmp_path: Path) -> None:
    """One trace id in the answer, in every message and in the line; each hop with a span of its own below the last."""
    client = TraceContext(trace_id=new_trace().trace_id, span_id="c" * 16, tracestate="vendor=1")
    async with router_world(tmp_path) as world:
        tap = await world.mesh.bus.subscribe("pd.v1.>")
        world.mesh.refuse_submits = [overloaded()]
        _, _, headers = await world.post("/v1/completions", ASK, headers=client.headers)
        router = read_trace({"traceparent": headers["traceparent"]})
        assert router is not None
        assert router.trace_id == client.trace_id
        assert router.span_id != client.span_id
        hops: list[TraceContext | None] = []
        async for message in tap:
            if message.subject.rpartition(".")[2] in {"prompt", "submit"}:
                hops.append(read_trace(message.headers))
                if len(hops) == 4:
                    break
        assert {hop.trace_id for hop in hops if hop is not None} == {client.trace_id}
        assert {hop.tracestate for hop in hops if hop is not None} == {"vendor=1"}
        spans = [hop.span_id for hop in hops if hop is not None]
        assert spans[0] == spans[1] != spans[2] == spans[3]
        assert not {client.span_id, router.span_id} & set(spans)


async def test_a_broken_trace_is_replaced_not_refused(tmp_path: Path) -> None:
    """The client gets its answer, under a trace that the router made."""
    async with router_world(tmp_path) as world:
        for sent in ("", "00-zz", f"00-{'0' * 32}-{'1' * 16}-01", "ff" + "-" * 53):
            status, _, headers = await world.post("/v1/completions", ASK, headers={"traceparent": sent})
            assert status == 200
            assert read_trace({"traceparent": headers["traceparent"]}) is not None
            assert headers["traceparent"] != sent
        async with world.session.post(f"{world.url}/v1/completions", json=ASK | {"stream": True}) as streamed:
            await streamed.read()
        assert read_trace({"traceparent": streamed.headers["traceparent"]}) is not None
