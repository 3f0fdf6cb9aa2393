"""Clients that do not speak HTTP as they should: each is refused in one form, in time, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.runtime.trace import new_trace
from contracts.requests import SubmitRequest
from contracts.trace import TRACEPARENT, read_trace
from tests.integration.router_world import ANSWER, PATIENCE_S, Mesh, World, router_world

PLAIN = {"model": "tiny", "prompt": "hello"}
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
_POST = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def head(*lines: str) -> bytes:
    """A POST that says these things of its body."""
    return (_POST + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode()


MALFORMED = {
    "binary": b"\x00\xff\xfe\r\n\r\n",
    "tls": bytes.fromhex("16030100c2010000be0303") + b"a" * 100,
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "version": b"GET /health HTTP/9.9\r\n\r\n",
    "no_colon": b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
    "no_host": b"GET /health HTTP/1.1\r\n\r\n",
    "nul": b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
    "long_path": b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "long_header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 9000 + b"\r\n\r\n",
    "header_flood": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 5000 + b"\r\n",
    "negative_length": head("Content-Length: -5"),
    "huge_length": head(f"Content-Length: {10**30}"),
    "two_lengths": head("Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "huge_chunk": head("Transfer-Encoding: chunked") + b"F" * 20 + b"\r\nabc\r\n",
    "no_chunk": head("Transfer-Encoding: chunked") + b"zz\r\nabc\r\n",
    "chunk_extension": head("Transfer-Encoding: chunked") + b"1;" + b"a" * 100_000 + b"\r\nabc\r\n",
}


async def connect(world: World) -> Stream:
    """Open a connection of our own."""
    return await asyncio.open_connection("127.0.0.1", int(world.url.rsplit(":", 1)[1]))


async def rest_of(stream: Stream) -> bytes:
    """Read until the router closes the connection, in one way or the other."""
    got = bytearray()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                part = await stream[0].read(65536)
            except ConnectionError:
                part = b""
            if not part:
                stream[1].close()
                return bytes(got)
            got += part


def parsed(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an answer that was read to its end, which names its request and its trace, as every one does."""
    top, _, body = answer.partition(b"\r\n\r\n")
    told = json.loads(body)
    headers = dict(line.decode().split(": ", 1) for line in top.split(b"\r\n")[1:])
    assert "application/json" in headers["Content-Type"]
    assert read_trace(headers) is not None
    assert headers["x-request-id"]
    assert told.get("error", {}).get("request_id", headers["x-request-id"]) == headers["x-request-id"]
    assert ("error" in told) == (b" 200 OK" not in top)
    return int(top.split(b" ")[1]), told


