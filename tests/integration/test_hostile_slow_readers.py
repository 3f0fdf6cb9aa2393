"""Clients that read their stream slowly, or not at all, over a whole mesh: what waits for them is bounded, and so is patience."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from contracts.operations import Service
from services.router import connection
from tests.integration.hostile_mesh import PATIENCE_S, HostileMesh, expected, mesh_over, request_body

RECEIVE_BUFFER_BYTES = 4096
NUM_CHOICES = 16
NUM_TOKENS = 3_000


@contextlib.asynccontextmanager
async def raw_client(mesh: HostileMesh, **fields: Any) -> AsyncIterator[socket.socket]:
    """Ask for a stream over a socket with a tiny buffer, and read nothing of it."""
    body = json.dumps(request_body(1, NUM_TOKENS, n=NUM_CHOICES) | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", int(mesh.url.rsplit(":", 1)[1])))
        await loop.sock_sendall(client, head + body)
        yield client


async def rest_of(client: socket.socket, part_bytes: int = 65536) -> bytes:
    """Read to the end, in parts of at most so many bytes; a reset is an end, too."""
    got = bytearray()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                part = await asyncio.get_running_loop().sock_recv(client, part_bytes)
            except ConnectionError:
                return bytes(got)
            if not part:
                return bytes(got)
            got += part


def waiting(mesh: HostileMesh) -> tuple[float, float]:
    """What waits in the router: bytes in our buffers, frames of tokens."""
    names = ("router_unsent_bytes", "router_waiting_frames")
    return mesh.counted(Service.ROUTER, names[0]), mesh.counted(Service.ROUTER, names[1])


def is_full(mesh: HostileMesh) -> bool:
    """Whether our buffers wait for a client."""
    return waiting(mesh)[0] > RECEIVE_BUFFER_BYTES


def computed(mesh: HostileMesh) -> float:
    """Tokens that the workers have computed, without each answer's first."""
    return sum(mesh.counted(each, "worker_decoded_tokens_total") for each in (Service.DECODE, Service.MIXED))


def slow_readers(mesh: HostileMesh) -> float:
    """How many were given up."""
    return mesh.counted(Service.ROUTER, "router_slow_readers_total")


@pytest.mark.parametrize(
    "bounds",
    [
        {"max_waiting_frames": 32, "slow_reader_s": 600.0},
        {"max_waiting_frames": 1_000_000, "slow_reader_s": 0.3},
    ],
    ids=["by_frames", "by_time"],
)
async def test_a_client_that_never_reads_is_given_up(tmp_path: Path, bounds: dict[str, Any]) -> None:
    """Little waits for it at any time; then its request is over everywhere, and the connection is closed."""
    async with mesh_over("memory", tmp_path, **bounds) as mesh, raw_client(mesh) as client:
        most = (0.0, 0.0)
        async with asyncio.timeout(PATIENCE_S):
            while not slow_readers(mesh):
                now = waiting(mesh)
                most = (max(most[0], now[0]), max(most[1], now[1]))
                await mesh.clock.sleep(0.005)
        await mesh.settled()
        assert 0 < most[0] < 4 * connection.WRITE_BUFFER_BYTES
        assert most[1] <= NUM_CHOICES * bounds["max_waiting_frames"]
        assert slow_readers(mesh) == 1
        assert 0 < computed(mesh) < NUM_CHOICES * NUM_TOKENS / 2
        text = (await rest_of(client)).decode()
        assert "[DONE]" not in text or '"code":"cancelled"' in text
        assert waiting(mesh) == (0, 0)
        assert await mesh.stream(2, 20) == expected(2, 20)
        mesh.assert_unharmed()


async def test_who_reads_again_in_time_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a stream that was given up is an error event, and the connection is closed behind it."""
    monkeypatch.setattr(connection, "SEND_BUFFER_BYTES", RECEIVE_BUFFER_BYTES)
    async with mesh_over("memory", tmp_path, max_waiting_frames=32) as mesh, raw_client(mesh) as client:
        await mesh.until(lambda: slow_readers(mesh) == 1)
        text = (await rest_of(client)).decode()
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
        assert error["code"] == "cancelled"
        assert error["message"].startswith("the client does not read")
        await mesh.settled()
        mesh.assert_unharmed()


async def test_a_slow_reader_that_keeps_up_gets_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers were full again and again, and not a token is missing."""
    monkeypatch.setattr(connection, "SEND_BUFFER_BYTES", RECEIVE_BUFFER_BYTES)
    monkeypatch.setattr(connection, "WRITE_BUFFER_BYTES", RECEIVE_BUFFER_BYTES)
    num_tokens = 100
    async with mesh_over("memory", tmp_path) as mesh:
        async with raw_client(mesh, max_tokens=num_tokens) as client:
            got = bytearray()
            was_full = 0
            async with asyncio.timeout(PATIENCE_S):
                while b"[DONE]" not in got[-64:]:
                    # Read nothing before the buffers are full, or the end has been computed.
                    await mesh.until(lambda: is_full(mesh) or computed(mesh) == NUM_CHOICES * (num_tokens - 1))
                    was_full += is_full(mesh)
                    part = await asyncio.get_running_loop().sock_recv(client, 16384)
                    assert part
                    got += part
        told: dict[int, list[int]] = {}
        for line in bytes(got).decode().splitlines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                told.setdefault(choice["index"], []).extend(choice["token_ids"])
        assert told == {choice: expected(1 + choice, num_tokens) for choice in range(NUM_CHOICES)}
        assert was_full > 0
        assert slow_readers(mesh) == 0
        await mesh.settled()
        mesh.assert_unharmed()
