"""Workers of several replicas with fake engines: each request lives in one replica, and everything about it goes there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from common.bus.storage import LINKS_CONFIG
from common.engine.fake.engine import FakeEngine
from common.layout.refusal import PlanRefusedError
from common.runtime.clock import SystemClock
from common.runtime.virtual_time import VirtualClock, run_virtual
from common.worker.core.scheduler import StepLimits
from common.worker.engines import start_engines
from common.worker.replica_set import ReplicaSet
from common.worker.service import WorkerService
from contracts import subjects
from contracts.codec import encode
from contracts.errors import ErrorCode
from contracts.handoff import PrefillFinished, Reserved, max_granted_blocks
from contracts.links import LinkState
from contracts.requests import Accepted, CancelWork, Refused, SamplingParams, TokenFrame
from contracts.subjects import WorkerVerb
from contracts.workers import (
    DescribeRefused,
    DescribeWorker,
    ScanWorker,
    WorkerDescription,
    WorkerScan,
)
from services.decode.service import DecodeService
from services.mixed.service import MixedService
from tests.integration.worker_world import (
    EXPECTED,
    PROMPT,
    FaultyEngine,
    Mesh,
    Mute,
    in_mesh,
    mixed_run,
    pair,
    request_of,
)

A, B, C = "ra-0", "rb-0", "rc-0"


def in_use(service: WorkerService) -> list[int]:
    """Slots in use, by replica."""
    return [replica.pool.num_slots - replica.pool.num_free_slots for replica in service.replicas]


async def texts(mesh: Mesh, handoffs: Iterable[str]) -> dict[str, list[int]]:
    """The tokens of several requests that stream at once, each up to its final frame."""
    ids: dict[str, list[int]] = {handoff: [] for handoff in handoffs}
    finals: dict[str, TokenFrame] = {}
    while len(finals) < len(ids):
        frame = await mesh.frames.get()
        assert frame.index == len(ids[frame.handoff_id])
        ids[frame.handoff_id] += frame.token_ids
        if frame.final:
            assert frame.error is None
            finals[frame.handoff_id] = frame
    return ids


async def settle(mesh: Mesh, handoffs: Iterable[str]) -> None:
    """Release as the broker does at the end."""
    for handoff in handoffs:
        await mesh.release("prefill", "prefill-0", handoff)
        await mesh.release("decode", "decode-0", handoff)


def test_two_handoffs_at_once_use_both_replicas_on_both_sides() -> None:
    """Each lives in another replica from its reservation to its end, and streams the tokens of one uninterrupted sequence."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, {"dp": 2}, dp=2)
        granted = {}
        for handoff in (A, B):
            await mesh.send_prompt("prefill", "prefill-0", handoff)
            reserved = await mesh.reserve(handoff=handoff)
            assert isinstance(reserved, Reserved)
            assert await mesh.reserve(handoff=handoff) == reserved
            granted[handoff] = reserved
            assert await mesh.run(reserved) == Accepted(handoff_id=handoff)
        assert [granted[handoff].grant.dp_rank for handoff in (A, B)] == [0, 1]
        assert in_use(mesh.services["prefill-0"]) == in_use(mesh.services["decode-0"]) == [1, 1]
        for _ in range(2):
            finished = await mesh.heard.get()
            assert isinstance(finished, PrefillFinished)
            assert await mesh.commit(EXPECTED[0], finished.handoff_id) == Accepted(handoff_id=finished.handoff_id)
        assert await texts(mesh, (A, B)) == {A: EXPECTED, B: EXPECTED}
        await settle(mesh, (A, B))
        mesh.assert_empty()
        sources = {(report.handoff_id, report.source_dp_rank, report.source_rank) for report in mesh.reports}
        assert sources == {(A, 0, 0), (A, 0, 1), (B, 1, 0), (B, 1, 1)}

    in_mesh(scenario)


