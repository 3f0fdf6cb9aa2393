"""A broker that another one has taken the place of: what it is told is not lost in it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from common.bus.errors import BusTimeout
from common.bus.faults import SeededFaults
from common.bus.memory import MemoryServer
from common.runtime.clock import Deadline
from common.worker.broker_client import BrokerClient
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode
from contracts.handoff import CommitHandoff, HandoffRecord, HandoffState, RequestEnded, RunPrefill
from contracts.requests import Accepted, FinishReason, Refused, ReplayAnswer, ReplayTokens
from contracts.subjects import BrokerVerb
from services.broker.core.messages import first_record
from tests.integration.broker_world import DECODE, HANDOFF, World, in_world

OK = Accepted(handoff_id=HANDOFF)
LATER = 2
"""The fence of the term that follows."""


async def committed(world: World) -> None:
    """Bring a handoff to its commit, and let the bucket take all that was written."""
    assert await world.submit() == OK
    await world.until(lambda: bool(world.prefill.of(RunPrefill)))
    await world.publish_parts()
    assert await world.finish_prefill() == OK
    await world.until(lambda: bool(world.decode.of(CommitHandoff)))
    await world.until(lambda: world.broker.handoff(HANDOFF).writing is None)  # type: ignore[union-attr]


async def taken_by_another(world: World) -> None:
    """A broker of a later term puts its fence into the record."""
    bucket = await world.bus.ensure_bucket(world.broker._records._config)
    entry = await bucket.get(HANDOFF)
    assert entry is not None
    record = msgspec.structs.replace(decode(entry.value, HandoffRecord), fence=LATER)
    await bucket.update(HANDOFF, encode(record), entry.revision)


TOLD: dict[str, Callable[[World], Awaitable[Accepted | Refused]]] = {
    "a takeover": World.take_over,
    "an end": World.end,
    "a prefill's end": World.finish_prefill,
    "a pull's end": World.finish_pull,
    "a cancel": World.cancel,
}


@pytest.mark.parametrize("found_by", ["a takeover", "an end", "a cancel"])
def test_a_deposed_broker_thanks_nobody(found_by: str) -> None:
    """Neither for what shows it that another one leads, nor for anything later: whoever asked will ask again."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await committed(world)
        await taken_by_another(world)
        for tell in (TOLD[found_by], *TOLD.values()):
            with pytest.raises(BusTimeout):
                await tell(world)
        assert (await world.record()).fence == LATER
        exposed = world.metrics.exposition()
        assert b'pdmesh_rpc_handled_seconds_count{code="unanswered",verb="taken_over"}' in exposed

    in_world(scenario, keep_ended_s=300.0)


def test_what_a_deposed_broker_is_told_reaches_the_one_that_leads() -> None:
    """The worker repeats its last word until a broker has written it down."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await committed(world)
        await taken_by_another(world)
        with pytest.raises(BusTimeout):
            await world.take_over()
        ended = RequestEnded(
            handoff_id=HANDOFF, incarnation=DECODE.incarnation, num_tokens=12, finish_reason=FinishReason.LENGTH
        )
        client = BrokerClient(world.bus, world.clock)
        telling = world.group.create_task(client.deliver(ended, Deadline.after(world.clock, 50.0)), name="ended")
        await world.clock.sleep(5.0)
        assert not telling.done()
        await world.stop_broker()
        await world.start_broker(fence=LATER)
        assert await telling == OK
        record = await world.record()
        assert (record.state, record.fence, record.num_tokens) == (HandoffState.FINISHED, LATER, 12)

    in_world(scenario)


def test_a_broker_that_finds_its_key_taken_thanks_nobody_for_the_other_ones_handoff() -> None:
    """The router's submit, once more, is accepted, since the request is under way; who computes for it must be heard elsewhere."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await committed(world)
        await taken_by_another(world)
        await world.stop_broker()
        bucket = await world.bus.ensure_bucket(world.broker._records._config)
        entry = await bucket.get(HANDOFF)
        assert entry is not None
        await bucket.delete(HANDOFF)
        await world.start_broker()
        await bucket.create(HANDOFF, entry.value)
        assert await world.submit() == OK
        with pytest.raises(BusTimeout):
            await world.end()

    in_world(scenario)


async def outcome(world: World) -> object:
    """A router asks how a request ended."""
    reply = await world.bus.request(
        subjects.broker_rpc(BrokerVerb.OUTCOME), encode(ReplayTokens(handoff_id=HANDOFF, index=0)), timeout=1.0
    )
    return decode(reply.data, ReplayAnswer)  # type: ignore[arg-type]  # a union is not a type


ASKED: dict[str, Callable[[World], Awaitable[object]]] = {**TOLD, "an outcome": outcome}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_a_deposed_broker_does_not_call_unknown_what_the_next_one_has_begun(ask: Callable[..., Any]) -> None:
    """It never heard of that handoff, but its record is of a later term: the question is for whoever wrote it."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        bucket = await world.bus.ensure_bucket(world.broker._records._config)
        record = first_record(world.submit_request(), fence=LATER, deadline_at="2030-01-01T00:00:00+00:00")
        await bucket.create(HANDOFF, encode(record))
        with pytest.raises(BusTimeout):
            await ask(world)

    in_world(scenario)


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_a_broker_that_may_have_been_deposed_calls_nothing_unknown(ask: Callable[..., Any]) -> None:
    """While its lease is overdue, or the bucket does not answer, another one may lead: only afterwards the word is given."""

    async def scenario(world: World, server: MemoryServer) -> None:
        overdue = [True]
        world.broker._is_mute = lambda: overdue[0]
        with pytest.raises(BusTimeout):
            await ask(world)
        overdue[0] = False
        server.faults = SeededFaults(random.Random(0), store_loss=1.0)
        with pytest.raises(BusTimeout):
            await ask(world)
        server.faults = SeededFaults(random.Random(0))
        await world.clock.sleep(10.0)
        answer = await ask(world)
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.UNKNOWN_HANDOFF

    in_world(scenario)


def test_a_broker_that_may_have_been_deposed_answers_no_submit() -> None:
    """What it knows of workers may be of a term that is over: whoever leads is asked by the same message."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        overdue = [True]
        world.broker._is_mute = lambda: overdue[0]
        with pytest.raises(BusTimeout):
            await world.submit(num_prompt_tokens=0)
        overdue[0] = False
        assert isinstance(await world.submit(num_prompt_tokens=0), Refused)
        assert await world.submit() == OK

    in_world(scenario)


@pytest.mark.parametrize("data", [b"no record", None])
def test_what_stands_there_of_this_very_term_or_cannot_be_read_is_unknown(data: bytes | None) -> None:
    """No broker goes on with it: whoever asks need not wait."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        record = first_record(world.submit_request(), fence=1, deadline_at="2030-01-01T00:00:00+00:00")
        bucket = await world.bus.ensure_bucket(world.broker._records._config)
        await bucket.create(HANDOFF, encode(record) if data is None else data)
        answer = await world.end()
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.UNKNOWN_HANDOFF

    in_world(scenario)
