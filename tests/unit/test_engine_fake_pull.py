"""Pulls of the fake engine, in virtual time: what is reported, what serial and parallel cost, and how a pull ends early."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.engine.fake.engine import FakeEngine
from common.engine.port import EngineError
from common.runtime.virtual_time import VirtualClock, run_virtual
from contracts.errors import ErrorCode
from contracts.handoff import Grant
from contracts.manifest import Role
from contracts.pull import ShardState
from contracts.rank import BindSequence
from contracts.rank_pull import PullReport, PullShards, PullStopped, RoleMerged, ShardPulled
from contracts.requests import SamplingParams, WorkerRef
from contracts.workers import WorkerDescription

SOURCE = WorkerRef(worker_id="p", incarnation="i1")
STATES = (Role.CONV, Role.SSM)
GRANT = Grant(worker_id="p", incarnation="i1", generation=7, block_ids=(3, 4), slot=2)


async def pair(clock: VirtualClock, tps: tuple[int, int] = (2, 1)) -> FakeEngine:
    """A decode engine that is linked with a prefill engine as its source, with one bound sequence in staging row 1."""
    prefill = FakeEngine(clock, worker_id="p", incarnation="i1", tp=tps[0])
    decode = FakeEngine(clock, worker_id="d", incarnation="j1", tp=tps[1], num_staging_rows=2)
    info = await prefill.start()
    descriptions = tuple(
        WorkerDescription(worker_id="p", incarnation="i1", num_ranks=tps[0], manifest=rank.manifest, region=rank.region)
        for rank in info.ranks
    )
    await decode.link_source(SOURCE, descriptions)
    await decode.bind(binding(1, staging_row=1))
    return decode


def binding(seq: int, **changes: Any) -> BindSequence:
    """Memory for a prompt of 20 tokens."""
    values: dict[str, Any] = {
        "seq": seq,
        "handoff_id": f"h{seq}",
        "generation": seq,
        "block_ids": (2 * seq, 2 * seq + 1),
        "slot": seq,
        "num_prompt_tokens": 20,
        "sampling": SamplingParams(max_tokens=4, seed=1),
    }
    return BindSequence(**(values | changes))


def command(seq: int = 1, lock: int = 1, **changes: Any) -> PullShards:
    """Pull the states."""
    values: dict[str, Any] = {
        "seq": seq,
        "lock": lock,
        "source": GRANT,
        "roles": STATES,
        "num_cached_tokens": 0,
        "parallel": True,
        "timeout_ms": 60_000,
    }
    return PullShards(**(values | changes))


def test_shards_side_by_side_take_as_long_as_the_slowest_and_one_after_the_other_the_sum() -> None:
    """Both report the same parts; the last word of a rank is that it has stopped."""

    async def work(clock: VirtualClock) -> None:
        for lock, parallel, wait_ms in ((1, True, 3000.0), (2, False, 5000.0)):
            decode = await pair(clock)
            decode.reads.read_s.update({0: 2.0, 1: 3.0})
            decode.reads.merge_s = 0.5
            reports: list[PullReport] = []
            result = await decode.pull(command(lock=lock, parallel=parallel), reports.append)
            assert (result.error, result.parallel) == (None, parallel)
            assert result.wait_ms == pytest.approx(wait_ms)
            assert result.total_ms == pytest.approx(wait_ms + 1000)
            assert [(merge.role, merge.merge_ms) for merge in result.merges] == [(Role.CONV, 500.0), (Role.SSM, 500.0)]
            assert {shard.state for shard in result.shards} == {ShardState.DONE}
            merged = [part for report in reports if isinstance(report, RoleMerged) for part in report.parts]
            assert sorted((part.role, part.source_rank) for part in merged) == [
                (role, source) for role in STATES for source in (0, 1)
            ]
            assert isinstance(reports[-1], PullStopped)

    run_virtual(work)


def test_everything_can_be_pulled() -> None:
    """KEY and VALUE are there with their shard, behind the tokens that were cached; bytes count those tokens alone."""

    async def work(clock: VirtualClock) -> None:
        decode = await pair(clock, (1, 1))
        whole: list[PullReport] = []
        everything = await decode.pull(command(roles=tuple(Role)), whole.append)
        tail: list[PullReport] = []
        await decode.pull(command(lock=2, roles=(Role.KEY,), num_cached_tokens=16), tail.append)
        parts = [part for report in tail if isinstance(report, ShardPulled) for part in report.parts]
        assert [(part.role, part.ranges) for part in parts] == [(Role.KEY, ((16, 20),))]
        states = await decode.pull(command(lock=3), lambda _: None)
        assert everything.num_bytes - states.num_bytes == 2 * 20 * 2 * 8 * 4

    run_virtual(work)


def test_a_shard_that_fails_fails_the_pull_after_all_have_ended() -> None:
    """Side by side the other shard is read to its end; one after the other it never begins. Nothing is merged."""

    async def work(clock: VirtualClock) -> None:
        for parallel, state, total_ms in ((True, ShardState.DONE, 3000.0), (False, ShardState.FAILED, 1000.0)):
            decode = await pair(clock)
            decode.reads.read_s.update({0: 1.0, 1: 3.0})
            decode.reads.failures[0] = "planted"
            reports: list[PullReport] = []
            result = await decode.pull(command(parallel=parallel), reports.append)
            assert result.error is not None
            assert (result.error.code, result.error.message) == (
                ErrorCode.TRANSFER_FAILED,
                "shard of source rank 0: planted",
            )
            assert [shard.state for shard in result.shards] == [ShardState.FAILED, state]
            assert result.total_ms == pytest.approx(total_ms)
            assert not [report for report in reports if isinstance(report, RoleMerged)]

    run_virtual(work)


def test_the_same_number_is_answered_from_the_record() -> None:
    """While it is under way and afterwards; a lower number is refused, a higher one only while the last is under way."""

    async def work(clock: VirtualClock) -> None:
        decode = await pair(clock)
        decode.reads.read_s[1] = 5.0
        seen: list[list[PullReport]] = [[], [], []]
        async with asyncio.TaskGroup() as group:
            first = group.create_task(decode.pull(command(lock=4), seen[0].append), name="first")
            await clock.sleep(1.0)
            second = group.create_task(decode.pull(command(lock=4), seen[1].append), name="second")
            await clock.sleep(1.0)
            with pytest.raises(EngineError, match="still being pulled"):
                await decode.pull(command(lock=5), seen[2].append)
            with pytest.raises(EngineError, match="4 or more") as caught:
                await decode.pull(command(lock=3), seen[2].append)
            assert caught.value.code is ErrorCode.STALE_FENCE
        third = await decode.pull(command(lock=4), seen[2].append)
        assert first.result() == second.result() == third
        assert seen[0] == seen[1] == seen[2]
        decode.reads.read_s.clear()
        assert (await decode.pull(command(lock=5), lambda _: None)).error is None

    run_virtual(work)


def test_a_release_waits_for_the_shard_under_way_and_drops_the_rest() -> None:
    """Within its timeout; beyond it the sequence stays, with its row, until a later release finds it quiet."""

    async def work(clock: VirtualClock) -> None:
        decode = await pair(clock)
        decode.reads.read_s.update({0: 2.0, 1: 2.0})
        async with asyncio.TaskGroup() as group:
            pulled = group.create_task(decode.pull(command(parallel=False), lambda _: None), name="pull")
            await clock.sleep(0.5)
            assert await decode.release((1,), 9, 0) == {1}
            (scan,) = await decode.scan()
            assert (scan.seqs, scan.num_pulls, scan.staging_rows) == ((1,), 1, (1,))
            with pytest.raises(EngineError, match="staging_row"):
                await decode.bind(binding(2, staging_row=1))
            assert await decode.release((1,), 10, 60_000) == frozenset()
            assert clock.monotonic() == pytest.approx(2.0), "the second shard was not begun"
        error = pulled.result().error
        assert error is not None
        assert error.code is ErrorCode.CANCELLED
        (scan,) = await decode.scan()
        assert (scan.seqs, scan.num_pulls, scan.staging_rows) == ((), 0, ())
        await decode.bind(binding(2, staging_row=1))

    run_virtual(work)


def test_what_cannot_be_pulled_is_refused() -> None:
    """An unbound sequence, states without a row, a worker that is not linked as a source, a replica that it does not have."""

    async def work(clock: VirtualClock) -> None:
        decode = await pair(clock)
        await decode.bind(binding(2))
        other = Grant(worker_id="q", incarnation="i1", generation=7, block_ids=(), slot=0)
        replica = Grant(worker_id="p", incarnation="i1", dp_rank=1, generation=7, block_ids=(), slot=0)
        for wrong, text in (
            (command(seq=3), "not bound"),
            (command(seq=2), "staging_row"),
            (command(source=other), "not linked as a source"),
            (command(source=replica), "below 1"),
        ):
            with pytest.raises(EngineError, match=text) as caught:
                await decode.pull(wrong, lambda _: None)
            assert (caught.value.code is ErrorCode.TRANSFER_FAILED) == ("linked" in text)
        assert (await decode.pull(command(seq=2, roles=(Role.KEY, Role.VALUE)), lambda _: None)).error is None
        await decode.unlink(SOURCE)
        with pytest.raises(EngineError, match="not linked"):
            await decode.pull(command(lock=2), lambda _: None)

    run_virtual(work)
