"""Pulls between engines when something comes between: a source that takes its memory back, a release, links, dead peers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.dataplane.cell_check import CellCheck
from common.engine.port import EngineError
from common.engine.ranks.group import RankGroup
from common.engine.ranks.launch import ProcessLauncher
from contracts.errors import ErrorCode
from contracts.handoff import Grant
from contracts.manifest import Role
from contracts.pull import ShardState
from contracts.rank import BindSequence, StepItem, StepPlan
from contracts.rank_pull import PullShards, RoleMerged
from contracts.requests import WorkerRef
from contracts.workers import WorkerDescription
from tests.integration.cache_bytes import Memories, differing
from tests.integration.engine_world import binding, engine, starts, thread_launcher
from tests.integration.handoff_pairs import Worker, start_worker
from tests.integration.held_transfers import hold_reads
from tests.integration.pull_session import EVERYTHING, NUM_ROWS, STATES, PullSession

TRANSPORTS = ("shm", "tcp")


@asynccontextmanager
async def linked(folder: Path, directory: Path, transport: str = "shm", **changes: Any) -> AsyncIterator[PullSession]:
    """A session of one decode rank that pulls from two prefill ranks."""
    memories = Memories()
    workers: list[Worker] = []
    try:
        for name, tp, rows in (("p", 2, 0), ("d", 1, NUM_ROWS)):
            extra = changes if name == "d" else {}
            workers.append(
                await start_worker(
                    name,
                    folder,
                    directory,
                    tp,
                    memories=memories,
                    transport=transport,
                    num_staging_rows=rows,
                    **extra,
                )
            )
        source, destination = workers
        await destination.group.link_source(source.ref, source.describe())
        yield PullSession(source=source, destination=destination, memories=memories)
    finally:
        for worker in workers:
            await worker.group.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_is_read_after_the_source_took_its_memory_back_does_not_count(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """The source is released in mid-read, and its memory is another request's by the time that it is copied: the pull fails."""
    async with linked(reference.folder, tmp_path, transport) as session:
        one = await session.reserve(reference.prompts[1].token_ids)
        await session.prefill(one)
        before = session.states(one)
        gate = hold_reads(transport, monkeypatch)
        async with asyncio.TaskGroup() as group:
            pulled = group.create_task(session.pull(one), name="pull")
            await gate.reached()
            await _reuse(session, one.source, reference.prompts[2].token_ids)
            gate.opened.set()
        error = pulled.result().error
        assert error is not None
        assert (error.code, "generation" in error.message) == (ErrorCode.TRANSFER_FAILED, True)
        assert {shard.state for shard in pulled.result().shards} == {ShardState.FAILED}
        assert session.states(one) == before
        await session.end()


async def _reuse(session: PullSession, grant: Grant, prompt: tuple[int, ...]) -> None:
    """Release sequence 1 at the source, and compute another in the very same memory."""
    source = session.source
    assert await source.group.release((1,), source.next_generation(), 5000) == frozenset()
    blocks = grant.block_ids + tuple(block for block in range(1024) if block not in grant.block_ids)[:40]
    generation = source.next_generation()
    await source.group.bind(binding(50, len(prompt), block_ids=blocks, slot=grant.slot, generation=generation))
    await source.run(
        [StepItem(seq=50, start=0, num_tokens=len(prompt), token_ids=prompt, sample=True, last_chunk=True)]
    )
    assert await source.group.release((50,), source.next_generation(), 5000) == frozenset()