@pytest.mark.parametrize(("prefill_dp", "decode_dp"), [(3, 1), (1, 3), (2, 3)])
def test_any_number_of_replicas_hands_over_to_any_other(prefill_dp: int, decode_dp: int) -> None:
    """Six requests in a row of submissions: all end with the right tokens, every replica is used, all memory comes back."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, {"dp": prefill_dp}, dp=decode_dp)
        handoffs = [f"r{number}-0" for number in range(6)]
        used = set()
        for handoff in handoffs:
            await mesh.send_prompt("prefill", "prefill-0", handoff)
            reserved = await mesh.reserve(handoff=handoff)
            used.add(reserved.grant.dp_rank)
            assert await mesh.run(reserved) == Accepted(handoff_id=handoff)
        for finished in [await mesh.heard.get() for _ in handoffs]:  # all of them before the first takeover
            assert isinstance(finished, PrefillFinished)
            await mesh.commit(EXPECTED[0], finished.handoff_id)
        assert await texts(mesh, handoffs) == dict.fromkeys(handoffs, EXPECTED)
        assert used == set(range(decode_dp))
        assert {report.source_dp_rank for report in mesh.reports} == set(range(prefill_dp))
        await settle(mesh, handoffs)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_full_replica_does_not_block_the_others() -> None:
    """A reservation goes where there is room, and is refused only when no replica has any; what comes back is used again."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, dp=2, num_slots=1, max_step_tokens=16)
        grants = [(await mesh.reserve(handoff=handoff)).grant.dp_rank for handoff in (A, B)]
        assert grants == [0, 1]
        refused = await mesh.reserve(handoff=C)
        assert isinstance(refused, Refused)
        assert refused.error.code is ErrorCode.OVERLOADED
        await mesh.release("decode", "decode-0", B)
        again = await mesh.reserve(handoff="rd-0")
        assert isinstance(again, Reserved)
        assert again.grant.dp_rank == 1
        assert in_use(mesh.services["decode-0"]) == [1, 1]
        for handoff in (A, "rd-0"):
            await mesh.release("decode", "decode-0", handoff)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_sequence_whose_blocks_no_message_can_name_is_refused() -> None:
    """A grant names every block: the longest that fits into a message is granted, one more token is refused, as the record says.

    Who does both grants nothing, and takes it.
    """

    async def scenario(mesh: Mesh) -> None:
        num_blocks, block_size = 50_000, 16
        await pair(mesh, {"num_blocks": num_blocks}, num_blocks=num_blocks)
        await mesh.add(MixedService, "mixed-0", num_blocks=num_blocks)
        most = max_granted_blocks(num_blocks) * block_size
        assert most < num_blocks * block_size
        records = {name: service.record().max_sequence_tokens for name, service in mesh.services.items()}
        assert records == {"prefill-0": most, "decode-0": most, "mixed-0": num_blocks * block_size}
        refused = await mesh.reserve(SamplingParams(max_tokens=most - len(PROMPT) + 1, seed=1))
        assert refused.error.code is ErrorCode.PROMPT_TOO_LONG
        reserved = await mesh.reserve(SamplingParams(max_tokens=most - len(PROMPT), seed=1))
        assert len(reserved.grant.block_ids) * block_size == most
        await mesh.release("decode", "decode-0")
        mesh.assert_empty()

    in_mesh(scenario)


