"""A source rank's process is killed or frozen while decode reads from it: decode goes on, and its memory has one owner at a time."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.dataplane import shm_remote, tcp_transfer
from common.dataplane.copier import copy_group
from common.dataplane.tcp_channel import Channel
from common.engine.port import PullResult
from common.engine.ranks.launch import ProcessLauncher
from common.runtime.clock import SystemClock
from contracts.errors import ErrorCode
from contracts.pull import ShardState
from tests.e2e.proc import region_bytes, state_of
from tests.integration.cache_bytes import Gathered, Memories, differing, gather
from tests.integration.engine_session import decode_at, manifests_of
from tests.integration.handoff_pairs import Worker, start_worker
from tests.integration.held_transfers import PATIENCE_S, Gate
from tests.integration.pull_session import NUM_ROWS, Pulled, PullSession

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "tiny"
LOST_RANK = 1
SILENCE_S = 0.5
NUM_TOKENS = 1000
"""A shard is larger than what sockets keep under way, so that a read in its middle needs its source."""
TRANSPORTS = ("shm", "tcp")
GIVEN_UP, KEPT, NEXT, LATER = (
    tuple(random.Random(seed).randrange(3, 250) for _ in range(NUM_TOKENS))
    for seed in ("given up", "kept", "next", "later")
)


@dataclass(kw_only=True)
class Lost:
    """Two pulls from processes, held in mid-read: of one that is about to be given up, and of one that is not."""

    session: PullSession
    healthy: Worker
    given_up: Pulled
    kept: Pulled
    sent: Gathered
    """What the source holds of the one that is kept."""
    states: bytes
    """What the destination had of its states before."""
    gate: Gate
    pulls: tuple[asyncio.Task[PullResult], asyncio.Task[PullResult]]

    @property
    def pid(self) -> int:
        """The process of the source rank that is lost."""
        return self.session.source.info.ranks[LOST_RANK].pid

    async def signal(self, number: int, state: str) -> None:
        """Send a signal to the source rank's process, and wait until it is in a state; "" is gone, with all of its threads."""
        os.kill(self.pid, number)
        async with asyncio.timeout(PATIENCE_S):
            while state_of(self.pid) != state:
                await SystemClock().sleep(0.005)

    async def release(self, each: Pulled, timeout_ms: int = 60_000) -> frozenset[int]:
        """Give a sequence's memory at the destination back."""
        destination = self.session.destination
        return await destination.group.release((each.seq,), destination.next_generation(), timeout_ms)

    async def let_go(self) -> PullResult:
        """Give one up while it is being read, let the reads go on, and return what has become of the other."""
        assert await self.release(self.given_up, 0) == {self.given_up.seq}
        (scan,) = await self.session.destination.group.scan()
        both = (self.given_up, self.kept)
        assert (scan.seqs, scan.num_pulls) == (tuple(each.seq for each in both), 2)
        assert set(scan.staging_rows) == {each.row for each in both}
        self.gate.opened.set()
        given_up, kept = [await pull for pull in self.pulls]
        assert given_up.error is not None
        assert given_up.error.code is ErrorCode.CANCELLED
        assert await self.release(self.given_up) == frozenset()
        return kept

    def assert_read(self, result: PullResult, *, whole: bool, reason: str) -> None:
        """The one that was kept is `whole`, with its source's bytes; or it failed for the lost rank's sake, and nothing was merged."""
        if whole:
            assert result.error is None
            assert differing(self.session.received(self.kept), self.sent) == []
            return
        assert result.error is not None
        assert result.error.code is ErrorCode.TRANSFER_FAILED
        shard = result.shards[LOST_RANK]
        assert (shard.state, shard.is_stale) == (ShardState.FAILED, False)
        assert re.match(reason, shard.reason)
        assert self.session.states(self.kept) == self.states

    async def next_owners(self) -> tuple[PullSession, list[Pulled]]:
        """Two other requests have the very memory that the two had, pulled from a worker that is well."""
        session = PullSession(source=self.healthy, destination=self.session.destination, memories=self.session.memories)
        owners = [await session.reserve(NEXT), await session.reserve(LATER)]
        assert [(each.there, each.row) for each in owners] == [
            (each.there, each.row) for each in (self.given_up, self.kept)
        ]
        await session.prefill(*owners)
        for each in owners:
            assert (await session.pull(each)).error is None
        return session, owners

    async def assert_owned(self, session: PullSession, owners: list[Pulled]) -> None:
        """Their bytes are their source's, nobody has written anywhere else, and decode goes on with them as their source would."""
        for each in owners:
            assert differing(session.received(each), session.sent(each)) == []
        assert session.nothing_else_written()
        assert await decode_at(session.destination, owners[0], 8) == await decode_at(session.source, owners[0], 8)
        await session.end()
        (scan,) = await session.destination.group.scan()
        assert (scan.seqs, scan.num_pulls, scan.staging_rows) == ((), 0, ())


