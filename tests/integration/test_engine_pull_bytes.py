"""What lies in a decode worker's caches after a pull, byte by byte, for prefill 1, 2, 4 x decode 1, 2, 4, over shared memory and tcp."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from common.dataplane.fake import FakeDataPlane
from common.dataplane.fake_network import FakeNetwork
from common.dataplane.port import DataPlane, Outcome, TransferResult
from common.engine.transfer import pull_read
from common.engine.transfer.puller import Puller
from common.engine.transfer.transports import open_data_plane
from common.layout.planner import plan
from common.layout.region import StagingRows
from common.layout.run import Run
from common.layout.staging import StagedStates
from common.runtime.clock import Clock
from contracts.errors import ErrorCode
from contracts.handoff import Grant
from contracts.manifest import PlannedPart, Role
from contracts.pull import ShardState
from contracts.rank import StartRank
from contracts.rank_pull import PullStopped, RoleMerged, ShardPulled
from tests.integration.cache_bytes import Memories, differing
from tests.integration.engine_session import decode_at
from tests.integration.handoff_pairs import Worker, start_worker
from tests.integration.pull_session import EVERYTHING, NUM_ROWS, STATES, Pulled, PullSession
from tests.integration.reference_prompts import random_model

SIZES = (1, 2, 4)
PAIRS = [(prefill, decode) for prefill in SIZES for decode in SIZES]
LONG, SHORT, LATER = (
    tuple(random.Random(length).randrange(3, 250) for _ in range(length)) for length in (300, 75, 140)
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, kw_only=True)
class World:
    """Workers of every size, each decode worker linked with every prefill worker as its source."""

    workers: dict[str, Worker]
    memories: Memories

    @asynccontextmanager
    async def session(self, prefill: int, decode: int, transport: str = "shm") -> AsyncIterator[PullSession]:
        """Pulls between two sizes."""
        session = PullSession(
            source=self.workers[f"{transport}-p{prefill}"],
            destination=self.workers[f"{transport}-d{decode}"],
            memories=self.memories,
        )
        try:
            yield session
        finally:
            await session.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """A random checkpoint of four layers, and workers of all sizes for shared memory, of one pair for tcp and the fake transport."""
    torch.set_num_threads(1)
    folder, sockets = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("s")
    random_model(num_layers=4, spread=0.06).save_pretrained(folder)
    memories = Memories()
    workers: dict[str, Worker] = {}
    wanted = [("shm", role, tp) for role in ("p", "d") for tp in SIZES]
    wanted += [(transport, role, tp) for transport in ("tcp", "fake") for role, tp in (("p", 2), ("d", 1))]
    network = FakeNetwork()

    def fake_plane(start: StartRank, clock: Clock) -> DataPlane:
        # A start's ranks share its incarnation, and a fake plane has no name of its own.
        owner = f"{start.incarnation}-{start.rank}"
        return FakeDataPlane(network, peer_id=start.worker_id, incarnation=owner, now=clock.monotonic)

    try:
        for transport, role, tp in wanted:
            name = f"{transport}-{role}{tp}"
            rows = NUM_ROWS if role == "d" else 0
            workers[name] = await start_worker(
                name,
                folder,
                sockets,
                tp,
                memories=memories,
                transport=transport,
                num_staging_rows=rows,
                open_plane=fake_plane if transport == "fake" else open_data_plane,
            )
        for transport, role, tp in wanted:
            if role == "d":
                for source in [each for each in wanted if each[:2] == (transport, "p")]:
                    peer = workers[f"{transport}-p{source[2]}"]
                    await workers[f"{transport}-d{tp}"].group.link_source(peer.ref, peer.describe())
        yield World(workers=workers, memories=memories)
    finally:
        for worker in workers.values():
            await worker.group.stop()


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "serial"])
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
async def test_two_prompts_of_one_batch_are_pulled_each_with_its_own_bytes(
    world: World, prefill: int, decode: int, parallel: bool
) -> None:
    """One of three chunks and a short one, pulled at the same time: one everything, the other the states alone."""
    async with world.session(prefill, decode) as session:
        one, other = await session.reserve(LONG), await session.reserve(SHORT)
        await session.prefill(one, other)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(session.pull(one, parallel=parallel), name="one")
            second = group.create_task(session.pull(other, parallel=parallel, roles=STATES), name="other")
        for each, result, roles in ((one, first.result(), EVERYTHING), (other, second.result(), STATES)):
            assert result.error is None
            assert result.num_bytes == sum(shard.num_bytes for shard in result.shards) > 0
            assert differing(session.received(each, roles), session.sent(each, roles)) == []
        assert session.nothing_else_written()


@pytest.mark.parametrize("roles", [EVERYTHING, STATES], ids=["everything", "states"])
@pytest.mark.parametrize("transport", ["tcp", "fake"])
async def test_where_secrets_are_looked_at_the_bytes_are_the_same(
    world: World, transport: str, roles: Sequence[Role]
) -> None:
    """The source's secret is shown and taken; with another one nothing is read, and nothing merged."""
    async with world.session(2, 1, transport) as session:
        one = await session.reserve(LATER)
        await session.prefill(one)
        before = session.states(one)
        stranger = await session.pull(one, roles=roles, source=_forged(one))
        assert stranger.error is not None
        assert stranger.error.code is ErrorCode.TRANSFER_FAILED
        assert session.states(one) == before
        assert (await session.pull(one, lock=2, roles=roles)).error is None
        assert differing(session.received(one, roles), session.sent(one, roles)) == []
        assert session.nothing_else_written()


