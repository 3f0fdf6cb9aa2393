"""A decode worker that reads caches itself: over fake engines, in virtual time; the test plays broker and router."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from common.worker.core.doubts import MAX_FAILED_IN_A_ROW
from common.worker.settings import PulledRoles
from contracts.errors import ErrorCode
from contracts.events import EventName
from contracts.handoff import (
    PartsAnswer,
    PrefillFinished,
    RequestEnded,
    Reserved,
    TakenOver,
)
from contracts.manifest import Role
from contracts.pull import ShardState, Transfer
from contracts.requests import Accepted, Refused, WorkerRef
from contracts.subjects import WorkerVerb
from contracts.workers import SettingChanged, SetWorker
from services.prefill.service import PrefillService
from tests.integration.pulling_pair import (
    PAGED,
    STATES,
    computed,
    engine_of,
    event_log,
    parts_of,
    pull_ended,
    pulling_pair,
    release,
    roles_in,
)
from tests.integration.worker_world import EXPECTED, HANDOFF, PROMPT, Mesh, in_mesh, pair

OTHER = "r2-0"


@pytest.mark.parametrize(("pull", "pulled"), [(PulledRoles.STATES, STATES), (PulledRoles.ALL, STATES | PAGED)])
def test_a_pull_from_reserve_to_the_last_token(pull: PulledRoles, pulled: set[Role]) -> None:
    """What decode pulls prefill does not push; both ways fill the ledger; the tokens are those of one uninterrupted sequence."""

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh, pull=pull)
        source = await computed(mesh)
        assert (source.worker_id, source.incarnation, len(source.secret)) == ("prefill-0", "i-prefill-0", 32)
        answer = await parts_of(mesh, "prefill")
        assert answer.finished.source == source
        early = await mesh.commit(EXPECTED[0])
        assert early.error.code is ErrorCode.PROTOCOL
        assert await parts_of(mesh, "decode") == PartsAnswer(handoff_id=HANDOFF, reports=())
        for _ in range(2):
            assert await mesh.pull(source) == Accepted(handoff_id=HANDOFF)
        ended = await pull_ended(mesh)
        assert (ended.lock, ended.error, ended.parallel) == (1, None, True)
        assert {merge.role for merge in ended.merges} == STATES
        assert await mesh.pull(source) == Accepted(handoff_id=HANDOFF)
        answer = await parts_of(mesh, "decode")
        assert answer.pull_ended == ended
        last = {report.source_rank: report for report in mesh.reports if report.transfer is Transfer.PULL}
        assert list(answer.reports) == [last[0], last[1]]
        assert roles_in(mesh.reports, Transfer.PULL) == pulled
        assert roles_in(mesh.reports, Transfer.PUSH) == (STATES | PAGED) - pulled
        for report in last.values():
            assert report.incarnation == "i-decode-0"
            assert [shard.state for shard in report.shards] == [ShardState.DONE]
            assert all(
                part.ranges == (((0, len(PROMPT)),) if part.role in PAGED else ((0, 1),)) for part in report.parts
            )
        assert await mesh.commit(EXPECTED[0]) == Accepted(handoff_id=HANDOFF)
        assert (await mesh.text())[0] == EXPECTED
        assert isinstance(await mesh.heard.get(), TakenOver)
        assert isinstance(await mesh.heard.get(), RequestEnded)
        await release(mesh)
        mesh.assert_empty()

    in_mesh(scenario)


@pytest.mark.parametrize(("parallel", "wait_ms"), [(True, 200.0), (False, 300.0)])
def test_shards_are_read_side_by_side_or_one_after_the_other(parallel: bool, wait_ms: float) -> None:
    """Two source ranks take 0.1 and 0.2 s: together 0.2 s, in turn 0.3 s; the events say when each began and ended."""

    async def scenario(mesh: Mesh) -> None:
        async with event_log(mesh) as events:
            service = await pulling_pair(mesh, parallel_shard_pull=parallel)
            engine_of(mesh).reads.read_s.update({0: 0.1, 1: 0.2})
            engine_of(mesh).reads.merge_s = 0.05
            source = await computed(mesh)
            await mesh.pull(source)
            ended = await pull_ended(mesh)
            assert ended.wait_ms == pytest.approx(wait_ms, abs=1)
            assert [merge.merge_ms for merge in ended.merges] == pytest.approx([50.0, 50.0], abs=1)
            assert ended.total_ms == pytest.approx(wait_ms + 100, abs=2)
            await mesh.commit(EXPECTED[0])
            await mesh.text()
            text = service.metrics.exposition().decode()
            assert 'pdmesh_worker_shard_pulls_total{outcome="done"} 2.0' in text
            assert f'pdmesh_worker_pull_wait_seconds_count{{parallel="{int(parallel)}"}} 1.0' in text
            await release(mesh)
        merged = {event.role: event.merge_ms for event in events if event.event is EventName.SHARDS_MERGED}
        assert merged == {role: pytest.approx(50.0, abs=1) for role in ("conv", "ssm")}
        told = {
            (event.event, event.source_rank): event
            for event in events
            if event.event in {EventName.SHARD_PULL_STARTED, EventName.SHARD_PULLED}
        }
        assert len(told) == 4
        assert {event.parallel for event in told.values()} == {parallel}
        first_ends = told[EventName.SHARD_PULLED, 0].at_ns
        assert (told[EventName.SHARD_PULL_STARTED, 1].at_ns < first_ends) is parallel
        assert [told[EventName.SHARD_PULLED, rank].duration_ms for rank in (0, 1)] == pytest.approx([100, 200], abs=1)

    in_mesh(scenario)


@pytest.mark.parametrize("parallel", [True, False])
def test_while_shards_are_read_each_is_said_to_wait_or_to_be_read(parallel: bool) -> None:
    """The broker hears of all shards from the begin on: one by one the second waits as long as the first is read."""

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh, parallel_shard_pull=parallel)
        engine_of(mesh).reads.read_s.update({0: 1.0, 1: 1.0})
        source = await computed(mesh)
        await mesh.pull(source)
        await mesh.clock.sleep(0.5)
        told = {report.source_rank: report for report in mesh.reports if report.transfer is Transfer.PULL}
        second = ShardState.PULLING if parallel else ShardState.WAITING
        assert [told[rank].shards[0].state for rank in (0, 1)] == [ShardState.PULLING, second]
        assert (await parts_of(mesh, "decode")).reports == (told[0], told[1])
        await pull_ended(mesh)
        told = {report.source_rank: report for report in mesh.reports if report.transfer is Transfer.PULL}
        assert [told[rank].shards[0].state for rank in (0, 1)] == [ShardState.DONE] * 2
        await release(mesh)
        mesh.assert_empty()

    in_mesh(scenario)


def test_toggling_while_requests_run_changes_their_pulls_and_no_token() -> None:
    """Each pull goes as the setting is when it begins; the output is the same both ways."""

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh)
        engine_of(mesh).reads.read_s.update({0: 0.1, 1: 0.1})
        waits = []
        for number in range(4):
            handoff = f"r{number}-0"
            source = await computed(mesh, handoff)
            await mesh.pull(source, handoff=handoff)
            change = SetWorker(key="parallel_shard_pull", value=str(number % 2))
            await mesh.ask("decode", "decode-0", WorkerVerb.SET, change, SettingChanged)
            ended = await pull_ended(mesh)
            waits.append((ended.parallel, round(ended.wait_ms, -1)))
            await mesh.commit(EXPECTED[0], handoff)
            assert (await mesh.text())[0] == EXPECTED
            assert isinstance(await mesh.heard.get(), TakenOver)
            assert isinstance(await mesh.heard.get(), RequestEnded)
            await release(mesh, handoff)
        assert waits == [(True, 100), (False, 200), (True, 100), (False, 200)]
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_shard_that_fails_ends_the_pull_and_gives_everything_back() -> None:
    """The other shard is waited for, nothing is merged, the error is the broker's to act on; a commit stays refused."""

    async def scenario(mesh: Mesh) -> None:
        service = await pulling_pair(mesh)
        engine_of(mesh).reads.read_s.update({0: 0.01, 1: 0.3})
        engine_of(mesh).reads.failures[0] = "the region is gone"
        source = await computed(mesh)
        await mesh.pull(source)
        ended = await pull_ended(mesh)
        assert ended.error is not None
        assert ended.error.code is ErrorCode.TRANSFER_FAILED
        assert "the region is gone" in ended.error.message
        assert ended.merges == ()
        answer = await parts_of(mesh, "decode")
        assert answer.pull_ended == ended
        assert [report.shards[0].state for report in answer.reports] == [ShardState.FAILED, ShardState.DONE]
        assert roles_in(list(answer.reports), Transfer.PULL) == set()
        assert (await mesh.commit(EXPECTED[0])).error.code is ErrorCode.PROTOCOL
        assert 'pdmesh_worker_pulls_total{code="transfer_failed"} 1.0' in service.metrics.exposition().decode()
        await release(mesh)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_source_whose_pulls_fail_in_a_row_is_linked_anew() -> None:
    """Its connections may be gone though it lives; one failure says nothing, and one success that the link carries."""

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh)
        engine = engine_of(mesh)
        made: list[str] = []
        link_source, unlink = engine.link_source, engine.unlink

        async def linked(peer: WorkerRef, ranks: Any) -> None:
            made.append("linked")
            engine.reads.failures.clear()  # as new connections would
            await link_source(peer, ranks)

        async def unlinked(peer: WorkerRef) -> None:
            made.append("unlinked")
            await unlink(peer)

        engine.link_source, engine.unlink = linked, unlinked  # type: ignore[method-assign]  # to count
        outcomes = "-" * (MAX_FAILED_IN_A_ROW - 1) + "+" + "-" * MAX_FAILED_IN_A_ROW + "+"
        for number, outcome in enumerate(outcomes):
            handoff = f"r{number}-0"
            if outcome == "-":
                engine.reads.failures[0] = "the peer has closed the region or died"
            else:
                engine.reads.failures.clear()
            source = await computed(mesh, handoff)
            assert await mesh.pull(source, handoff=handoff) == Accepted(handoff_id=handoff)
            assert ((await pull_ended(mesh)).error is None) == (outcome == "+")
            await release(mesh, handoff)
            assert made == ([] if number < len(outcomes) - 2 else ["unlinked", "linked"][: 1 + (outcome == "+")])
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_pull_that_failed_may_be_asked_for_again_under_a_higher_lock() -> None:
    """It begins anew; the same lock is answered from the record, a lower one refused, and so is one beside a running pull."""

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh)
        reads = engine_of(mesh).reads
        reads.read_s.update({0: 0.2, 1: 0.2})
        reads.failures[1] = "no"
        source = await computed(mesh)
        await mesh.pull(source, lock=3)
        assert (await mesh.pull(source, lock=4)).error.code is ErrorCode.DUPLICATE
        assert (await pull_ended(mesh)).error is not None
        del reads.failures[1]
        assert await mesh.pull(source, lock=3) == Accepted(handoff_id=HANDOFF)
        assert (await mesh.pull(source, lock=2)).error.code is ErrorCode.STALE_FENCE
        assert await mesh.pull(source, lock=4) == Accepted(handoff_id=HANDOFF)
        ended = await pull_ended(mesh)
        assert (ended.lock, ended.error) == (4, None)
        assert (await mesh.pull(source, lock=5)).error.code is ErrorCode.PROTOCOL
        pulls = [report for report in mesh.reports if report.transfer is Transfer.PULL]
        revisions = [report.revision for report in pulls if report.source_rank == 1]
        assert revisions == sorted(revisions)
        await mesh.commit(EXPECTED[0])
        assert (await mesh.pull(source, lock=6)).error.code is ErrorCode.PROTOCOL
        assert (await mesh.text())[0] == EXPECTED
        await release(mesh)

    in_mesh(scenario)


