"""Reservations on a full decode worker: they wait their turn instead of being refused at once."""

from __future__ import annotations

import asyncio
from typing import Any

from contracts import subjects
from contracts.codec import encode
from contracts.errors import ErrorCode
from contracts.handoff import Reserved
from contracts.requests import CancelWork, Refused
from services.decode.service import DecodeService
from tests.integration.pulling_pair import pulling_pair
from tests.integration.worker_world import Mesh, in_mesh, request_of

A, B, C, D = "ra-0", "rb-0", "rc-0", "rd-0"


async def full(mesh: Mesh, **changes: Any) -> DecodeService:
    """A decode worker of two replicas with one slot each, both taken by A and B."""
    service = await mesh.add(DecodeService, "decode-0", dp=2, num_slots=1, max_step_tokens=16, **changes)
    assert isinstance(service, DecodeService)
    for handoff in (A, B):
        assert isinstance(await mesh.reserve(handoff=handoff), Reserved)
    return service


def ask(mesh: Mesh, handoff: str) -> asyncio.Task[Any]:
    """Reserve in the background."""
    return mesh.group.create_task(mesh.reserve(handoff=handoff), name=handoff)


def test_a_reservation_waits_for_memory_and_gets_it_in_its_turn() -> None:
    """First come, first served, in whichever replica memory comes back; the record counts who waits."""

    async def scenario(mesh: Mesh) -> None:
        service = await full(mesh)
        third = ask(mesh, C)
        await mesh.clock.sleep(0.5)
        fourth = ask(mesh, D)
        await mesh.clock.sleep(0.5)
        assert service.record().load.num_waiting == 2
        await mesh.release("decode", "decode-0", B)
        reserved = await third
        assert isinstance(reserved, Reserved)
        assert reserved.grant.dp_rank == 1
        assert reserved.prepare_ms >= 1000
        assert not fourth.done()
        await mesh.release("decode", "decode-0", A)
        assert (await fourth).grant.dp_rank == 0
        for handoff in (C, D):
            await mesh.release("decode", "decode-0", handoff)
        mesh.assert_empty()

    in_mesh(scenario)


def test_asking_again_while_it_waits_gives_both_the_same_answer() -> None:
    """A broker repeats what is not answered in its time: that is delivery, not a second reservation."""

    async def scenario(mesh: Mesh) -> None:
        service = await full(mesh)
        first = ask(mesh, C)
        await mesh.clock.sleep(1.0)
        again = ask(mesh, C)
        await mesh.clock.sleep(1.0)
        assert service.record().load.num_waiting == 1
        await mesh.release("decode", "decode-0", A)
        assert (await first).grant == (await again).grant
        for handoff in (B, C):
            await mesh.release("decode", "decode-0", handoff)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_wait_without_an_end_is_refused_and_leaves_nothing() -> None:
    """After `reserve_wait_s` it is refused as overloaded, to both who asked; with 0 s it is refused at once."""

    async def scenario(mesh: Mesh) -> None:
        service = await full(mesh, reserve_wait_s=2.0)
        began = mesh.clock.monotonic()
        first, again = ask(mesh, C), ask(mesh, C)
        for task in (first, again):
            answer = await task
            assert isinstance(answer, Refused)
            assert answer.error.code is ErrorCode.OVERLOADED
            assert "do not fit now" in answer.error.message
        assert 2.0 <= mesh.clock.monotonic() - began < 2.5
        assert service.record().load.num_waiting == 0
        for handoff in (A, B):
            await mesh.release("decode", "decode-0", handoff)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_refusal_names_what_there_was_not() -> None:
    """Staging rows beside slots, blocks without those that are kept for answers that grow, and how many others wait."""

    async def scenario(mesh: Mesh) -> None:
        changes = {"num_staging_rows": 1, "num_slots": 4, "reserve_output_tokens": 1, "reserve_wait_s": 2.0}
        service = await pulling_pair(mesh, **changes)
        assert isinstance(await mesh.reserve(handoff=A), Reserved)
        num_free = service.replicas[0].pool.num_free_blocks
        first = ask(mesh, B)
        await mesh.clock.sleep(1.0)
        second = ask(mesh, C)
        for task, line in ((first, "; 1 more wait in line"), (second, "")):
            answer = await task
            assert isinstance(answer, Refused)
            free = f"slots with a staging row free: {num_free - 1} and 0, with 1 more kept for answers that grow"
            assert answer.error.message.endswith(free + line)
        await mesh.release("decode", "decode-0", A)

    in_mesh(scenario)


def test_a_release_and_a_cancel_end_a_wait() -> None:
    """Nobody wants it any more: the wait ends as cancelled, and what comes free later goes to others."""

    async def scenario(mesh: Mesh) -> None:
        service = await full(mesh)
        released, cancelled = ask(mesh, C), ask(mesh, D)
        await mesh.clock.sleep(0.5)
        await mesh.release("decode", "decode-0", C)
        await mesh.bus.publish(subjects.cancel("decode-0", request_of(D)), encode(CancelWork(handoff_id=D)))
        for task in (released, cancelled):
            answer = await task
            assert isinstance(answer, Refused)
            assert answer.error.code is ErrorCode.CANCELLED
        assert service.record().load.num_waiting == 0
        for handoff in (A, B):
            await mesh.release("decode", "decode-0", handoff)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_line_that_is_full_takes_nobody_in() -> None:
    """At most `max_waiting` wait; one more is refused at once."""

    async def scenario(mesh: Mesh) -> None:
        await full(mesh, max_waiting=1)
        waiting = ask(mesh, C)
        await mesh.clock.sleep(0.5)
        began = mesh.clock.monotonic()
        answer = await mesh.reserve(handoff=D)
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.OVERLOADED
        assert mesh.clock.monotonic() - began < 0.1
        await mesh.release("decode", "decode-0", A)
        assert isinstance(await waiting, Reserved)
        for handoff in (B, C):
            await mesh.release("decode", "decode-0", handoff)
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_drain_sends_those_who_wait_elsewhere() -> None:
    """They hold nothing here: they are refused at once, and the drain waits for those who do."""

    async def scenario(mesh: Mesh) -> None:
        await full(mesh)
        waiting = ask(mesh, C)
        await mesh.clock.sleep(0.5)
        drain = mesh.group.create_task(mesh.hosts[0].drain())
        answer = await waiting
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.DRAINING
        assert not drain.done()
        for handoff in (A, B):
            await mesh.release("decode", "decode-0", handoff)
        await drain
        mesh.assert_empty()

    in_mesh(scenario)
