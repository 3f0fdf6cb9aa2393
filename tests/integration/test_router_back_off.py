"""A mesh without room is asked less and less often, by each client at a moment of its own: never again at once, never for ever."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from common.bus.faults import NoFaults
from common.runtime.clock import Clock
from contracts import subjects
from contracts.errors import ErrorCode
from contracts.subjects import BrokerVerb, WorkerVerb
from tests.integration.routed_mesh import Router, all_back, run_routed
from tests.integration.whole_mesh import Mesh

NUM_ATTEMPTS = 8
NUM_CLIENTS = 12
LONG = 60
STEP_S = 0.25
NO_SLOT: dict[str, Any] = {"num_slots": 1, "reserve_wait_s": 0.0}
ONE_HANDOFF: dict[str, Any] = {"max_in_flight": 1}
FULL_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0)
"""Pauses doubled from `retry_delay_s` up to `max_retry_delay_s`. Chance takes up to half of each away."""
A_MOMENT_S = 1e-6


class Asked(NoFaults):
    """When the broker was asked to serve something, and how often a decode worker for memory."""

    def __init__(self, clock: Clock) -> None:
        self.times: list[float] = []
        self.verbs: Counter[str] = Counter()
        self._clock = clock

    def deliveries(self, subject: str) -> Sequence[float]:
        """See `Faults.deliveries`."""
        verb = subjects.verb_of(subject)
        self.verbs[verb] += 1
        if verb == BrokerVerb.SUBMIT:
            self.times.append(self._clock.monotonic())
        return super().deliveries(subject)


async def occupied(mesh: Mesh, router: Router, group: asyncio.TaskGroup) -> Asked:
    """Let one long answer take the only room that there is, and allow the others many attempts."""
    policy = dataclasses.replace(router.generator.policy, max_attempts=NUM_ATTEMPTS)
    router.generator = dataclasses.replace(router.generator, policy=policy)
    group.create_task(router.serve(1, max_tokens=LONG), name="occupant")
    decode = mesh.services[1]
    while decode.replicas.load.num_free_slots == decode.settings.num_slots:
        await mesh.clock.sleep(0.1)
    mesh.server.faults = asked = Asked(mesh.clock)
    return asked


@pytest.mark.parametrize(("decode", "broker"), [(NO_SLOT, {}), ({}, ONE_HANDOFF)], ids=["reserve", "submit"])
def test_a_refused_request_is_tried_again_later_and_later(decode: dict[str, Any], broker: dict[str, Any]) -> None:
    """By decode, which has no slot, or by the broker: each attempt asks once, pauses double up to their bound, and the last refusal stands."""

    async def scenario(mesh: Mesh, router: Router) -> None:
        async with asyncio.TaskGroup() as group:
            asked = await occupied(mesh, router, group)
            client = await router.serve(2)
            assert (client.ended, client.token_ids) == (ErrorCode.OVERLOADED, [])
            assert len(asked.times) == NUM_ATTEMPTS
            assert asked.verbs[WorkerVerb.RESERVE] == (NUM_ATTEMPTS if decode else 0)
            pauses = [after - before for before, after in zip(asked.times, asked.times[1:], strict=False)]
            for pause_s, full_s in zip(pauses, FULL_S, strict=True):
                assert full_s / 2 - A_MOMENT_S <= pause_s <= full_s + A_MOMENT_S
        await all_back(mesh)
        assert router.clients[1].ended == "length"

    run_routed(scenario, decode, broker=broker, step_s=STEP_S)


def test_clients_that_were_refused_together_do_not_come_back_together() -> None:
    """Each pause has a chance of its own: the mesh is not asked by all of them in one moment again."""

    async def scenario(mesh: Mesh, router: Router) -> None:
        async with asyncio.TaskGroup() as group:
            asked = await occupied(mesh, router, group)
            async with asyncio.TaskGroup() as clients:
                for number in range(2, 2 + NUM_CLIENTS):
                    clients.create_task(router.serve(number), name=f"client-{number}")
            assert {client.ended for client in router.clients.values() if client.number > 1} == {ErrorCode.OVERLOADED}
            assert len(asked.times) == NUM_CLIENTS * NUM_ATTEMPTS
            assert Counter(Counter(asked.times).values()) == {NUM_CLIENTS: 1, 1: NUM_CLIENTS * (NUM_ATTEMPTS - 1)}
        await all_back(mesh)

    run_routed(scenario, NO_SLOT, step_s=STEP_S)
