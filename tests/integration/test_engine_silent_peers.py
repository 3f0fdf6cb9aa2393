"""A peer that accepts connections and never answers: the engine computes and pushes to others, and forgets it when told to."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from common.engine.port import EngineDeadError, EngineError
from common.engine.ranks.group import RankGroup, RankGroupTimeouts
from common.engine.transfer import peers
from contracts.errors import ErrorCode
from contracts.handoff import Grant
from contracts.rank import MAX_CONNECTING, PushTarget
from contracts.requests import WorkerRef
from contracts.workers import WorkerDescription
from tests.integration.engine_world import binding, starts, thread_launcher
from tests.integration.handoff_pairs import Worker, hand_over, link, start_worker

PATIENCE_S = 60.0
SILENT = WorkerRef(worker_id="silent", incarnation="s1")


class Silence:
    """Where somebody listens who never says a word."""

    def __init__(self, transport: str, folder: Path) -> None:
        if transport == "tcp":
            self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
            self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        else:
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.address = os.fspath(folder / "silent.sock")
            self.listener.bind(self.address)
            self.listener.listen(64)
        self.listener.settimeout(PATIENCE_S)
        self.accepted: list[socket.socket] = []

    def like(self, worker: Worker) -> tuple[WorkerDescription, ...]:
        """A worker that is laid out as another one, but lies here."""
        return elsewhere(worker.describe(), self.address)

    async def accept(self) -> socket.socket:
        """Wait until somebody has come and said what he wants."""
        connection, _ = await asyncio.to_thread(self.listener.accept)
        self.accepted.append(connection)
        connection.settimeout(PATIENCE_S)
        assert await asyncio.to_thread(connection.recv, 1 << 16)
        return connection

    def close(self) -> None:
        """Go."""
        for each in (self.listener, *self.accepted):
            each.close()


def elsewhere(
    ranks: Sequence[WorkerDescription], address: str, *, only: int | None = None
) -> tuple[WorkerDescription, ...]:
    """Descriptions whose regions, or that of rank `only`, are said to be at another address."""
    changed = []
    for number, rank in enumerate(ranks):
        assert rank.region is not None
        moved = only is None or only == number
        changed.append(replace(rank, region=replace(rank.region, opaque=address)) if moved else rank)
    return tuple(changed)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attempts do not end by themselves, however slow this machine is; and none is left in the end."""
    monkeypatch.setattr(peers, "CONNECT_TIMEOUT_S", 2 * PATIENCE_S)
    yield
    assert not connecting()