def test_what_fits_into_all_replicas_together_but_into_none_is_refused() -> None:
    """A sequence lives in one replica: the longest one is what one replica holds, and the record says so."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, dp=2, num_blocks=8)
        service = mesh.services["decode-0"]
        record = service.record()
        assert (record.dp, record.tp, record.num_blocks, record.num_slots) == (2, 1, 16, 64)
        assert (record.load.num_free_blocks, record.load.num_free_slots) == (16, 64)
        assert [(room.num_free_blocks, room.num_free_slots) for room in record.load.replicas] == [(8, 32), (8, 32)]
        assert record.max_sequence_tokens == 8 * 16
        refused = await mesh.reserve(SamplingParams(max_tokens=8 * 16, seed=1))
        assert refused.error.code is ErrorCode.PROMPT_TOO_LONG
        mesh.assert_empty()

    in_mesh(scenario)


def test_blocks_that_are_kept_for_answers_are_told_apart_from_free_ones() -> None:
    """Record and metrics say what a new sequence can have, and what only those can have that grow."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, dp=2, num_blocks=8, reserve_output_tokens=1)
        service = mesh.services["decode-0"]
        reserved = await mesh.reserve(SamplingParams(max_tokens=60, seed=1))
        rank = reserved.grant.dp_rank
        load = service.record().load
        assert (load.num_free_blocks, load.num_kept_blocks) == (16 - 3 - 1, 1)
        rooms = [(room.num_free_blocks, room.num_kept_blocks) for room in load.replicas]
        assert rooms == [(4, 1) if each == rank else (8, 0) for each in range(2)]
        assert not load.has_room(9 * 16, block_tokens=16)
        text = service.metrics.exposition().decode()
        for state, count in (("free", 4), ("kept", 1), ("held", 3), ("quarantined", 0)):
            assert f'pdmesh_worker_blocks{{dp_rank="{rank}",state="{state}"}} {count}.0' in text
        await mesh.release("decode", "decode-0")
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_cancel_and_a_release_reach_the_replica_of_their_request() -> None:
    """The hint stops the one request and keeps its memory, the release frees it; the other replica goes on."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, {"dp": 2}, dp=2)
        long = SamplingParams(max_tokens=2000, seed=9, temperature=0.0)
        for handoff in (A, B):
            await mesh.reserve(long, handoff)
            await mesh.commit(EXPECTED[0], handoff)
        await mesh.clock.sleep(0.5)
        service = mesh.services["decode-0"]
        assert [replica.scheduler.num_running for replica in service.replicas] == [1, 1]
        await mesh.bus.publish(subjects.cancel("decode-0", request_of(B)), encode(CancelWork(handoff_id=B)))
        await mesh.clock.sleep(0.5)
        assert [replica.scheduler.num_running for replica in service.replicas] == [1, 0]
        assert in_use(service) == [1, 1]
        await mesh.release("decode", "decode-0", B)
        assert in_use(service) == [1, 0]
        before = service.work.num_prefilled_tokens, len(service.table)
        await mesh.clock.sleep(0.5)
        assert [replica.scheduler.num_running for replica in service.replicas] == [1, 0]
        assert (service.work.num_prefilled_tokens, len(service.table)) == before
        await mesh.release("decode", "decode-0", A)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_deadline_gives_the_memory_of_every_replica_back() -> None:
    """With a broker that never speaks again, what was reserved ends by itself wherever it lives."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, {"dp": 2}, dp=2)
        for handoff in (A, B):
            await mesh.send_prompt("prefill", "prefill-0", handoff)
            await mesh.run(await mesh.reserve(handoff=handoff))
        assert in_use(mesh.services["decode-0"]) == [1, 1]
        await mesh.clock.sleep(60 + 5 + 3)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_drain_waits_for_every_replica() -> None:
    """It ends with the last request, whichever replica that is in."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, dp=2)
        for handoff in (A, B):
            await mesh.reserve(handoff=handoff)
        drain = mesh.group.create_task(mesh.hosts[1].drain())
        for handoff in (A, B):
            await mesh.clock.sleep(1.0)
            assert not drain.done()
            await mesh.release("decode", "decode-0", handoff)
        await drain
        refused = await mesh.reserve(handoff=C)
        assert refused.error.code is ErrorCode.DRAINING

    in_mesh(scenario)


def test_memory_in_quarantine_stays_with_its_replica() -> None:
    """A writer that is left at work in one replica keeps no memory of another, and its end gives back what it kept."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, dp=2)
        for handoff in (A, B):
            await mesh.reserve(handoff=handoff)
        replicas = mesh.services["decode-0"].replicas
        engine = replicas[1].engine
        assert isinstance(engine, FaultyEngine)
        engine.writers_left = 2
        for handoff in (A, B):
            await mesh.release("decode", "decode-0", handoff)
        assert [replica.pool.num_quarantined_blocks for replica in replicas] == [0, 4]
        await mesh.clock.sleep(3.0)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_worker_describes_all_replicas() -> None:
    """Rank `dp_rank * tp + tp_rank` is that rank of that replica; a rank beyond them is refused."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, {"dp": 2}, dp=2)

        async def describe(rank: int) -> Any:
            kinds = WorkerDescription | DescribeRefused
            return await mesh.ask("prefill", "prefill-0", WorkerVerb.DESCRIBE, DescribeWorker(rank=rank), kinds)

        found = [await describe(rank) for rank in range(4)]
        assert [answer.num_ranks for answer in found] == [4] * 4
        assert [(at.dp_rank, at.dp_size, at.tp_rank, at.tp_size) for at in (a.manifest.coordinates for a in found)] == [
            (0, 2, 0, 2),
            (0, 2, 1, 2),
            (1, 2, 0, 2),
            (1, 2, 1, 2),
        ]
        beyond = await describe(4)
        assert isinstance(beyond, DescribeRefused)
        assert beyond.error.message == "rank: 4 is not allowed; the rule is: 0 to 3"

    in_mesh(scenario)


async def test_a_scan_tells_what_each_replica_holds() -> None:
    """Ranks come replica after replica; blocks and slots of the second one are numbered from where the first one's end."""
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        others = asyncio.all_tasks()
        mesh = Mesh(group, SystemClock())  # a scan looks at the process in a thread, which virtual time does not have
        await mesh.lease.put()
        await mesh.add(DecodeService, "decode-0", tp=2, dp=2, reserve_output_tokens=8)
        for handoff in (A, B):
            await mesh.reserve(handoff=handoff)
        scan = await mesh.ask("decode", "decode-0", WorkerVerb.SCAN, ScanWorker(), WorkerScan)
        assert scan.handoff_ids == (A, B)
        assert scan.rank_sequences == ((1,), (1,), (2,), (2,))
        assert scan.held_blocks == (0, 1, 2, 2048, 2049, 2050)
        assert scan.num_kept_blocks == 2
        assert scan.held_slots == (0, 32)
        for task in asyncio.all_tasks() - others:
            task.cancel()


