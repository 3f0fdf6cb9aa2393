"""What becomes of requests when what a real router tells and is told is lost: tokens, questions for them, cancels, hints, signs of life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from common.bus.faults import DIRECT, Trip
from contracts.handoff import HandoffState
from contracts.requests import FinishReason
from contracts.subjects import LINKS_BUCKET, ROUTERS_BUCKET, WORKERS_BUCKET, BrokerVerb, WorkerVerb
from tests.integration.routed_mesh import TIMEOUT_S, Client, Router, handoff_of, run_routed, tokens_of
from tests.integration.test_broker_with_workers import ALL, PUSH
from tests.integration.test_lost_control_messages import HINT, PARTS, TOKENS, TP, Losses
from tests.integration.whole_mesh import NUM_OUTPUT_TOKENS, Mesh

NUM_REQUESTS = 8
LONG = 400
"""Tokens of answers whose clients leave long before their end."""
STEP_S = 0.02
LEAVES_S = 1.0
AWHILE_S = 12.0
"""Twice as long as a sign of life counts."""
LIFE = "sign of life"
"""What workers and routers put into their buckets again and again."""
SOON_S = 5.0
"""Far less than the time of a request, and of an answer that nobody wants any more."""


class AllLosses(Losses):
    """Signs of life, too: those of each process are counted apart."""

    def trip(self, subject: str) -> Trip:
        """See `Faults.trip`. What is lost is not answered either."""
        if not subject.startswith(tuple(f"$KV.{each}." for each in (WORKERS_BUCKET, ROUTERS_BUCKET, LINKS_BUCKET))):
            return DIRECT
        self.seen[subject] += 1
        return Trip(lost=self.is_lost(LIFE, self.seen[subject]))


async def serve_some(router: Router, numbers: range) -> None:
    """Serve requests side by side: every fourth is over with its first token, every third client leaves in mid-answer."""
    async with asyncio.TaskGroup() as group:
        for number in numbers:
            options: dict[str, Any] = {"max_tokens": 1} if number % 4 == 0 else {}
            if number % 3 == 0:
                options = {"max_tokens": LONG, "leaves_after_s": LEAVES_S}
            group.create_task(router.serve(number, **options), name=f"client-{number}")


async def all_back_within(mesh: Mesh, limit_s: float) -> None:
    """All memory has to come back, at most so late."""
    began = mesh.clock.monotonic()
    while mesh.broker.num_in_flight or any(len(service.table) for service in mesh.services):
        assert mesh.clock.monotonic() - began < limit_s
        await mesh.clock.sleep(0.05)
    mesh.assert_empty()


def assert_served(client: Client) -> None:
    """It has all of its tokens, each once, or has left with the first ones."""
    if client.number % 3 == 0:
        assert client.ended == "left"
        assert client.token_ids == tokens_of(client.number, len(client.token_ids))
        return
    count = 1 if client.number % 4 == 0 else NUM_OUTPUT_TOKENS
    assert (client.ended, client.token_ids) == (FinishReason.LENGTH, tokens_of(client.number, count))


@pytest.mark.parametrize("transfer", [PUSH, ALL], ids=["push", "pull"])
@pytest.mark.parametrize("k", [4, 5])
def test_each_kth_message_is_lost_and_every_client_is_served(k: int, transfer: dict[str, Any]) -> None:
    """Whatever is lost, all at once: also what routers are told, their cancels, and the signs of life of everybody.

    All memory is back long before a deadline, that of clients who have left, too. (Lost tokens are asked for at decode, prefill and the
    broker in turn: with each second or third question lost, one of them would never be heard.)
    """

    async def scenario(mesh: Mesh, router: Router) -> None:
        await router.serve(2 * NUM_REQUESTS + 3)  # broker and pair have met: that is of other tests
        mesh.server.faults = faults
        for first in (1, 1 + NUM_REQUESTS):
            await serve_some(router, range(first, first + NUM_REQUESTS))
            await all_back_within(mesh, SOON_S)
            await mesh.clock.sleep(AWHILE_S)
        for client in router.clients.values():
            assert_served(client)
        assert all(faults.seen[kind] >= k for kind in (TOKENS, HINT, BrokerVerb.CANCEL, PARTS))
        assert faults.seen[WorkerVerb.REPLAY] > 0
        lives = [count for kind, count in faults.seen.items() if kind.startswith("$KV.")]
        assert (len(lives), min(lives) >= k) == (4, True)  # two workers, their link, and the router

    faults = AllLosses(lambda _kind, number: number % k == 0)
    run_routed(scenario, transfer, tp=TP, step_s=STEP_S)


@pytest.mark.parametrize("transfer", [PUSH, ALL], ids=["push", "pull"])
@pytest.mark.parametrize("num_replays", [0, 2], ids=["tokens", "tokens and first answers"])
def test_tokens_that_never_come_are_asked_for(num_replays: int, transfer: dict[str, Any]) -> None:
    """No frame reaches the router, and perhaps its first questions for them are lost as well: it has all, from the first attempts."""

    async def scenario(mesh: Mesh, router: Router) -> None:
        mesh.server.faults = faults
        await serve_some(router, range(1, 3))
        await serve_some(router, range(4, 5))
        for client in router.clients.values():
            assert_served(client)
            assert mesh.broker.handoff(handoff_of(client.number, 1)) is None
        assert faults.seen[TOKENS] > 0
        await all_back_within(mesh, SOON_S)

    faults = AllLosses(lambda kind, number: kind == TOKENS or (kind == WorkerVerb.REPLAY and number <= num_replays))
    run_routed(scenario, transfer, tp=TP, step_s=STEP_S)


def first_two(*kinds: str) -> Callable[[str, int], bool]:
    """Loses two messages of each of some kinds."""
    return lambda kind, number: kind in kinds and number <= 2


def every(*kinds: str) -> Callable[[str, int], bool]:
    """Loses all messages of some kinds."""
    return lambda kind, _number: kind in kinds


def only_later(kind: str, *, but: str) -> Callable[[str, int], bool]:
    """Loses the first two messages of a kind, and all of another one."""
    return lambda each, number: each == but or (each == kind and number <= 2)


@pytest.mark.parametrize("leaves_s", [0.015, LEAVES_S], ids=["before the takeover", "in mid-answer"])
@pytest.mark.parametrize(
    ("is_lost", "state", "limit_s"),
    [
        (every(HINT), HandoffState.CANCELLED, SOON_S),
        (first_two(BrokerVerb.CANCEL, HINT), HandoffState.CANCELLED, SOON_S),
        (first_two(BrokerVerb.CANCEL, WorkerVerb.RELEASE, HINT), HandoffState.CANCELLED, SOON_S),
        (every(BrokerVerb.CANCEL), HandoffState.FAILED, TIMEOUT_S + SOON_S),
        (only_later(HINT, but=BrokerVerb.CANCEL), HandoffState.FAILED, TIMEOUT_S + SOON_S),
        (every(BrokerVerb.CANCEL, HINT), HandoffState.FINISHED, LONG * STEP_S + SOON_S),
    ],
    ids=[
        "hints",
        "first cancels",
        "first cancels and releases",
        "cancels",
        "cancels and first hints",
        "cancels and hints",
    ],
)
@pytest.mark.parametrize("transfer", [PUSH, ALL], ids=["push", "pull"])
def test_what_a_client_that_left_has_taken_comes_back(
    is_lost: Callable[[str, int], bool],
    state: HandoffState,
    limit_s: float,
    leaves_s: float,
    transfer: dict[str, Any],
) -> None:
    """At once if the broker hears of it, however late; by the deadline if only the workers do, and with the answer's end if nobody does."""

    async def scenario(mesh: Mesh, router: Router) -> None:
        mesh.server.faults = faults
        client = await router.serve(1, max_tokens=LONG, leaves_after_s=leaves_s)
        assert client.ended == "left"
        assert bool(client.token_ids) == (leaves_s == LEAVES_S)
        await all_back_within(mesh, limit_s)
        handoff = mesh.broker.handoff(handoff_of(1))
        assert handoff is not None
        assert handoff.state is state
        assert faults.seen[BrokerVerb.CANCEL] > 0

    faults = AllLosses(is_lost)
    run_routed(scenario, transfer, tp=TP, step_s=STEP_S)
