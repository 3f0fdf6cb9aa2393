"""A release is acknowledged when memory is back, and not before: however often it is asked for meanwhile, and whatever fails."""

from __future__ import annotations

import asyncio

import pytest

from common.bus.errors import BusTimeout
from common.bus.rpc import UnansweredError
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode
from contracts.handoff import PrefillFinished, Released, ReleaseHandoff, RequestEnded, Reserved, TakenOver
from contracts.requests import Accepted, CancelWork, FinishReason, Refused
from contracts.subjects import WorkerVerb
from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from tests.integration.worker_world import EXPECTED, HANDOFF, REQUEST, SAMPLING, FaultyEngine, Mesh, in_mesh, pair

RELEASE = ReleaseHandoff(handoff_id=HANDOFF, reason="test", tombstone_ms=1_000)


async def _release(mesh: Mesh, role: str, timeout_s: float) -> Released:
    """Ask once, as one delivery of the broker's."""
    subject = subjects.worker_rpc(role, f"{role}-0", WorkerVerb.RELEASE)
    return decode((await mesh.bus.request(subject, encode(RELEASE), timeout=timeout_s)).data, Released)


def _num_held(mesh: Mesh, role: str) -> int:
    return sum(len(replica.pool.held) for replica in mesh.services[f"{role}-0"].replicas)


async def _unanswered(mesh: Mesh, role: str) -> None:
    for _ in range(2):
        with pytest.raises(BusTimeout):
            await _release(mesh, role, 2.0)


async def _computed(mesh: Mesh) -> Reserved:
    """Reserve, and compute the prompt."""
    await mesh.send_prompt("prefill", "prefill-0")
    reserved = await mesh.reserve()
    assert isinstance(reserved, Reserved)
    assert await mesh.run(reserved) == Accepted(handoff_id=HANDOFF)
    finished = await mesh.heard.get()
    assert isinstance(finished, PrefillFinished)
    assert finished.first_token is not None
    assert await mesh.commit(finished.first_token, drafts=True) == Accepted(handoff_id=HANDOFF)
    return reserved


def test_prefill_acknowledges_no_release_while_its_engine_is_at_work() -> None:
    """What it keeps for the transfer stays as long, and all deliveries get the answer of the first."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await _computed(mesh)
        service = mesh.services["prefill-0"]
        assert isinstance(service, PrefillService)
        replica = service.replicas[0]
        async with replica.loop.lock:
            await _unanswered(mesh, "prefill")
            assert (_num_held(mesh, "prefill"), set(service.links._transfers._going)) == (1, {HANDOFF})
            assert set(service._prefills) == {HANDOFF}
            asked = mesh.group.create_task(_release(mesh, "prefill", 5.0))
            await mesh.clock.sleep(0.1)
        answer = await asked
        assert answer.response_rpc_ms is not None
        assert _num_held(mesh, "prefill") == 0
        assert not service.links._transfers._going
        assert not service._prefills
        assert (await _release(mesh, "prefill", 1.0)).response_rpc_ms is None, "what is over is known no more"

    in_mesh(scenario)


def test_repeats_of_a_release_do_not_wait_as_long_as_the_first() -> None:
    """They would pile up while an engine stands still, until the worker could be asked nothing: each hears nothing after two seconds."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await _computed(mesh)
        service = mesh.services["prefill-0"]
        async with service.replicas[0].loop.lock:
            first = mesh.group.create_task(service._release_asked(encode(RELEASE)))
            await mesh.clock.sleep(0.1)
            for _ in range(5):
                began = mesh.clock.monotonic()
                with pytest.raises(UnansweredError, match="not back yet"):
                    await service._release_asked(encode(RELEASE))
                assert mesh.clock.monotonic() - began == pytest.approx(2.0)
            assert not first.done()
        assert isinstance(await first, Released)
        assert _num_held(mesh, "prefill") == 0

    in_mesh(scenario)