def test_a_mixed_worker_spreads_its_requests() -> None:
    """Each request runs from its prompt to its end in one replica; two at once use two."""

    async def scenario(mesh: Mesh) -> None:
        service = await mesh.add(MixedService, "mixed-0", dp=2)
        for handoff in (A, B):
            await mesh.send_prompt("mixed", "mixed-0", handoff)
            message = mixed_run(handoff_id=handoff, request_id=request_of(handoff))
            assert await mesh.ask("mixed", "mixed-0", WorkerVerb.RUN, message) == Accepted(handoff_id=handoff)
        assert in_use(service) == [1, 1]
        assert await texts(mesh, (A, B)) == {A: EXPECTED, B: EXPECTED}
        await mesh.clock.sleep(0.1)
        mesh.assert_empty()

    in_mesh(scenario)


def test_prompts_that_wait_for_memory_wait_in_their_own_replica() -> None:
    """With one slot a replica on prefill, a third prompt waits until a replica is free, and nobody else has to."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, {"dp": 2, "num_slots": 1, "max_step_tokens": 16})
        for handoff in (A, B, C):
            await mesh.send_prompt("prefill", "prefill-0", handoff)
            assert await mesh.run(await mesh.reserve(handoff=handoff)) == Accepted(handoff_id=handoff)
        first = {(await mesh.heard.get()).handoff_id for _ in range(2)}
        assert first == {A, B}
        prefill = mesh.services["prefill-0"]
        assert (prefill.record().load.num_waiting, in_use(prefill)) == (1, [1, 1])
        waiting = [replica.dp_rank for replica in prefill.replicas if replica.scheduler.num_waiting]
        await mesh.release("prefill", "prefill-0", (A, B)[waiting[0]])
        assert (await mesh.heard.get()).handoff_id == C
        await settle(mesh, (A, B, C))
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_worker_is_linked_once_whatever_its_replicas() -> None:
    """A link is between workers: all of their replicas, or none."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, {"dp": 2}, dp=3)
        assert await (await mesh.bus.ensure_bucket(LINKS_CONFIG)).keys() == ["prefill-0.decode-0"]
        link = await mesh.link()
        assert link is not None
        assert (link.state, link.topology) == (LinkState.LINKED, "dp2 tp2 -> dp3 tp1")

    in_mesh(scenario)


def test_replicas_of_different_sizes_are_no_worker() -> None:
    """Peers plan against replica 0 alone: a worker whose replicas differ does not start, and says in what."""

    async def main(clock: VirtualClock) -> None:
        engines = [
            FakeEngine(clock, worker_id="w", incarnation="i", dp_rank=dp_rank, dp=2, num_blocks=8 + dp_rank)
            for dp_rank in range(2)
        ]
        limits = StepLimits(max_step_tokens=16, prefill_chunk_tokens=16)
        with pytest.raises(PlanRefusedError, match=r"worker replica 1 rank 0, num_blocks: expected 8, found 9"):
            ReplicaSet(await start_engines(engines), limits, Mute(), release_timeout_ms=100)

    run_virtual(main)