@asynccontextmanager
async def held_pulls(directory: Path, monkeypatch: pytest.MonkeyPatch, transport: str) -> AsyncIterator[Lost]:
    """Prefill on two processes, one decode rank that is reading from both, and another prefill worker that it is linked with."""
    memories = Memories()
    workers: list[Worker] = []
    try:
        for name, tp, rows in (("p", 2, 0), ("q", 2, 0), ("d", 1, NUM_ROWS)):
            worker = await start_worker(
                name,
                SHIPPED,
                directory,
                tp,
                memories=memories,
                transport=transport,
                num_staging_rows=rows,
                launcher=ProcessLauncher() if name == "p" else None,
            )
            workers.append(worker)
        source, healthy, destination = workers
        for each in (source, healthy):
            await destination.group.link_source(each.ref, each.describe())
        session = PullSession(source=source, destination=destination, memories=memories)
        given_up, kept = await session.reserve(GIVEN_UP), await session.reserve(KEPT)
        await session.prefill(given_up, kept)
        states = session.states(kept)
        regions = [memoryview(region_bytes(rank.pid)) for rank in source.info.ranks]
        sent, gate = gather(manifests_of(source), regions, kept.here), Gate()
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            with monkeypatch.context() as patch:
                patch.setattr(tcp_transfer, "SILENCE_S", SILENCE_S)  # for these transfers, which never end otherwise
                patch.setattr(shm_remote, "copy_group", gate.before(copy_group))
                patch.setattr(Channel, "receive_vector", gate.before(Channel.receive_vector))
                pulls = [group.create_task(session.pull(each), name=f"pull-{each.seq}") for each in (given_up, kept)]
                await gate.reached(2 * len(source.info.ranks))
            lost = Lost(
                session=session,
                healthy=healthy,
                given_up=given_up,
                kept=kept,
                sent=sent,
                states=states,
                gate=gate,
                pulls=(pulls[0], pulls[1]),
            )
            try:
                yield lost
            finally:
                gate.opened.set()
    finally:
        for worker in workers:
            await worker.group.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_source_rank_that_freezes_in_mid_read_costs_decode_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Over tcp its shard fails once it has been silent for long; mapped memory is read without it. Woken, it changes nothing.

    As long as the reads are under way the memory is nobody else's.
    """
    async with held_pulls(tmp_path, monkeypatch, transport) as lost:
        await lost.signal(signal.SIGSTOP, "T")
        lost.assert_read(await lost.let_go(), whole=transport == "shm", reason="the peer has been silent")
        assert await lost.release(lost.kept) == frozenset()
        session, owners = await lost.next_owners()
        os.kill(lost.pid, signal.SIGCONT)
        assert len(await lost.session.source.group.scan()) == len(lost.session.source.info.ranks)
        await lost.assert_owned(session, owners)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_source_rank_that_is_killed_in_mid_read_costs_decode_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Over tcp its shard fails with the connection; mapped memory outlives it, and holds what was computed. Other sources are read on."""
    async with held_pulls(tmp_path, monkeypatch, transport) as lost:
        await lost.signal(signal.SIGKILL, "")
        lost.assert_read(await lost.let_go(), whole=transport == "shm", reason="the (connection broke|peer closed)")
        assert await lost.release(lost.kept) == frozenset()
        await lost.assert_owned(*await lost.next_owners())