async def test_bytes_of_another_request_are_seen_where_nobody_looks_at_the_generation(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: without the check the pull is done, with the other request's states."""
    async with linked(reference.folder, tmp_path) as session:
        one = await session.reserve(reference.prompts[1].token_ids)
        await session.prefill(one)
        wanted = session.sent(one, STATES)
        monkeypatch.setattr(CellCheck, "all_hold", lambda _self, _generation: True)
        gate = hold_reads("shm", monkeypatch)
        async with asyncio.TaskGroup() as group:
            pulled = group.create_task(session.pull(one), name="pull")
            await gate.reached()
            await _reuse(session, one.source, reference.prompts[2].token_ids)
            gate.opened.set()
        assert pulled.result().error is None
        assert differing(session.received(one, STATES), wanted) != []
        await session.end()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_release_in_mid_read_keeps_the_memory_until_the_read_is_over(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Blocks, slot and staging row stay with the sequence as long as the read may write; steps of others go on meanwhile."""
    async with linked(reference.folder, tmp_path, transport) as session:
        destination = session.destination
        one = await session.reserve(reference.prompts[1].token_ids)
        await session.prefill(one)
        gate = hold_reads(transport, monkeypatch)
        async with asyncio.TaskGroup() as group:
            pulled = group.create_task(session.pull(one), name="pull")
            await gate.reached()
            await destination.group.bind(_another(session, 9))
            await destination.run([StepItem(seq=9, start=0, num_tokens=5, token_ids=(3, 4, 5, 6, 7), sample=True)])
            assert await destination.group.release((9,), destination.next_generation(), 1000) == frozenset()
            assert await destination.group.release((1,), destination.next_generation(), 0) == {1}
            (scan,) = await destination.group.scan()
            assert (scan.seqs, scan.num_pulls, scan.staging_rows) == ((1,), 1, (one.row,))
            with pytest.raises(EngineError, match="staging_row"):
                await destination.group.bind(_another(session, 3, staging_row=one.row))
            gate.opened.set()
            assert await destination.group.release((1,), destination.next_generation(), 60_000) == frozenset()
        error = pulled.result().error
        assert error is not None
        assert error.code is ErrorCode.CANCELLED
        assert not [report for report in one.reports if isinstance(report, RoleMerged)]
        (scan,) = await destination.group.scan()
        assert (scan.seqs, scan.num_pulls, scan.staging_rows) == ((), 0, ())
        await session.end()


def _another(session: PullSession, seq: int, **changes: Any) -> BindSequence:
    """Memory at the destination for a prompt of five tokens."""
    ids, slot = session.take(session.destination, 5)
    generation = session.destination.next_generation()
    return binding(seq, 5, block_ids=ids, slot=slot, generation=generation, **changes)


async def test_one_shard_that_fails_gives_one_verdict_and_the_memory_back(reference: Any, tmp_path: Path) -> None:
    """A failpoint fails one source rank's read: the other ends too, states stay as they were, a later pull is refused.

    The other is read to its end if it had begun before the failure; afterwards nothing is begun.
    """
    async with linked(reference.folder, tmp_path, failpoints="fail:source=1") as session:
        one = await session.reserve(reference.prompts[1].token_ids)
        await session.prefill(one)
        before = session.states(one)
        result = await session.pull(one)
        assert result.error is not None
        assert result.error.message == "shard of source rank 1: planted by a failpoint"
        assert result.shards[0].state in {ShardState.DONE, ShardState.FAILED}
        assert result.shards[1].state is ShardState.FAILED
        assert session.states(one) == before
        assert (await session.pull(one)) == result, "the same number is answered from the record"
        with pytest.raises(EngineError, match="1 or more"):
            await session.pull(one, lock=0)
        await session.end()
        (scan,) = await session.destination.group.scan()
        assert (scan.seqs, scan.num_pulls, scan.staging_rows) == ((), 0, ())
        with pytest.raises(EngineError, match="a bound sequence"):
            await session.pull(one, lock=2)


async def test_links_decide_what_can_be_pulled(reference: Any, tmp_path: Path) -> None:
    """Only a start of a worker that is linked as a source; unlinking ends that, linking again gives it back."""
    async with linked(reference.folder, tmp_path) as session:
        source, destination = session.source, session.destination
        one = await session.reserve(reference.prompts[0].token_ids)
        await session.prefill(one)
        await destination.group.unlink(source.ref)
        with pytest.raises(EngineError, match="linked as a source") as caught:
            await session.pull(one)
        assert caught.value.code is ErrorCode.TRANSFER_FAILED, "no fault of the request"
        with pytest.raises(EngineError):
            await destination.group.link_source(source.ref, source.describe()[:1])
        await destination.group.link_source(source.ref, source.describe())
        assert (await session.pull(one)).error is None
        assert differing(session.received(one), session.sent(one)) == []
        await session.end()


async def test_a_source_that_dies_makes_pulls_fail(reference: Any, tmp_path: Path) -> None:
    """Its regions are gone: every shard fails at once, with a reason that says so."""
    async with linked(reference.folder, tmp_path) as session:
        one = await session.reserve(reference.prompts[0].token_ids)
        await session.prefill(one)
        await session.source.group.stop()
        result = await session.pull(one)
        assert result.error is not None
        assert "died" in result.error.message
        assert await session.destination.group.release((1,), 90, 1000) == frozenset()


async def test_a_pull_that_is_held_ends_with_its_engine(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for it hears that the engine was stopped; the threads end."""
    gate = hold_reads("shm", monkeypatch)
    async with linked(reference.folder, tmp_path) as session:
        one = await session.reserve(reference.prompts[0].token_ids)
        await session.prefill(one)
        async with asyncio.TaskGroup() as group:
            pulled = group.create_task(_outcome(session, one), name="pull")
            await gate.reached()
            gate.opened.set()
            await session.destination.group.stop()
        assert pulled.result() in {"", "the engine was stopped"}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("puller-")]


async def _outcome(session: PullSession, each: Any) -> str:
    from common.engine.port import EngineDeadError

    try:
        result = await session.pull(each)
    except EngineDeadError as error:
        return error.message
    return "" if result.error is None else result.error.message


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_rank_processes_pull_everything(reference: Any, tmp_path: Path, transport: str) -> None:
    """Real processes, two to one: decode goes on with the reference's tokens, and nothing was pushed."""
    prompt = reference.prompts[1]
    async with AsyncExitStack() as stack:
        groups: list[RankGroup] = []
        for name, tp, rows in (("p", 2, 0), ("d", 1, 2)):
            messages = starts(
                reference.folder, tmp_path, tp, worker_id=name, num_staging_rows=rows, transport=transport
            )
            group, info = await stack.enter_async_context(engine(messages, ProcessLauncher()))
            groups.append(group)
            if name == "p":
                ranks = tuple(
                    WorkerDescription(
                        worker_id="p", incarnation="i1", num_ranks=tp, manifest=rank.manifest, region=rank.region
                    )
                    for rank in info.ranks
                )
        prefill, decode = groups
        await decode.link_source(WorkerRef(worker_id="p", incarnation="i1"), ranks)
        length = len(prompt.token_ids)
        secret = "5a" * 16
        await decode.bind(binding(1, length, staging_row=1, secret=secret))
        here = tuple(range(90, 118))
        await prefill.bind(binding(4, length, block_ids=here, slot=0, generation=77, secret=secret))
        item = StepItem(seq=4, start=0, num_tokens=length, token_ids=prompt.token_ids, sample=True, last_chunk=True)
        (first,) = (await prefill.step(StepPlan(step=0, items=(item,)))).tokens
        grant = Grant(worker_id="p", incarnation="i1", generation=77, block_ids=here, slot=0, secret=secret)
        command = PullShards(
            seq=1, lock=1, source=grant, roles=EVERYTHING, num_cached_tokens=0, parallel=True, timeout_ms=30_000
        )
        result = await decode.pull(command, lambda _: None)
        assert result.error is None
        assert len(result.shards) == 2
        tokens = [first.token_id]
        for step in range(15):
            given = (first.token_id,) if step == 0 else ()
            item = StepItem(seq=1, start=length + step, num_tokens=1, token_ids=given, sample=True)
            tokens += [each.token_id for each in (await decode.step(StepPlan(step=step, items=(item,)))).tokens]
        assert tuple(tokens) == prompt.output_ids[:16]
        assert await decode.release((1,), 90, 1000) == frozenset()


async def test_a_pull_reads_from_the_replica_that_its_grant_names(reference: Any, tmp_path: Path) -> None:
    """Two replicas hold different prompts in the same blocks and slot: each is pulled by its number, and decoded."""
    block_ids, prompts = tuple(range(28)), reference.prompts[:2]
    async with AsyncExitStack() as stack:
        ranks: list[WorkerDescription] = []
        for dp_rank, prompt in enumerate(prompts):
            messages = starts(reference.folder, tmp_path, 1, worker_id="p", dp=2, dp_rank=dp_rank)
            group, info = await stack.enter_async_context(engine(messages, thread_launcher(1)))
            (rank,) = info.ranks
            ranks.append(
                WorkerDescription(
                    worker_id="p", incarnation="i1", num_ranks=2, manifest=rank.manifest, region=rank.region
                )
            )
            length = len(prompt.token_ids)
            await group.bind(binding(0, length, block_ids=block_ids, generation=7))
            item = StepItem(seq=0, start=0, num_tokens=length, token_ids=prompt.token_ids, sample=True, last_chunk=True)
            await group.step(StepPlan(step=0, items=(item,)))
        messages = starts(reference.folder, tmp_path, 1, worker_id="d", num_staging_rows=2)
        decode, _ = await stack.enter_async_context(engine(messages, thread_launcher(1)))
        await decode.link_source(WorkerRef(worker_id="p", incarnation="i1"), tuple(ranks))
        for dp_rank, prompt in enumerate(prompts):
            length = len(prompt.token_ids)
            await decode.bind(binding(dp_rank, length, staging_row=dp_rank))
            grant = Grant(worker_id="p", incarnation="i1", dp_rank=dp_rank, generation=7, block_ids=block_ids, slot=0)
            command = PullShards(
                seq=dp_rank,
                lock=1,
                source=grant,
                roles=EVERYTHING,
                num_cached_tokens=0,
                parallel=True,
                timeout_ms=30_000,
            )
            assert (await decode.pull(command, lambda _: None)).error is None
            given = (prompt.output_ids[0],)
            item = StepItem(seq=dp_rank, start=length, num_tokens=1, token_ids=given, sample=True)
            (token,) = (await decode.step(StepPlan(step=dp_rank, items=(item,)))).tokens
            assert token.token_id == prompt.output_ids[1]


async def test_a_staging_row_is_needed_for_states_alone(reference: Any, tmp_path: Path) -> None:
    """Without one KEY and VALUE can be pulled; a row that there is not, or that another has, is refused at bind."""
    async with linked(reference.folder, tmp_path) as session:
        decode = session.destination
        one = await session.reserve(reference.prompts[0].token_ids)
        await session.prefill(one)
        for row, text in ((NUM_ROWS, f"below {NUM_ROWS}"), (one.row, "held by sequence 1")):
            with pytest.raises(EngineError, match=text):
                await decode.group.bind(_another(session, 2, staging_row=row))
        await decode.group.bind(_another(session, 2))

        def command(*roles: Role) -> PullShards:
            return PullShards(
                seq=2,
                lock=1,
                source=one.source,
                roles=roles,
                num_cached_tokens=0,
                parallel=True,
                timeout_ms=30_000,
            )

        with pytest.raises(EngineError, match="staging_row"):
            await decode.group.pull(command(Role.KEY, Role.SSM), lambda _: None)
        assert (await decode.group.pull(command(Role.KEY, Role.VALUE), lambda _: None)).error is None
        assert await decode.group.release((2,), decode.next_generation(), 1000) == frozenset()
        await session.end()