def test_reports_that_are_lost_can_be_asked_for() -> None:
    """The broker that heard nothing of parts or ends finds both in the answer."""

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh, pull=PulledRoles.ALL)
        source = await computed(mesh)
        mesh.reports.clear()
        await mesh.pull(source)
        await pull_ended(mesh)
        mesh.reports.clear()
        answer = await parts_of(mesh, "decode")
        assert [report.source_rank for report in answer.reports] == [0, 1]
        assert roles_in(list(answer.reports), Transfer.PULL) == STATES | PAGED
        assert (await parts_of(mesh, "decode", "r9-0")).error.code is ErrorCode.UNKNOWN_HANDOFF
        assert (await parts_of(mesh, "prefill", "r9-0")).error.code is ErrorCode.UNKNOWN_HANDOFF
        assert (await parts_of(mesh, "prefill")).reports == ()
        await release(mesh)

    in_mesh(scenario)


def test_a_release_in_mid_pull_waits_for_the_shards_and_tells_nobody() -> None:
    """Memory comes back once nothing is read any more, until then it is quarantined; the broker hears no end of this pull."""

    async def scenario(mesh: Mesh) -> None:
        service = await pulling_pair(mesh)
        engine_of(mesh).reads.read_s.update({0: 1.5, 1: 1.5})
        source = await computed(mesh)
        await mesh.pull(source)
        await mesh.clock.sleep(0.2)
        await mesh.release("decode", "decode-0")
        pool = service.replicas[0].pool
        assert (pool.num_quarantined_slots, pool.num_free_places) == (1, pool.num_slots - 1)
        assert (await mesh.pull(source, lock=2)).error.code is ErrorCode.CANCELLED
        await mesh.clock.sleep(4)
        await mesh.release("prefill", "prefill-0")
        mesh.assert_empty()
        assert mesh.heard.empty()

    in_mesh(scenario)