def _forged(each: Pulled) -> Grant:
    return msgspec.structs.replace(each.source, secret="00" * 16)


@pytest.mark.parametrize("num_cached_tokens", [32, 74])
async def test_what_the_destination_has_already_is_not_read(world: World, num_cached_tokens: int) -> None:
    """Keys and values behind the cached tokens alone, within a block too; reports say which."""
    async with world.session(2, 1) as session:
        one = await session.reserve(SHORT, num_cached_tokens)
        await session.prefill(one)
        assert (await session.pull(one)).error is None
        assert differing(session.received(one), session.sent(one)) == []
        assert session.nothing_else_written()
        tokens = [part for report in one.reports if isinstance(report, ShardPulled) for part in report.parts]
        assert {part.ranges for part in tokens} == {((num_cached_tokens, len(SHORT)),)}


async def test_what_is_reported_are_all_parts_of_the_plan_once_in_order(world: World) -> None:
    """Every shard waits, begins and is done before a role is merged; at last each rank has stopped."""
    async with world.session(4, 2) as session:
        one = await session.reserve(SHORT)
        await session.prefill(one)
        result = await session.pull(one)
        assert [merge.role for merge in result.merges] == list(STATES)
        assert 0 < result.wait_ms <= result.total_ms
        for rank in (0, 1):
            reports = [report for report in one.reports if report.rank == rank]
            states = [report.shard.state for report in reports if isinstance(report, ShardPulled)]
            assert states[: len(states) // 3] == [ShardState.WAITING] * 2
            assert states.count(ShardState.DONE) == states.count(ShardState.PULLING) == 2
            kinds = [type(report) for report in reports]
            assert kinds == sorted(kinds, key=[ShardPulled, RoleMerged, PullStopped].index)
        told = [
            (report.rank, part)
            for report in one.reports
            if isinstance(report, ShardPulled | RoleMerged)
            for part in report.parts
        ]
        planned = _plan(session)
        assert len(told) == len(planned)
        assert {(part.role, part.layer, part.source_rank, rank) for rank, part in told} == {
            (part.role, part.layer, part.src_rank, part.dst_rank) for part in planned
        }


def _plan(session: PullSession) -> tuple[PlannedPart, ...]:
    sides = [[rank.manifest for rank in worker.info.ranks] for worker in (session.source, session.destination)]
    return plan(*sides).parts


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
async def test_decode_goes_on_with_the_tokens_of_the_source(world: World, prefill: int, decode: int) -> None:
    """What was pulled is enough to go on: eight tokens, the same on both sides. Steps of others go on while one is pulled."""
    async with world.session(prefill, decode) as session:
        one, other = await session.reserve(LATER), await session.reserve(SHORT)
        await session.prefill(one, other)
        assert (await session.pull(one)).error is None
        async with asyncio.TaskGroup() as group:
            pulled = group.create_task(session.pull(other), name="other")
            there = await decode_at(session.destination, one, 8)
        assert pulled.result().error is None
        assert there == await decode_at(session.source, one, 8)


# The checks can fail: each fault of the rules is planted, and seen.

merges = StagedStates.merges


def as_one_slab(self: StagedStates, parts: frozenset[PlannedPart], dst_slot: int, base: int) -> list[Run]:
    """A fault: conv shares of the source ranks one behind the other, as if what a rank holds of a row were one piece."""
    runs = merges(self, parts, dst_slot, base)
    if next(iter(parts)).role is not Role.CONV:
        return runs
    wrong: list[Run] = []
    num_layers = len({part.layer for part in parts})
    by_place = sorted(runs, key=lambda run: run.remote_offset)
    for first in range(0, len(runs), len(runs) // num_layers):
        layer = by_place[first : first + len(runs) // num_layers]
        at = layer[0].remote_offset
        for run in sorted(layer, key=lambda run: run.local_offset):
            wrong.append(msgspec.structs.replace(run, remote_offset=at))
            at += run.length
    return wrong


async def test_conv_as_one_slab_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 -> 1 with [Q0 K0 V0 Q1 K1 V1] in place of [Q0 Q1 K0 K1 V0 V1]: segments of every linear layer differ, and nothing else."""
    monkeypatch.setattr(StagedStates, "merges", as_one_slab)
    async with world.session(2, 1) as session:
        one = await session.reserve(SHORT)
        await session.prefill(one)
        assert (await session.pull(one)).error is None
        wrong = differing(session.received(one), session.sent(one))
        assert {name.rpartition("/")[0] for name in wrong} == {f"target/conv/{layer}" for layer in (0, 1, 2)}


async def test_one_staging_row_for_two_requests_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pulls read before either merges: in a common row, one of them gets the other's states."""
    base, merge, both_read = StagingRows.base, Puller._merge, threading.Barrier(2)

    def after_both_have_read(self: Puller, pull: Any) -> Any:
        both_read.wait(60)
        return merge(self, pull)

    monkeypatch.setattr(StagingRows, "base", lambda self, _: base(self, 0))
    monkeypatch.setattr(Puller, "_merge", after_both_have_read)
    async with world.session(1, 1) as session:
        one, other = await session.reserve(SHORT), await session.reserve(LATER)
        await session.prefill(one, other)
        async with asyncio.TaskGroup() as group:
            for each in (one, other):
                group.create_task(session.pull(each, roles=STATES), name=f"pull-{each.seq}")
        wrong = [differing(session.received(each, STATES), session.sent(each, STATES)) for each in (one, other)]
        assert sorted(map(len, wrong)) == [0, 3 * 4]


async def test_a_merge_before_all_shards_are_there_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is taken for read although it was not: what is merged in its place is not the source's."""
    read = pull_read.read_shard

    def all_but_one(shard: pull_read.Shard, *rest: Any) -> TransferResult:
        return TransferResult(outcome=Outcome.DONE) if shard.src_rank == 1 else read(shard, *rest)

    monkeypatch.setattr("common.engine.transfer.puller.read_shard", all_but_one)
    async with world.session(2, 1) as session:
        one = await session.reserve(SHORT)
        await session.prefill(one)
        assert (await session.pull(one, roles=STATES)).error is None
        assert len(differing(session.received(one, STATES), session.sent(one, STATES))) == 3 * 4
