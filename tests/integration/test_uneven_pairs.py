"""Pairs of workers with different numbers of ranks: the first request of a fresh mesh, and far more at once than decode has room for."""

from __future__ import annotations

import asyncio

import pytest

from common.engine.fake.tokens import fake_token
from contracts import ids
from contracts.handoff import HandoffState
from contracts.requests import FinishReason
from services.decode.service import DecodeService
from services.mixed.service import MixedService
from services.prefill.service import PrefillService
from tests.integration.test_broker_with_workers import ALL, PUSH
from tests.integration.whole_mesh import NUM_OUTPUT_TOKENS, Mesh, run_mesh

SIZES = (1, 2, 4)
NUM_AT_ONCE = 128
NUM_SLOTS = 16
DEADLINE_S = 30.0


def ended(mesh: Mesh, number: int) -> str:
    """Check that a request has finished with all of its tokens, none of which was cached before; its handoff."""
    handoff_id = ids.handoff_id(ids.request_id(number.to_bytes(10, "big")), 0)
    handoff = mesh.broker.handoff(handoff_id)
    assert handoff is not None
    assert (handoff.state, handoff.record.error) == (HandoffState.FINISHED, None)
    start = handoff.record.num_prompt_tokens
    assert mesh.text(handoff_id) == [fake_token(number, start + index) for index in range(NUM_OUTPUT_TOKENS)]
    frames = mesh.frames[handoff_id]
    assert {frame.finish_reason for frame in frames if frame.final} == {FinishReason.LENGTH}
    assert {frame.num_cached_tokens for frame in frames} == {0}
    return handoff_id


async def idle(mesh: Mesh) -> None:
    """Wait until nothing is under way and all memory is back."""
    while mesh.broker.num_in_flight:
        await mesh.clock.sleep(0.1)
    await mesh.clock.sleep(1.0)
    mesh.assert_empty()


@pytest.mark.parametrize("transfer", [PUSH, ALL], ids=["push", "pull"])
@pytest.mark.parametrize("prefill", SIZES)
@pytest.mark.parametrize("decode", SIZES)
def test_the_first_request_of_a_fresh_mesh_is_served(prefill: int, decode: int, transfer: dict[str, object]) -> None:
    """Every size against every size; the prompt is cold, and no token of it is said to have been cached."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.serve(1, mixed=False, cancel_after=None)
        await idle(mesh)
        ended(mesh, 1)

    run_mesh(scenario, {}, transfer, tp={PrefillService: prefill, DecodeService: decode, MixedService: 1})


@pytest.mark.parametrize("transfer", [PUSH, ALL], ids=["push", "pull"])
@pytest.mark.parametrize("prefill", SIZES)
def test_ranks_that_share_blocks_are_handed_over_to(prefill: int, transfer: dict[str, object]) -> None:
    """Each of four ranks is owed every second block of a prompt: the ledger closes, and two requests at once are served."""

    async def scenario(mesh: Mesh) -> None:
        async with asyncio.TaskGroup() as requests:
            for number in (1, 2):
                requests.create_task(mesh.serve(number, mixed=False, cancel_after=None), name=f"serve-{number}")
        await idle(mesh)
        for number in (1, 2):
            ended(mesh, number)

    sizes = {PrefillService: prefill, DecodeService: 4, MixedService: 1}
    run_mesh(scenario, {}, {**transfer, "dcp": 2}, tp=sizes)


@pytest.mark.parametrize(("prefill", "decode", "transfer"), [(4, 1, PUSH), (1, 4, ALL)], ids=["push", "pull"])
def test_128_requests_at_once_are_served(prefill: int, decode: int, transfer: dict[str, object]) -> None:
    """Eight times what decode has slots for: whoever waits is let in in time, and none is taken for late."""

    async def scenario(mesh: Mesh) -> None:
        began = mesh.clock.monotonic()
        async with asyncio.TaskGroup() as requests:
            for number in range(1, NUM_AT_ONCE + 1):
                requests.create_task(mesh.serve(number, mixed=False, cancel_after=None))
        assert mesh.broker.num_in_flight > NUM_SLOTS
        await idle(mesh)
        assert mesh.clock.monotonic() - began < DEADLINE_S
        assert len({ended(mesh, number) for number in range(1, NUM_AT_ONCE + 1)}) == NUM_AT_ONCE

    tp = {PrefillService: prefill, DecodeService: decode, MixedService: 1}
    run_mesh(scenario, {}, {**transfer, "num_slots": NUM_SLOTS}, tp=tp)