@pytest.mark.parametrize(
    ("changes", "grant", "code"),
    [
        ({"incarnation": "i-other"}, {}, ErrorCode.INCARNATION_CHANGED),
        ({"handoff_id": "r9-0"}, {}, ErrorCode.UNKNOWN_HANDOFF),
        ({}, {"worker_id": "prefill-9"}, ErrorCode.PROTOCOL),
        ({}, {"incarnation": "i-older"}, ErrorCode.PROTOCOL),
        ({}, {"block_ids": (0, 1)}, ErrorCode.PROTOCOL),
        ({}, {"block_ids": (0, 0, 1)}, ErrorCode.PROTOCOL),
        ({}, {"block_ids": (0, 1, 1 << 20)}, ErrorCode.PROTOCOL),
        ({}, {"slot": 32}, ErrorCode.PROTOCOL),
        ({}, {"dp_rank": 1}, ErrorCode.PROTOCOL),
    ],
)
def test_a_pull_that_breaks_a_rule_is_refused_and_begins_nothing(
    changes: dict[str, Any], grant: dict[str, Any], code: ErrorCode
) -> None:
    """Refused by name; the right one goes through afterwards."""

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh)
        source = await computed(mesh)
        answer = await mesh.pull(msgspec.structs.replace(source, **grant), **changes)
        assert isinstance(answer, Refused)
        assert answer.error.code is code
        assert await parts_of(mesh, "decode") == PartsAnswer(handoff_id=HANDOFF, reports=())
        assert await mesh.pull(source) == Accepted(handoff_id=HANDOFF)
        assert (await pull_ended(mesh)).error is None
        await mesh.lease.lead(9)
        assert (await mesh.pull(source, fence=9)).handoff_id == HANDOFF
        assert (await mesh.pull(source, fence=8)).error.code is ErrorCode.STALE_FENCE
        await release(mesh)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_worker_that_is_pushed_to_pulls_nothing() -> None:
    """Its reservations have no staging row, ask for everything to be pushed, and a pull of one is refused."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        reserved = await mesh.reserve()
        assert (reserved.pulled, reserved.grant.staging_row) == ((), None)
        await mesh.send_prompt("prefill", "prefill-0")
        await mesh.run(reserved)
        finished = await mesh.heard.get()
        assert isinstance(finished, PrefillFinished)
        assert finished.source is None
        forged = msgspec.structs.replace(reserved.grant, worker_id="prefill-0", incarnation="i-prefill-0")
        assert (await mesh.pull(forged)).error.code is ErrorCode.PROTOCOL
        await release(mesh)
        mesh.assert_empty()

    in_mesh(scenario)


def test_who_finds_no_staging_row_waits_in_line() -> None:
    """Two rows for 32 slots: two requests hold them, the third waits until one of them ends."""

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh, num_staging_rows=2)
        rows = [(await mesh.reserve(handoff=handoff)).grant.staging_row for handoff in ("ra-0", "rb-0")]
        assert rows == [0, 1]
        third = mesh.group.create_task(mesh.reserve(handoff="rc-0"))
        await mesh.clock.sleep(0.5)
        assert not third.done()
        await mesh.release("decode", "decode-0", "ra-0")
        assert (await third).grant.staging_row == 0
        for handoff in ("rb-0", "rc-0"):
            await mesh.release("decode", "decode-0", handoff)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_source_that_cannot_be_linked_refuses_the_reservation_by_name() -> None:
    """Unknown, of another start, or laid out otherwise: nothing is held, and the refusal says why."""

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh)
        for ref, code in (
            (WorkerRef(worker_id="prefill-9", incarnation="i9"), ErrorCode.WORKER_LOST),
            (WorkerRef(worker_id="prefill-0", incarnation="i-older"), ErrorCode.INCARNATION_CHANGED),
        ):
            answer = await mesh.reserve(source=ref)
            assert isinstance(answer, Refused)
            assert answer.error.code is code
            assert answer.error.message.startswith(f"decode-0 cannot read from {ref.worker_id}: ")
        await mesh.add(PrefillService, "prefill-1", tp=1, num_blocks=64)
        await mesh.clock.sleep(0.1)
        other = await mesh.reserve(source=WorkerRef(worker_id="prefill-1", incarnation="i-prefill-1"))
        assert isinstance(other, Reserved)
        await mesh.release("decode", "decode-0")
        mesh.assert_empty()

    in_mesh(scenario)


def test_two_requests_pull_at_the_same_time() -> None:
    """Each has its own lock, row and end; neither waits for the other."""

    async def scenario(mesh: Mesh) -> None:
        await pulling_pair(mesh)
        engine_of(mesh).reads.read_s.update({0: 0.5, 1: 0.5})
        sources = {handoff: await computed(mesh, handoff) for handoff in (HANDOFF, OTHER)}
        began = mesh.clock.monotonic()
        async with asyncio.TaskGroup() as group:
            for handoff, source in sources.items():
                group.create_task(mesh.pull(source, handoff=handoff))
        ends = {(await pull_ended(mesh)).handoff_id for _ in sources}
        assert ends == {HANDOFF, OTHER}
        assert mesh.clock.monotonic() - began < 0.6
        for handoff in sources:
            await release(mesh, handoff)
        mesh.assert_empty()

    in_mesh(scenario)