async def metric(world: World, name: str) -> float:
    """One of the router's own figures."""
    async with world.session.get(f"{world.url}/metrics") as response:
        found = re.search(rf"^pdmesh_router_{name} (\S+)$", await response.text(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


async def until(condition: Callable[[], Any]) -> None:
    """Wait until an asynchronous condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            pass


async def assert_serves(world: World) -> None:
    """Somebody else gets an answer."""
    status, answer, _ = await world.post("/v1/completions", PLAIN)
    assert (status, answer["choices"][0]["text"]) == (200, ANSWER)


async def test_what_is_no_http_is_refused_in_the_form_of_every_other_error(tmp_path: Path) -> None:
    """400 with OpenAI's JSON, the connection closed, counted, nothing of it quoted; the next client is served."""
    async with router_world(tmp_path) as world:
        for name, data in MALFORMED.items():
            stream = await connect(world)
            stream[1].write(data)
            status, answer = parsed(await rest_of(stream))
            assert (name, status, answer["error"]["code"]) == (name, 400, "invalid_request")
            assert answer["error"]["type"] == "invalid_request_error"
            assert "aaaa" not in answer["error"]["message"]
        assert await metric(world, "malformed_requests_total") == len(MALFORMED)
        await assert_serves(world)


@pytest.mark.parametrize("path", ["/health", "/no/such/path", "/v1/completions"])
async def test_an_expectation_that_is_not_met_is_refused_in_the_same_form(tmp_path: Path, path: str) -> None:
    """Also where aiohttp answers before any handler of ours."""
    async with router_world(tmp_path) as world:
        stream = await connect(world)
        stream[1].write(f"GET {path} HTTP/1.1\r\nHost: x\r\nExpect: tea\r\nConnection: close\r\n\r\n".encode())
        status, answer = parsed(await rest_of(stream))
        assert (status, answer["error"]["code"]) == (417, "invalid_request")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/health", 200),
        ("GET", "/ready", 200),
        ("GET", "/metrics", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/no/such/path", 404),
        ("DELETE", "/v1/models", 405),
        ("GET", "/health with Expect", 417),
    ],
)
async def test_every_answer_goes_on_with_the_names_that_its_client_gave(
    tmp_path: Path, method: str, path: str, expected: int
) -> None:
    """The client's id and its trace, for probes and for what is refused early as well."""
    client = new_trace()
    asked = {"x-request-id": "mine", **client.headers}
    if " " in path:
        path, asked["Expect"] = path.split(" ", maxsplit=1)[0], "tea"
    async with (
        router_world(tmp_path) as world,
        world.session.request(method, f"{world.url}{path}", headers=asked) as response,
    ):
        trace = read_trace({TRACEPARENT: response.headers[TRACEPARENT]})
        assert trace is not None
        assert (response.status, response.headers["x-request-id"], trace.trace_id) == (
            expected,
            "mine",
            client.trace_id,
        )
        assert trace.span_id != client.span_id


@pytest.mark.parametrize("trickling", [False, True])
async def test_a_head_that_is_never_finished_ends_by_a_deadline(tmp_path: Path, trickling: bool) -> None:
    """A silent connection, and one that sends a byte now and then, are closed alike."""
    async with router_world(tmp_path, idle_timeout_s=0.3) as world:
        reader, writer = await connect(world)
        writer.write(HEALTH[:-4])
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            closed = group.create_task(rest_of((reader, writer)))
            while trickling and not closed.done():
                writer.write(b"x")
                await asyncio.wait({closed}, timeout=0.02)
        assert closed.result() == b""
        await assert_serves(world)


async def test_a_body_that_is_never_finished_ends_by_a_deadline(tmp_path: Path) -> None:
    """504 that says so, then the connection is closed; nothing of the body is held any more."""
    async with router_world(tmp_path, body_timeout_s=0.2) as world:
        stream = await connect(world)
        stream[1].write(head("Content-Length: 1000") + b'{"model"')
        status, answer = parsed(await rest_of(stream))
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert world.mesh.frames == {}
        await assert_serves(world)


async def test_all_bodies_together_are_bounded(tmp_path: Path) -> None:
    """Half-sent bodies count; one that does not fit beside them is told to come back, and finds room when they are gone."""
    async with router_world(tmp_path, max_body_bytes=1000, max_bodies_bytes=1000) as world:
        half = await connect(world)
        half[1].write(head("Content-Length: 1000") + b" " * 900)

        async def refused() -> bool:
            other = await connect(world)
            other[1].write(head("Content-Length: 200", "Connection: close") + b" " * 200)
            status, answer = parsed(await rest_of(other))
            return (status, answer["error"]["code"]) == (429, "overloaded")

        await until(refused)
        half[1].close()

        async def served() -> bool:
            return (await world.post("/v1/completions", PLAIN))[0] == 200

        await until(served)


async def test_a_small_body_that_is_a_large_one_is_refused(tmp_path: Path) -> None:
    """What counts is what a compressed body becomes; reading stops there."""
    bomb = gzip.compress(b" " * 20_000_000, compresslevel=1)
    async with router_world(tmp_path, max_body_bytes=1_000_000) as world:
        status, answer, _ = await world.post("/v1/completions", bomb, headers={"Content-Encoding": "gzip"})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        await assert_serves(world)


async def test_connections_are_bounded(tmp_path: Path) -> None:
    """One too many hears so in words and is closed; when another closes there is room again."""
    async with router_world(tmp_path, max_connections=8) as world:
        held: list[Stream] = []
        while await metric(world, "connections") < 8:
            held.append(await connect(world))
            held[-1][1].write(HEALTH)
            await held[-1][0].readuntil(b"}")
        status, answer = parsed(await rest_of(await connect(world)))
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        assert await metric(world, "connections_refused_total") == 1
        for _, writer in held:
            writer.close()

        async def room() -> bool:
            return await metric(world, "connections") < 8

        await until(room)
        stream = await connect(world)
        stream[1].write(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert parsed(await rest_of(stream))[0] == 200


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    """One after the other, whatever waits behind; what is no request after them ends the connection and not the router."""
    async with router_world(tmp_path) as world:
        reader, writer = await connect(world)
        writer.write(HEALTH * 150 + b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            answers = (await reader.readuntil(b'"object":"list"}')).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200"] * 151
        writer.write(b"\x00\r\n\r\n")
        assert parsed(await rest_of((reader, writer)))[0] == 400
        await assert_serves(world)


async def test_a_client_that_pipelines_and_never_reads_is_cut(tmp_path: Path) -> None:
    """The router stops reading from it, holds little for it, and loses patience."""
    async with router_world(tmp_path, slow_reader_s=0.1) as world:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", int(world.url.rsplit(":", 1)[1])))
            metrics = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 1000

            async def send() -> None:
                with contextlib.suppress(ConnectionError):
                    while True:  # until it is cut; a test that waits for ever fails by its patience
                        await loop.sock_sendall(client, metrics)

            most = 0.0
            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
                sending = group.create_task(send())
                while not sending.done():
                    most = max(most, await metric(world, "unsent_bytes"))
            assert 0 < most < 400_000
        assert await metric(world, "slow_readers_total") == 1
        await assert_serves(world)


async def test_a_reset_inside_a_stream_is_noticed(tmp_path: Path) -> None:
    """No orderly close, no end of the stream: the attempt is called off all the same."""

    async def one_token(mesh: Mesh, submit: SubmitRequest) -> None:
        await mesh.send(submit, 0, mesh.answer[:1])

    async with router_world(tmp_path) as world:
        world.mesh.scripts = [one_token]
        body = json.dumps(PLAIN | {"stream": True}).encode()
        reader, writer = await connect(world)
        writer.write(head(f"Content-Length: {len(body)}") + body)
        await reader.readuntil(b"data: ")
        # Linger for no time: the kernel sends a reset instead of a close.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await world.mesh.until(lambda: world.mesh.cancels)
