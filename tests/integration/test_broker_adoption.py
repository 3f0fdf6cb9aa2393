"""A broker dies, another one leads: handoffs in flight go on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from common.bus.memory import MemoryServer
from common.bus.storage import WORKER_TTL_S
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode
from contracts.events import EventName
from contracts.handoff import (
    CommitHandoff,
    Grant,
    HandoffList,
    HandoffRecord,
    HandoffState,
    PartsAnswer,
    PrefillFinished,
    PullHandoff,
    ReleaseHandoff,
    Reserved,
    ReserveDecode,
    RunPrefill,
)
from contracts.manifest import Role
from contracts.pull import PullEnded, Transfer
from contracts.requests import Accepted, Refused, ReplayTokens
from contracts.subjects import BrokerVerb, WorkerVerb
from services.broker.core.effects import StoreRecord
from services.broker.records import Outcome
from tests.integration.broker_world import (
    DECODE,
    HANDOFF,
    PREFILL,
    SOURCE,
    World,
    in_world,
    left_by_another,
    next_broker,
)
from tests.integration.scripted_worker import GRANT, refusing

OK = Accepted(handoff_id=HANDOFF)


def remembers(world: World, **finished: Any) -> None:
    """Let prefill answer `parts` from its own record, complete and finished."""
    done = PrefillFinished(handoff_id=HANDOFF, incarnation=PREFILL.incarnation, first_token=5, **finished)
    world.prefill.scripts[WorkerVerb.PARTS] = lambda _query: PartsAnswer(
        handoff_id=HANDOFF, reports=world.reports(), finished=done
    )


async def ends_well(world: World) -> None:
    """Decode takes over and ends the request."""
    await world.until(lambda: bool(world.decode.of(CommitHandoff)))
    assert await world.take_over() == OK
    assert await world.end() == OK
    await world.until(lambda: world.broker.num_in_flight == 0)
    assert (await world.record()).state is HandoffState.FINISHED
    assert world.frames.empty()


@pytest.mark.parametrize("heard", ["nothing", "the reports", "the reports and the end"])
def test_a_handoff_goes_on_while_prefill_computes(heard: str) -> None:
    """Whatever the dead broker had heard: grant, run and reports are asked for again, and the request ends as if nothing had been."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        await world.until(lambda: world.broker.handoff(HANDOFF).writing is None)  # type: ignore[union-attr]
        if heard != "nothing":
            await world.publish_parts(world.reports()[0])
        if heard == "the reports and the end":
            assert await world.finish_prefill() == OK
        await next_broker(world)
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        assert len(world.decode.of(ReserveDecode)) == 1
        if heard == "nothing":
            await world.publish_parts()
            assert await world.finish_prefill() == OK
        else:
            remembers(world)
        await ends_well(world)
        assert EventName.HANDOFF_ADOPTED in {event.event for event in await world.events()}

    in_world(scenario)


def test_the_total_begins_at_the_submit_whoever_ends_it() -> None:
    """The next broker counts on from what the record says: five seconds lay between submit and death."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        await world.clock.sleep(5)
        await next_broker(world)
        remembers(world)
        await ends_well(world)
        (end,) = [event for event in await world.events() if event.event is EventName.REQUEST_FINISHED]
        assert end.total_ms is not None
        assert 5_000 <= end.total_ms < 60_000

    in_world(scenario)


def test_a_handoff_goes_on_whose_record_is_behind() -> None:
    """The bucket knows of nothing but the submit: decode is asked for its grant, and answers with the one that it gave."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await world.stop_broker()
        record = left_by_another(world)
        bucket = await world.bus.ensure_bucket(world.broker._records._config)
        await bucket.create(HANDOFF, encode(record))
        remembers(world)
        await next_broker(world)
        await ends_well(world)

    in_world(scenario)


def test_a_pull_goes_on_under_its_lock() -> None:
    """The broker dies while decode reads: the next one asks under the same number, and hears what the other one was told."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        world.pulls(Role.CONV, Role.SSM)
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        await world.publish_parts()
        assert await world.finish_prefill() == OK
        await world.until(lambda: bool(world.decode.of(PullHandoff)))
        await world.until(lambda: world.broker.handoff(HANDOFF).writing is None)  # type: ignore[union-attr]
        remembers(world, source=SOURCE)
        ended = PullEnded(handoff_id=HANDOFF, incarnation="id", lock=1)
        world.decode.scripts[WorkerVerb.PARTS] = lambda _query: PartsAnswer(
            handoff_id=HANDOFF, reports=world.reports(transfer=Transfer.PULL), pull_ended=ended
        )
        await next_broker(world)
        await world.until(lambda: bool(world.decode.of(PullHandoff)))
        (pull,) = world.decode.of(PullHandoff)
        assert (pull.lock, pull.source) == (1, SOURCE)
        await ends_well(world)

    in_world(scenario)


@pytest.mark.parametrize("forgot", ["decode", "prefill"])
def test_a_worker_that_no_longer_knows_a_handoff_fails_it(forgot: str) -> None:
    """Another grant, or a refused run: both are released, and the router may try again."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        await world.until(lambda: world.broker.handoff(HANDOFF).writing is None)  # type: ignore[union-attr]
        if forgot == "decode":
            grant: Grant = msgspec.structs.replace(GRANT, generation=8)
            world.decode.scripts[WorkerVerb.RESERVE] = lambda message: Reserved(
                handoff_id=message.handoff_id, grant=grant, num_cached_tokens=0, prepare_ms=1.5
            )
        else:
            world.prefill.scripts[WorkerVerb.RUN] = refusing(ErrorCode.INCARNATION_CHANGED)
        await next_broker(world)
        frame = await world.frames.get()
        assert frame.error is not None
        assert frame.error.rule.retryable
        await world.until(lambda: world.broker.num_in_flight == 0)
        assert world.decode.of(ReleaseHandoff)
        assert world.prefill.of(ReleaseHandoff)
        assert (await world.record()).state is HandoffState.FAILED

    in_world(scenario)