def connecting() -> list[str]:
    """The threads that connect."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("connect-")]


@asynccontextmanager
async def workers(
    folder: Path, sockets: Path, tps: tuple[int, int], transport: str = "shm"
) -> AsyncIterator[tuple[Worker, Worker, Silence]]:
    """A source, a destination, and a silent address."""
    started: list[Worker] = []
    silence = Silence(transport, sockets)
    try:
        for name, tp in zip(("p", "d"), tps, strict=True):
            started.append(await start_worker(name, folder, sockets / "sockets", tp, transport=transport))
        source, destination = started
        async with asyncio.timeout(PATIENCE_S):
            yield source, destination, silence
    finally:
        for worker in started:
            await worker.group.stop()
        silence.close()


async def fails(source: Worker, ranks: tuple[WorkerDescription, ...], *, match: str, peer: WorkerRef = SILENT) -> None:
    """Link, which is expected not to work."""
    with pytest.raises(EngineError, match=match):
        await source.group.link(peer, ranks)


async def refuses_pushes(source: Worker, peer: WorkerRef) -> None:
    """No rank of the source takes a sequence for this peer, nor keeps anything of it."""
    grant = Grant(worker_id=peer.worker_id, incarnation=peer.incarnation, generation=5, block_ids=(1,), slot=1)
    with pytest.raises(EngineError, match="linked") as caught:
        await source.group.bind(
            binding(5, 5, block_ids=(1,), slot=1, push=PushTarget(grant=grant, num_cached_tokens=0))
        )
    assert "ranks" not in caught.value.message, "some rank has linked"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_peer_that_accepts_and_hangs_holds_nobody_up(reference: Any, tmp_path: Path, transport: str) -> None:
    """While it is waited for, another one is linked, prompts are computed and pushed to it; unlinking ends the wait."""
    prompts = [prompt.token_ids for prompt in reference.prompts[:2]]
    expected = [prompt.output_ids[:8] for prompt in reference.prompts[:2]]
    async with workers(reference.folder, tmp_path, (2, 1), transport) as (source, destination, silence):
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(fails(source, silence.like(destination), match="silent was unlinked"))
            heard = [await silence.accept() for _ in range(2)]
            await link(source, destination)
            assert await hand_over(source, destination, prompts, 8) == expected
            assert not waiting.done()
            await source.group.unlink(SILENT)
        assert [await asyncio.to_thread(connection.recv, 1) for connection in heard] == [b"", b""]
        await refuses_pushes(source, SILENT)
        assert await hand_over(source, destination, prompts, 8) == expected


async def test_what_fails_on_one_rank_is_forgotten_by_all(reference: Any, tmp_path: Path) -> None:
    """The rank that had linked lets go; later the same pair can be linked."""
    prompt = reference.prompts[1]
    async with workers(reference.folder, tmp_path, (2, 2)) as (source, destination, _):
        ranks = elsewhere(destination.describe(), os.fspath(tmp_path / "nobody"), only=1)
        await fails(source, ranks, match=r"does not answer.*\(on 1 of 2 ranks\)", peer=destination.ref)
        await refuses_pushes(source, destination.ref)
        await link(source, destination)
        assert await hand_over(source, destination, [prompt.token_ids], 8) == [prompt.output_ids[:8]]


async def test_a_new_start_of_a_peer_does_not_wait_for_the_old_one(reference: Any, tmp_path: Path) -> None:
    """Linked anew while it is being linked, the first attempt gives way and takes nothing from the second."""
    prompt = reference.prompts[1]
    async with workers(reference.folder, tmp_path, (1, 1)) as (source, destination, silence):
        async with asyncio.TaskGroup() as group:
            group.create_task(fails(source, silence.like(destination), match="linked anew", peer=destination.ref))
            await silence.accept()
            await link(source, destination)
        assert await hand_over(source, destination, [prompt.token_ids], 8) == [prompt.output_ids[:8]]


async def test_links_beyond_the_bound_wait_for_a_place(reference: Any, tmp_path: Path) -> None:
    """As many threads as are allowed, however many peers are silent; one that is unlinked makes room."""
    silent = [WorkerRef(worker_id=f"silent-{number}", incarnation="s1") for number in range(MAX_CONNECTING + 1)]
    async with workers(reference.folder, tmp_path, (1, 1)) as (source, destination, silence):
        ranks = silence.like(destination)
        async with asyncio.TaskGroup() as group:
            for peer in silent:
                group.create_task(fails(source, ranks, match="was unlinked", peer=peer))
            for _ in range(MAX_CONNECTING):
                await silence.accept()
            assert len(connecting()) == MAX_CONNECTING
            await source.group.unlink(silent[0])
            await silence.accept()
            for peer in silent[1:]:
                await source.group.unlink(peer)


async def test_stopping_ends_what_is_being_linked(reference: Any, tmp_path: Path) -> None:
    """Who waits for the link is told, and no thread is left."""
    async with workers(reference.folder, tmp_path, (2, 1)) as (source, destination, silence):

        async def dies() -> None:
            with pytest.raises(EngineDeadError, match="stopped"):
                await source.group.link(SILENT, silence.like(destination))

        async with asyncio.TaskGroup() as group:
            group.create_task(dies())
            heard = [await silence.accept() for _ in range(2)]
            await source.group.stop()
            assert not connecting()
        assert [await asyncio.to_thread(connection.recv, 1) for connection in heard] == [b"", b""]


async def test_ranks_that_never_say_how_it_went_cost_a_bounded_time(reference: Any, tmp_path: Path) -> None:
    """The link fails by its deadline, naming them; the engine lives, and the ranks have given up."""
    async with workers(reference.folder, tmp_path, (1, 1)) as (_, destination, silence):
        group = RankGroup(
            starts(reference.folder, tmp_path / "sockets", 2), thread_launcher(2), RankGroupTimeouts(link_s=0.05)
        )
        try:
            await group.start()
            with pytest.raises(EngineError, match=r"ranks \[0, 1\] did not say within 0\.05 s") as caught:
                await group.link(SILENT, silence.like(destination))
            assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
            assert len(await group.scan()) == 2
        finally:
            await group.stop()
