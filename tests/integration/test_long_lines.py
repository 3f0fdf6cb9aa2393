"""A burst of eight times what decode holds, of long answers: who waits in line for longer than anything inside waits is not taken for late."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from common.worker.core.unclaimed import UNCLAIMED_S
from common.worker.settings import WorkerSettings
from contracts.errors import ErrorCode
from contracts.handoff import HandoffState
from contracts.requests import FinishReason
from services.broker.settings import BrokerSettings
from services.router.settings import RouterSettings
from tests.integration.routed_mesh import Client, Router, all_back, handoff_of, run_routed, tokens_of
from tests.integration.test_broker_with_workers import ALL, PUSH
from tests.integration.whole_mesh import Mesh

NUM_SLOTS = 4
NUM_AT_ONCE = 8 * NUM_SLOTS
TIMEOUT_S = 120.0
"""Of a request: longer than any wait here."""
BROKER, ROUTER = BrokerSettings(), RouterSettings(model=Path("fake"))
RESERVE_WAIT_S = WorkerSettings(worker_id="decode-0", model=Path("fake")).reserve_wait_s
INNER_S = (RESERVE_WAIT_S, BROKER.describe_timeout_s, BROKER.release_timeout_s, ROUTER.outage_patience_s, UNCLAIMED_S)
"""What is waited for inside, none of which has to do with a line; all of them shorter than `TIMEOUT_S`."""
DEFAULTS: dict[str, Any] = {"call_timeout_s": BROKER.call_timeout_s, "keep_ended_s": 2 * TIMEOUT_S}
"""Of the broker, but for how long the test can look at what has ended."""


async def burst(router: Router, num_tokens: int) -> list[Client]:
    """All ask at once; what they got, who waited longest for a first token last."""
    async with asyncio.TaskGroup() as group:
        for number in range(1, NUM_AT_ONCE + 1):
            group.create_task(router.serve(number, max_tokens=num_tokens, timeout_s=TIMEOUT_S), name=f"client-{number}")
    return sorted(router.clients.values(), key=lambda client: client.first_s or 0.0)


def assert_whole(client: Client, num_tokens: int) -> None:
    """It has its answer."""
    assert (client.ended, client.token_ids) == (FinishReason.LENGTH, tokens_of(client.number, num_tokens))


@pytest.mark.parametrize("transfer", [PUSH, ALL], ids=["push", "pull"])
def test_a_line_longer_than_every_inner_timeout_is_waited_out(transfer: dict[str, Any]) -> None:
    """Where decode lets them wait, each is served by its first attempt, in its turn; prefill keeps its prompt as long as that takes."""
    num_tokens = 30

    async def scenario(mesh: Mesh, router: Router) -> None:
        clients = await burst(router, num_tokens)
        last_s = clients[-1].first_s
        assert last_s is not None
        assert max(INNER_S) + 5.0 < last_s < TIMEOUT_S - 5.0
        for client in clients:
            assert_whole(client, num_tokens)
            handoff = mesh.broker.handoff(handoff_of(client.number))
            assert handoff is not None
            assert handoff.state is HandoffState.FINISHED
            assert mesh.broker.handoff(handoff_of(client.number, 1)) is None
        await all_back(mesh)

    settings = {"num_slots": NUM_SLOTS, "reserve_wait_s": TIMEOUT_S}
    run_routed(scenario, {**transfer, **settings}, broker=DEFAULTS, step_s=0.2)


@pytest.mark.parametrize("transfer", [PUSH, ALL], ids=["push", "pull"])
def test_a_line_longer_than_decode_waits_is_waited_out_by_the_router(transfer: dict[str, Any]) -> None:
    """With the settings that there are by themselves: who is refused at decode comes back, and each is served."""
    num_tokens = 15

    async def scenario(mesh: Mesh, router: Router) -> None:
        clients = await burst(router, num_tokens)
        last_s = clients[-1].first_s
        assert last_s is not None
        assert last_s > 2.5 * RESERVE_WAIT_S
        for client in clients:
            assert_whole(client, num_tokens)
        attempts = [mesh.broker.handoff(handoff_of(client.number, 2)) for client in clients]
        assert any(attempts)
        await all_back(mesh)

    settings = {"num_slots": NUM_SLOTS, "reserve_wait_s": RESERVE_WAIT_S}
    run_routed(scenario, {**transfer, **settings}, broker=DEFAULTS, step_s=0.1)


def test_a_line_that_nobody_waits_out_is_refused_as_full_and_never_as_late() -> None:
    """Far longer than all attempts together: who was not let in is told that there is no room, not that its time is over."""
    num_tokens = 40

    async def scenario(mesh: Mesh, router: Router) -> None:
        clients = await burst(router, num_tokens)
        refused = [client for client in clients if not client.token_ids]
        assert NUM_AT_ONCE // 8 < len(refused) < NUM_AT_ONCE - NUM_SLOTS
        least_s = ROUTER.max_attempts * RESERVE_WAIT_S
        for client in refused:
            assert client.ended == ErrorCode.OVERLOADED
            assert least_s <= client.ended_s < least_s + ROUTER.max_attempts * ROUTER.max_retry_delay_s
        for client in clients:
            if client.token_ids:
                assert_whole(client, num_tokens)
        await all_back(mesh)

    settings = {"num_slots": NUM_SLOTS, "reserve_wait_s": RESERVE_WAIT_S}
    run_routed(scenario, settings, broker=DEFAULTS, step_s=0.1)