def test_decode_says_at_each_delivery_what_came_of_its_guesses() -> None:
    """The first delivery's answer is lost; the next one's is the same, and comes when memory is back."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, {"num_speculative_tokens": 2}, num_speculative_tokens=2)
        await _computed(mesh)
        assert isinstance(await mesh.heard.get(), TakenOver)
        replica = mesh.services["decode-0"].replicas[0]
        async with replica.loop.lock:
            await _unanswered(mesh, "decode")
            asked = mesh.group.create_task(_release(mesh, "decode", 5.0))
            await mesh.clock.sleep(0.1)
            assert _num_held(mesh, "decode") == 1
        assert (await asked).guesses is not None
        assert _num_held(mesh, "decode") == 0
        await _release(mesh, "prefill", 1.0)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_release_of_what_ends_by_itself_waits_for_its_memory_too() -> None:
    """The last token is out, and the engine does not come to giving memory back."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await _computed(mesh)
        assert isinstance(await mesh.heard.get(), TakenOver)
        service = mesh.services["decode-0"]
        assert isinstance(service, DecodeService)
        replica, (sequence,) = service.replicas[0], service.table.sequences
        async with replica.loop.lock:
            await service.finish(sequence, finish_reason=FinishReason.STOP)
            await mesh.clock.sleep(0.1)
            assert not service.table.sequences
            assert _num_held(mesh, "decode") == 1
            await _unanswered(mesh, "decode")
        assert isinstance(await mesh.heard.get(), RequestEnded)
        assert _num_held(mesh, "decode") == 0

    in_mesh(scenario)


def test_nothing_of_a_handoff_begins_while_it_is_being_ended() -> None:
    """Though its tombstone's moment has passed. Hints to cancel it hold up no other hints."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        reserved = await mesh.reserve()
        assert isinstance(reserved, Reserved)
        other = await mesh.reserve(handoff="r2-0")
        assert isinstance(other, Reserved)
        service = mesh.services["decode-0"]
        async with service.replicas[0].loop.lock:
            asked = mesh.group.create_task(_release(mesh, "decode", 10.0))
            await mesh.clock.sleep(5.0)
            again = await mesh.reserve()
            assert isinstance(again, Refused)
            assert again.error.code is ErrorCode.CANCELLED
            for request, handoff in ((REQUEST, HANDOFF), ("r9", "r9-0")):
                await mesh.bus.publish(subjects.cancel("decode-0", request), encode(CancelWork(handoff_id=handoff)))
            await mesh.clock.sleep(0.1)
            assert service.table.is_buried("r9-0")
        await asked
        await mesh.clock.sleep(2.0)
        assert isinstance(await mesh.reserve(SAMPLING), Reserved), "once it is over, and its tombstone gone"
        for handoff in (HANDOFF, "r2-0"):
            await mesh.release("decode", "decode-0", handoff)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_drain_waits_for_memory_that_is_being_taken_back() -> None:
    """Another replica that is done first does not end it."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, dp=2)
        for handoff in (HANDOFF, "r2-0"):
            assert isinstance(await mesh.reserve(handoff=handoff), Reserved)
        service = mesh.services["decode-0"]
        drained = asyncio.Event()

        async def drain() -> None:
            await service.drain()
            drained.set()

        async with service.replicas[0].loop.lock:
            asked = mesh.group.create_task(_release(mesh, "decode", 10.0))
            mesh.group.create_task(drain())
            await mesh.clock.sleep(0.1)
            await mesh.release("decode", "decode-0", "r2-0")
            await mesh.clock.sleep(5.0)
            assert not drained.is_set()
        await asked
        await drained.wait()
        mesh.assert_empty()

    in_mesh(scenario)


def test_an_end_is_told_though_the_ranks_fail_to_give_memory_back() -> None:
    """It is nobody's until they do, which is asked for again; a release is answered all the same."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await _computed(mesh)
        for role in ("prefill", "decode"):
            engine = mesh.services[f"{role}-0"].replicas[0].engine
            assert isinstance(engine, FaultyEngine)
            engine.failing_releases = 2
        assert (await mesh.text())[0] == EXPECTED
        assert isinstance(await mesh.heard.get(), TakenOver)
        ended = await mesh.heard.get()
        assert isinstance(ended, RequestEnded)
        assert ended.quarantined
        assert (await _release(mesh, "prefill", 1.0)).quarantined
        for role in ("prefill", "decode"):
            (replica,) = mesh.services[f"{role}-0"].replicas
            assert (_num_held(mesh, role), replica.pool.num_quarantined_slots) == (0, 1)
        await mesh.clock.sleep(3.0)
        mesh.assert_empty()

    in_mesh(scenario)
