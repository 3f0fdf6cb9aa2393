"""A pull through the broker's shell: the lock, the reports, the record, and what people are shown of it."""

from __future__ import annotations

import msgspec
import pytest

from common.bus.memory import MemoryServer
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.events import EventName
from contracts.handoff import (
    CommitHandoff,
    HandoffState,
    PartsAnswer,
    PullHandoff,
    QueryParts,
    ReleaseHandoff,
    RunPrefill,
)
from contracts.manifest import Role
from contracts.pull import PullEnded, ShardState, Transfer
from contracts.requests import Accepted, Refused
from contracts.show import HandoffView, ShowHandoff
from contracts.subjects import BrokerVerb, WorkerVerb
from tests.integration.broker_world import DECODE, HANDOFF, SOURCE, World, in_world

OK = Accepted(handoff_id=HANDOFF)


async def pulling(world: World) -> None:
    """Bring the handoff to where decode was asked to pull its states."""
    world.pulls(Role.CONV, Role.SSM)
    assert await world.submit() == OK
    await world.until(lambda: bool(world.prefill.of(RunPrefill)))
    await world.publish_parts()
    assert await world.finish_prefill() == OK
    await world.until(lambda: bool(world.decode.of(PullHandoff)))


async def show(world: World, handoff_id: str = HANDOFF) -> HandoffView | Refused:
    """What the broker shows."""
    data = encode(ShowHandoff(handoff_id=handoff_id))
    reply = await world.bus.request(subjects.broker_rpc(BrokerVerb.SHOW), data, timeout=5.0)
    answer: HandoffView | Refused = decode(reply.data, HandoffView | Refused)  # type: ignore[arg-type]  # a union is not a type
    return answer


def test_a_pull_from_lock_to_end() -> None:
    """Decode reads after prefill's end and before the commit; the record names the lock while it is held, and never a secret."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await pulling(world)
        (run,) = world.prefill.of(RunPrefill)
        assert run.pulled == (Role.CONV, Role.SSM)
        (pull,) = world.decode.of(PullHandoff)
        assert (pull.lock, pull.source, pull.incarnation) == (1, SOURCE, "id")
        await world.until(lambda: world.broker.handoff(HANDOFF).writing is None)  # type: ignore[union-attr]
        record = await world.record()
        assert record.lock is not None
        assert (record.lock.number, record.lock.holder) == (1, DECODE)
        assert record.source == msgspec.structs.replace(SOURCE, secret="")
        assert not world.decode.of(CommitHandoff)
        await world.publish_parts(*world.reports(transfer=Transfer.PULL))
        assert await world.finish_pull() == OK
        await world.until(lambda: bool(world.decode.of(CommitHandoff)))
        record = await world.record()
        assert (record.state, record.lock) == (HandoffState.COMMITTED, None)
        assert [(shard.source_rank, shard.state) for shard in record.shards] == [
            (0, ShardState.DONE),
            (1, ShardState.DONE),
        ]
        assert all(one.num_done == one.num_parts for one in record.progress)
        assert {one.transfer for one in record.progress} == set(Transfer)
        await world.take_over()
        await world.end()
        await world.until(lambda: world.broker.num_in_flight == 0)
        names = [event.event for event in await world.events()]
        order = [EventName.PREFILL_FINISHED, EventName.REQUEST_LOCKED, EventName.REQUEST_UNLOCKED]
        assert [name for name in names if name in order] == order
        assert b"pdmesh_broker_pulled_bytes_total 2000.0" in world.metrics.exposition()

    in_world(scenario)


def test_lost_reports_and_a_lost_end_are_asked_for() -> None:
    """Whatever decode said may not have been heard: it is asked, and the handoff goes on."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await pulling(world)
        await world.until(lambda: len(world.decode.of(QueryParts)) > 1)
        assert not world.decode.of(CommitHandoff)
        ended = PullEnded(handoff_id=HANDOFF, incarnation="id", lock=1)
        world.decode.scripts[WorkerVerb.PARTS] = lambda _query: PartsAnswer(
            handoff_id=HANDOFF, reports=world.reports(transfer=Transfer.PULL), pull_ended=ended
        )
        await world.until(lambda: bool(world.decode.of(CommitHandoff)))

    in_world(scenario)


def test_a_pull_that_fails_is_told_with_its_code() -> None:
    """Both release, the router hears decode's error."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await pulling(world)
        error = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, message="rank 0 could not read source rank 1")
        assert await world.finish_pull(error=error) == OK
        assert (await world.frames.get()).error == error
        await world.until(lambda: world.broker.num_in_flight == 0)
        assert world.decode.of(ReleaseHandoff)
        assert world.prefill.of(ReleaseHandoff)
        record = await world.record()
        assert (record.state, record.lock) == (HandoffState.FAILED, None)

    in_world(scenario)


def test_the_end_of_a_pull_by_another_start_is_refused() -> None:
    """Its sender hears that the handoff belongs to another incarnation."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await pulling(world)
        answer = await world.finish_pull(incarnation="old")
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.INCARNATION_CHANGED
        assert not world.decode.of(CommitHandoff)

    in_world(scenario)


def test_a_handoff_can_be_looked_at() -> None:
    """While it lives every part with who owes it, what is missing first; later what its record says; no secret ever."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await pulling(world)
        view = await show(world)
        assert isinstance(view, HandoffView)
        assert view.num_parts == len(view.parts)
        owed = {(part.transfer, part.role) for part in view.parts if part.done != part.owed}
        assert owed == {(Transfer.PULL, Role.CONV), (Transfer.PULL, Role.SSM)}
        assert view.parts[0].transfer is Transfer.PULL
        assert view.parts[-1].transfer is Transfer.PUSH
        assert (view.told, view.settled) == (("decode", "prefill"), ())
        assert view.record.lock is not None
        assert "ab" * 16 not in encode(view).decode()
        await world.cancel()
        await world.until(lambda: world.broker.num_in_flight == 0)
        await world.clock.sleep(3.0)
        assert world.broker.handoff(HANDOFF) is None
        view = await show(world)
        assert isinstance(view, HandoffView)
        assert (view.record.state, view.parts, view.told) == (HandoffState.CANCELLED, (), ())
        unknown = await show(world, "nobody-0")
        assert isinstance(unknown, Refused)
        assert unknown.error.code is ErrorCode.UNKNOWN_HANDOFF

    in_world(scenario, keep_ended_s=1.0)


@pytest.mark.parametrize("missing", ["source", "digests"])
def test_a_prefill_that_does_not_bring_what_decode_was_promised(missing: str) -> None:
    """The right to read, or digests to verify: without them the handoff fails by name, and nothing is committed."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        if missing == "source":
            world.pulls(Role.SSM)
        else:
            reserve = world.decode.scripts[WorkerVerb.RESERVE]
            world.decode.scripts[WorkerVerb.RESERVE] = lambda message: msgspec.structs.replace(
                reserve(message),
                verify=True,  # type: ignore[type-var]  # it answers with a struct
            )
        assert await world.submit() == OK
        await world.until(lambda: bool(world.prefill.of(RunPrefill)))
        await world.publish_parts()
        await world.finish_prefill(source=None)
        error = (await world.frames.get()).error
        assert error is not None
        assert error.code is ErrorCode.PROTOCOL
        assert error.message.startswith(missing)
        assert not world.decode.of(CommitHandoff)

    in_world(scenario)