@pytest.mark.parametrize("asked_by", ["router", "worker", "survey"])
def test_what_a_frozen_broker_took_on_behind_its_term_goes_on(asked_by: str) -> None:
    """It wrote its record when the next one had read all of them already: whoever speaks of it brings it to that one."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await world.stop_broker()
        await world.start_broker(fence=2)
        if asked_by == "survey":
            world.decode.scripts[WorkerVerb.HANDOFFS] = lambda _message: HandoffList(
                incarnation=DECODE.incarnation, handoff_ids=(HANDOFF,)
            )
        bucket = await world.bus.ensure_bucket(world.broker._records._config)
        await bucket.create(HANDOFF, encode(left_by_another(world)))
        remembers(world)
        match asked_by:
            case "router":
                asked = ReplayTokens(handoff_id=HANDOFF, index=0)
                assert await world.ask(BrokerVerb.OUTCOME, asked) == OK
            case "worker":
                assert await world.finish_prefill() == OK
            case _:
                world.broker.orphans.expect(DECODE)
        await ends_well(world)

    in_world(scenario)


def test_a_later_attempt_ends_the_one_before() -> None:
    """The router has given it up: its workers are released, nobody computes for it, and a late submit of it is refused."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        second: dict[str, Any] = {"handoff_id": "r1-1", "attempt": 1}
        assert await world.submit(**second) == Accepted(handoff_id="r1-1")
        await world.until(lambda: len(world.decode.of(ReleaseHandoff)) == 1)
        (release,) = world.decode.of(ReleaseHandoff)
        assert (release.handoff_id, release.reason) == (HANDOFF, "r1-1 has taken its place")
        assert (await world.record()).state is HandoffState.CANCELLED
        later = world.broker.handoff("r1-1")
        assert later is not None
        assert not later.terminal
        third: dict[str, Any] = {"handoff_id": "r1-2", "attempt": 2}
        assert await world.submit(**third) == Accepted(handoff_id="r1-2")
        await world.clock.sleep(2.0)
        answer = await world.submit(**second)
        assert answer == Accepted(handoff_id="r1-1")  # delivery, once more
        await world.clock.sleep(5.0)
        assert world.broker.handoff("r1-1") is None
        answer = await world.submit(**second)
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.CANCELLED

    in_world(scenario, keep_ended_s=3.0)


def test_two_attempts_that_a_broker_finds_are_one_request() -> None:
    """Both records were left: the later attempt goes on, whichever is read first."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await world.stop_broker()
        bucket = await world.bus.ensure_bucket(world.broker._records._config)
        for attempt in (1, 0):
            record = left_by_another(world, handoff_id=f"r1-{attempt}", attempt=attempt)
            await bucket.create(record.handoff_id, encode(record))
        await next_broker(world)
        await world.until(lambda: any(message.handoff_id == HANDOFF for message in world.decode.of(ReleaseHandoff)))
        later = world.broker.handoff("r1-1")
        assert later is not None
        assert not later.terminal

    in_world(scenario)


@pytest.mark.parametrize("told", ["takeover", "end"])
def test_what_a_worker_was_thanked_for_outlives_the_broker(told: str) -> None:
    """The answer to a takeover or an end comes after the record: the next broker need not be told again."""

    async def scenario(world: World, server: MemoryServer) -> None:
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        await world.publish_parts()
        assert await world.finish_prefill() == OK
        await world.until(lambda: bool(world.decode.of(CommitHandoff)))
        store, may_write = world.broker._records.store, asyncio.Event()

        async def later(effect: StoreRecord) -> Outcome:
            await may_write.wait()
            return await store(effect)

        world.broker._records.store = later  # type: ignore[method-assign]  # a bucket that takes its time
        answer = world.group.create_task(world.take_over() if told == "takeover" else world.end())
        await world.clock.sleep(1.0)
        assert not answer.done()
        may_write.set()
        assert await answer == OK
        entry = server.buckets[subjects.HANDOFFS_BUCKET].last(HANDOFF)
        assert entry is not None
        expected = HandoffState.DECODING if told == "takeover" else HandoffState.FINISHED
        assert decode(entry.value, HandoffRecord).state is expected

    in_world(scenario)


def test_a_worker_that_died_while_nobody_led_is_missed() -> None:
    """Its record has gone before the next broker listens, which never hears of it: what it decoded fails, and not at the deadline."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        await world.publish_parts()
        assert await world.finish_prefill() == OK
        await world.until(lambda: bool(world.decode.of(CommitHandoff)))
        assert await world.take_over() == OK
        await world.stop_broker()
        del world.decode.scripts["alive"]
        await world.clock.sleep(2 * WORKER_TTL_S)
        await world.start_broker()
        began = world.clock.monotonic()
        await world.until(lambda: world.broker.num_in_flight == 0)
        assert world.clock.monotonic() - began < 2 * WORKER_TTL_S
        record = await world.record()
        assert record.state is HandoffState.FAILED
        assert record.error is not None
        assert record.error.code is ErrorCode.WORKER_LOST

    in_world(scenario)
