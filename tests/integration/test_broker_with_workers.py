"""The broker with real workers on made-up engines: many handoffs at once, on a bus that loses, repeats and reorders."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from common.bus.faults import SeededFaults
from common.bus.storage import handoffs_config
from common.engine.fake.tokens import fake_token
from common.worker.settings import PulledRoles
from contracts import ids, subjects
from contracts.codec import decode
from contracts.handoff import HandoffRecord, HandoffState
from contracts.pull import Transfer
from contracts.requests import DisaggregatedRoute, FinishReason
from services.broker.settings import BrokerSettings
from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from tests.integration.whole_mesh import NUM_OUTPUT_TOKENS, Mesh, run_mesh

PUSH: dict[str, Any] = {}
STATES: dict[str, Any] = {"transfer": Transfer.PULL, "parallel_shard_pull": False}
ALL: dict[str, Any] = {"transfer": Transfer.PULL, "pull": PulledRoles.ALL, "num_staging_rows": 3}
GUESSING = {"num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("seed", "decode", "everybody"),
    [
        *((seed, PUSH, {}) for seed in range(4)),
        *((seed, STATES, {}) for seed in (4, 6)),
        *((seed, ALL, {}) for seed in (5, 7)),
        (8, PUSH, GUESSING),
        (17, STATES, GUESSING),
        (21, ALL, GUESSING),
    ],
    ids=str,
)
def test_every_handoff_ends_and_all_memory_comes_back(
    seed: int, decode: dict[str, Any], everybody: dict[str, Any]
) -> None:
    """Thirty requests over a bad bus, a third of them cancelled at some moment: all end, finished ones with the right tokens.

    One replica or two at prefill, one or two at decode, too few slots there for all at once: the broker need not know. Decode is
    pushed to, or pulls the states, or everything, with the cache of a draft head where all guess.
    """
    rng = random.Random(seed)
    faults = SeededFaults(rng, loss=0.1, repeat=0.1, max_delay_s=0.01, protected=(f"{subjects.PREFIX}.tok",))

    async def scenario(mesh: Mesh) -> None:
        mesh.server.faults = faults
        plans = [
            (number, number % 5 == 0, rng.uniform(0.0, 0.1) if number % 3 == 0 else None) for number in range(1, 31)
        ]
        async with asyncio.TaskGroup() as requests:
            for number, mixed, cancel_after in plans:
                requests.create_task(mesh.serve(number, mixed=mixed, cancel_after=cancel_after))
        while mesh.broker.num_in_flight:
            await mesh.clock.sleep(0.1)
        states: list[HandoffState] = []
        for number, _, cancel_after in plans:
            handoff_id = ids.handoff_id(ids.request_id(number.to_bytes(10, "big")), 0)
            handoff = mesh.broker.handoff(handoff_id)
            assert handoff is not None
            states.append(handoff.state)
            finals = [frame for frame in mesh.frames[handoff_id] if frame.final]
            if handoff.state is HandoffState.FINISHED:
                start = handoff.record.num_prompt_tokens
                expected = [fake_token(number, position) for position in range(start, start + NUM_OUTPUT_TOKENS)]
                assert mesh.text(handoff_id) == expected
                assert {frame.finish_reason for frame in finals} == {FinishReason.LENGTH}
                handed_over = isinstance(handoff.record.route, DisaggregatedRoute)
                assert handoff.record.drafts == (handed_over and bool(everybody))
            else:
                assert handoff.state is HandoffState.CANCELLED
                assert cancel_after is not None
                assert finals
        assert HandoffState.FINISHED in states
        assert HandoffState.CANCELLED in states
        await mesh.clock.sleep(1.0)
        mesh.assert_empty()

    dp = {PrefillService: 1 + seed % 2, DecodeService: 1 + seed // 2 % 2}
    run_mesh(scenario, dp, decode, everybody=everybody)


@pytest.mark.parametrize(
    ("seed", "transfer", "everybody"),
    [(0, PUSH, {}), (1, PUSH, {}), (2, STATES, {}), (3, ALL, {}), (4, PUSH, GUESSING), (5, ALL, GUESSING)],
    ids=str,
)
def test_every_handoff_goes_on_when_its_broker_dies(
    seed: int, transfer: dict[str, Any], everybody: dict[str, Any]
) -> None:
    """Five brokers die under thirty requests, at whatever moment: each request ends with all of its tokens, in its first attempt."""
    rng = random.Random(seed)

    async def scenario(mesh: Mesh) -> None:
        async with asyncio.TaskGroup() as requests:
            for number in range(1, 31):
                requests.create_task(mesh.serve(number, mixed=number % 5 == 0, cancel_after=None))
            for _ in range(5):
                await mesh.clock.sleep(rng.uniform(0.0, 0.15))
                await mesh.kill_broker()
                await mesh.clock.sleep(rng.uniform(0.0, 0.05))
                await mesh.start_broker()
        while mesh.broker.num_in_flight:
            await mesh.clock.sleep(0.1)
        bucket = await mesh.bus.ensure_bucket(handoffs_config(BrokerSettings().record_ttl_s))
        for number in range(1, 31):
            handoff_id = ids.handoff_id(ids.request_id(number.to_bytes(10, "big")), 0)
            entry = await bucket.get(handoff_id)
            assert entry is not None
            record = decode(entry.value, HandoffRecord)
            assert (record.state, record.error) == (HandoffState.FINISHED, None)
            start = record.num_prompt_tokens
            expected = [fake_token(number, position) for position in range(start, start + NUM_OUTPUT_TOKENS)]
            assert mesh.text(handoff_id) == expected
        await mesh.clock.sleep(1.0)
        mesh.assert_empty()

    dp = {PrefillService: 1 + seed % 2, DecodeService: 1 + seed // 2 % 2}
    run_mesh(scenario, dp, transfer, everybody=everybody)
