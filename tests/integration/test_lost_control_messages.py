"""What becomes of requests when particular control messages are lost: each k-th of every kind, the first of one kind, or all of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from common.bus.faults import DIRECT, Trip
from common.engine.fake.tokens import fake_token
from contracts import ids, subjects
from contracts.handoff import HandoffState
from contracts.requests import FinishReason
from contracts.subjects import BrokerVerb, WorkerVerb
from services.decode.service import DecodeService
from services.mixed.service import MixedService
from services.prefill.service import PrefillService
from tests.integration.test_broker_with_workers import ALL, PUSH
from tests.integration.whole_mesh import NUM_OUTPUT_TOKENS, Mesh, run_mesh

NUM_REQUESTS = 8
MAX_MESSAGES = 10_000
DEADLINE_S = 30.0
PATIENCE_S = 10.0
"""Behind a deadline: until it has been told to all, and memory that nobody has released is back."""
TP = {PrefillService: 2, DecodeService: 4, MixedService: 1}
PARTS = "parts done"
"""The reports of parts, which are published and not asked."""
TOKENS, HINT = "tokens", "cancel hint"
"""What is told to routers, and what they tell workers: the router of these tests only listens, and has no means to get it again."""
PUBLISHED = {"ho": PARTS, "tok": TOKENS, "cancel": HINT}


def kind_of(subject: str) -> str:
    """The verb of a question, `PARTS`, `TOKENS`, `HINT`, or "answer"; nothing for what is told to people."""
    prefix, version, what, *_ = (*subject.split("."), "", "")
    if f"{prefix}.{version}" != subjects.PREFIX:
        return "answer"
    return subjects.verb_of(subject) if what == "rpc" else PUBLISHED.get(what, "")


class Losses:
    """Loses the messages that `is_lost` chooses by their kind and their number in it, from 1. `seen` counts them by kind.

    Whoever repeats a question without end, or without a pause, ends the test.
    """

    def __init__(self, is_lost: Callable[[str, int], bool]) -> None:
        self.is_lost = is_lost
        self.seen: Counter[str] = Counter()

    def deliveries(self, subject: str) -> Sequence[float]:
        """See `Faults.deliveries`."""
        kind = kind_of(subject)
        self.seen[kind] += 1
        if self.seen.total() > MAX_MESSAGES:
            pytest.fail(f"more than {MAX_MESSAGES} messages: {self.seen}")
        return () if kind and self.is_lost(kind, self.seen[kind]) else (0.0,)

    def trip(self, _subject: str) -> Trip:
        """The store is not meant."""
        return DIRECT


async def serve_all(mesh: Mesh, count: int) -> set[HandoffState]:
    """Serve some requests side by side until each has ended as it should; how they ended.

    A finished one has all of its tokens, any other one an error and no reason that a client could take for an end. Then all memory
    is back.
    """
    began = mesh.clock.monotonic()
    async with asyncio.TaskGroup() as requests:
        for number in range(1, count + 1):
            requests.create_task(mesh.serve(number, mixed=False, cancel_after=None))
    while mesh.broker.num_in_flight:
        await mesh.clock.sleep(0.1)
    assert mesh.clock.monotonic() - began < DEADLINE_S + PATIENCE_S
    states = set()
    for number in range(1, count + 1):
        handoff_id = ids.handoff_id(ids.request_id(number.to_bytes(10, "big")), 0)
        handoff = mesh.broker.handoff(handoff_id)
        assert handoff is not None
        states.add(handoff.state)
        finals = {(frame.finish_reason, frame.error is None) for frame in mesh.frames[handoff_id] if frame.final}
        if handoff.state is HandoffState.FINISHED:
            start = handoff.record.num_prompt_tokens
            expected = [fake_token(number, position) for position in range(start, start + NUM_OUTPUT_TOKENS)]
            assert mesh.text(handoff_id) == expected
            assert finals == {(FinishReason.LENGTH, True)}
        else:
            assert (None, False) in finals
    await mesh.clock.sleep(PATIENCE_S)
    mesh.assert_empty()
    return states


@pytest.mark.parametrize("transfer", [PUSH, ALL], ids=["push", "pull"])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_each_kth_message_is_lost_and_every_request_finishes(k: int, transfer: dict[str, Any]) -> None:
    """Questions, answers and reports alike: whatever is lost is asked for again, and nobody waits for ever."""

    async def scenario(mesh: Mesh) -> None:
        mesh.server.faults = faults
        assert await serve_all(mesh, NUM_REQUESTS) == {HandoffState.FINISHED}
        assert all(faults.seen[kind] >= k for kind in (WorkerVerb.RUN, BrokerVerb.ENDED, "answer"))

    faults = Losses(lambda kind, number: kind not in {TOKENS, HINT} and number % k == 0)
    run_mesh(scenario, {}, transfer, tp=TP)


@pytest.mark.parametrize(
    ("kind", "transfer"),
    [
        *((verb, PUSH) for verb in (WorkerVerb.PROMPT, WorkerVerb.RESERVE, WorkerVerb.RUN, WorkerVerb.COMMIT)),
        *((verb, PUSH) for verb in (BrokerVerb.SUBMIT, BrokerVerb.PREFILL_FINISHED, BrokerVerb.TAKEN_OVER)),
        *((verb, PUSH) for verb in (BrokerVerb.ENDED, WorkerVerb.RELEASE, PARTS)),
        *((verb, ALL) for verb in (WorkerVerb.PULL, BrokerVerb.PULL_ENDED, PARTS)),
    ],
    ids=str,
)
def test_the_first_messages_of_a_kind_are_lost_and_every_request_finishes(kind: str, transfer: dict[str, Any]) -> None:
    """Two of each kind, among them the acknowledgements of a release: they are asked again."""

    async def scenario(mesh: Mesh) -> None:
        mesh.server.faults = faults
        assert await serve_all(mesh, 2) == {HandoffState.FINISHED}
        assert faults.seen[kind] >= 2

    faults = Losses(lambda each, number: each == kind and number <= 2)
    run_mesh(scenario, {}, transfer, tp=TP)


@pytest.mark.parametrize(
    ("kind", "transfer", "state"),
    [
        (WorkerVerb.RESERVE, PUSH, HandoffState.FAILED),
        (WorkerVerb.RUN, PUSH, HandoffState.FAILED),
        (WorkerVerb.PULL, ALL, HandoffState.FAILED),
        (WorkerVerb.COMMIT, PUSH, HandoffState.FAILED),
        (BrokerVerb.PREFILL_FINISHED, PUSH, HandoffState.FAILED),
        (BrokerVerb.ENDED, PUSH, HandoffState.FAILED),
        (WorkerVerb.RELEASE, PUSH, HandoffState.FINISHED),
        (BrokerVerb.TAKEN_OVER, PUSH, HandoffState.FINISHED),
        (PARTS, PUSH, HandoffState.FINISHED),
        (BrokerVerb.PULL_ENDED, ALL, HandoffState.FINISHED),
    ],
    ids=str,
)
def test_all_messages_of_a_kind_are_lost_and_every_request_ends(
    kind: str, transfer: dict[str, Any], state: HandoffState
) -> None:
    """Whether there is another way to learn of it or none, as of the takeover: an answer, or an error by the deadline."""

    async def scenario(mesh: Mesh) -> None:
        mesh.server.faults = faults
        assert await serve_all(mesh, 2) == {state}
        assert faults.seen[kind] >= 2

    faults = Losses(lambda each, _number: each == kind)
    run_mesh(scenario, {}, transfer, tp=TP)
